"""A time limit that a stop of this process does not use up."""

import asyncio

import pytest
from waiting import passes

from megatron_scalerl.processes.child_process import within


def test_work_that_takes_too_long_is_cancelled():
    cancelled = []

    async def work():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(TimeoutError):
        asyncio.run(within(0.1, work()))
    assert cancelled == [True]


def test_a_result_and_an_error_are_passed_on():
    async def result():
        return 3

    async def error():
        raise ValueError("five")

    assert asyncio.run(within(60, result())) == 3
    with pytest.raises(ValueError, match="five"):
        asyncio.run(within(60, error()))


def test_the_time_in_which_this_process_stood_still_leaves_time_for_the_work():
    async def work():
        loop = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: now() + 3600  # longer than the limit
        await passes()
        return "done"

    assert asyncio.run(within(600.0, work())) == "done"
