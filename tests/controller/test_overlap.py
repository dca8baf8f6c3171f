"""The batch that is sent while a step runs: when it is given up, and what is left behind."""

import asyncio
import contextlib

import pytest
from waiting import passes

from megatron_scalerl.controller.overlap import EarlyBatch, SentBatch


class StandInSender:
    """Sends when it is let; fails if told to."""

    def __init__(self, failure=None):
        self.failure = failure
        self.free = asyncio.Event()
        self.cancelled = False

    async def send(self, groups, policy_version):
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.failure is not None:
            raise self.failure
        return SentBatch(groups=tuple(groups), plan=None, step=policy_version + 1)


class StandInStream:
    """Gives one batch once it is there."""

    def __init__(self, *, ready):
        self.answering = asyncio.Event()
        if ready:
            self.answering.set()
        self.taken = 0

    async def take(self):
        await self.answering.wait()
        self.taken += 1
        return ("a", "b")


@contextlib.asynccontextmanager
async def nothing_left():
    """No task may be left behind."""
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_batch_that_is_there_is_sent_beside_the_step():
    async with nothing_left():
        sender, stream = StandInSender(), StandInStream(ready=True)
        async with EarlyBatch(sender, stream.take, 4) as early:
            await passes()  # the step
            asyncio.get_running_loop().call_later(0.05, sender.free.set)
            assert await early.batch() == SentBatch(groups=("a", "b"), plan=None, step=5)


async def test_a_batch_that_is_not_there_when_the_step_ends_is_not_taken():
    async with nothing_left():
        stream = StandInStream(ready=False)
        async with EarlyBatch(StandInSender(), stream.take, 4) as early:
            await passes()
            stream.answering.set()  # at the same moment
            assert await early.batch() is None
            await passes()
        assert stream.taken == 0


async def test_a_step_that_ends_at_once_takes_nothing():
    async with nothing_left():
        stream = StandInStream(ready=True)
        async with EarlyBatch(StandInSender(), stream.take, 4) as early:
            assert await early.batch() is None
        assert stream.taken == 0


@pytest.mark.parametrize("ready", [True, False])
async def test_the_failure_of_the_step_ends_the_sending(ready):
    async with nothing_left():
        sender = StandInSender()
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            async with EarlyBatch(sender, StandInStream(ready=ready).take, 4):
                await passes()
                raise RuntimeError("rank 1 is gone")
        assert sender.cancelled == ready


async def test_the_failure_of_the_sending_is_raised_after_the_step():
    async with nothing_left():
        sender = StandInSender(OSError("segment-00000.bin: no such file"))
        sender.free.set()
        async with EarlyBatch(sender, StandInStream(ready=True).take, 4) as early:
            await passes()
            with pytest.raises(OSError, match=r"segment-00000\.bin"):
                await early.batch()
