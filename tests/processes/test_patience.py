"""A time limit that a stop of this process does not use up."""

import asyncio
import time

import pytest

from megatron_scalerl.processes.child_process import within


def test_work_that_takes_too_long_is_cancelled():
    cancelled = []

    async def work():
        try:
            await asyncio.sleep(3600)
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
        await asyncio.sleep(0.01)
        time.sleep(2.5)  # the event loop stands still for longer than the limit
        for _ in range(5):
            await asyncio.sleep(0.01)
        return "done"

    assert asyncio.run(within(2.0, work())) == "done"
