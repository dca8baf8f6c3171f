"""A time limit that a stop of this process does not use up."""

import asyncio

import pytest
from waiting import passes

from megatron_scalerl.controller.weight_sync import _Phases
from megatron_scalerl.processes.child_process import time_limit
from megatron_scalerl.trainer.client import TrainerClient


async def within(seconds, work):
    async with time_limit(seconds):
        return await work


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


async def of_the_trainer(seconds, work):
    async with TrainerClient._deadline(None, seconds, "command", set):
        return await work


async def of_a_weight_update(seconds, work):
    return await _Phases(seconds)._limited(work)


@pytest.mark.parametrize("limited", [within, of_the_trainer, of_a_weight_update])
def test_the_time_in_which_this_process_stood_still_leaves_time_for_the_work(limited):
    async def work():
        loop = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: now() + 3600  # longer than the limit
        await passes()
        return "done"

    assert asyncio.run(limited(600.0, work())) == "done"
