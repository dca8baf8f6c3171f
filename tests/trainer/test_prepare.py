"""Who is sent a batch, when, and how much of it waits in the controller: a real client and stand-in ranks."""

import asyncio

import msgspec
import pytest
from fakes.rank import StandInRank, conversation, join, joined
from random_policy import of_rollouts, plan_of, random_samples

from megatron_scalerl.batching.rollout_bytes import write
from megatron_scalerl.trainer import messages
from megatron_scalerl.trainer.client import TrainerError
from megatron_scalerl.types import StepReport

pytestmark = pytest.mark.slow

SAMPLES = random_samples(1, 9)
PLANS = [plan_of(SAMPLES, step=step, dp_size=2) for step in (1, 2)]
REPORT = StepReport(
    step=1, policy_version=1, loss=0.5, grad_norm=1.0, learning_rate=1e-3, tokens=9, seconds=0.1, metrics={}
)


async def frames(rank):
    """The frames of the next message but pings."""
    while True:
        found = await asyncio.wait_for(rank.socket.recv_multipart(), 120)
        if not isinstance(messages.decode_for_rank(found), messages.Ping):
            return found


async def finish(call, *ranks):
    for number, rank in enumerate(ranks):
        done = messages.Done(call=call, rank=number, value=msgspec.Raw(messages.encode(REPORT)))
        await rank.socket.send(messages.encode(done))


def test_one_rank_of_each_data_parallel_rank_gets_its_own_completions_and_all_get_the_step():
    async def scenario(trainer, first, second):
        plan = PLANS[0]
        await trainer.prepare(plan, of_rollouts([sample.rollout for sample in SAMPLES]))
        stepping = asyncio.create_task(trainer.step(1))
        for number, rank in enumerate((first, second)):
            message, *completions = await frames(rank)
            assert completions == [write(SAMPLES[i].rollout) for i in plan.numbers[number]]
            assert messages.decode_for_rank([message, *completions]).plan == plan.ranks[number]
            await rank.socket.send(messages.encode(messages.BatchReceived(rank=number, step=1)))
            assert await rank.answer() == messages.Step(call=1, step=1)
        await finish(1, first, second)
        assert await stepping == REPORT

    joined(scenario)


def test_a_peer_of_the_rank_that_holds_the_batch_is_sent_the_step_only():
    async def scenario(trainer, first, peer):
        await trainer.prepare(plan_of(SAMPLES), of_rollouts([sample.rollout for sample in SAMPLES]))
        stepping = asyncio.create_task(trainer.step(1))
        assert isinstance(await first.answer(), messages.Step)
        assert isinstance(await peer.answer(), messages.Prepare)
        await finish(1, first, peer)
        await stepping

    joined(scenario, dp_rank=(0, 0), holds_batch=(False, True), dp_size=(1, 1))


def reading():
    """(numbers of the batches that were read, what reads them)."""
    asked = []

    async def read(numbers):
        asked.append(tuple(numbers))
        return [write(SAMPLES[number].rollout) for number in numbers]

    return asked, read


def test_the_next_batch_is_read_while_a_step_runs_once_the_ranks_hold_the_batch_before():
    asked, read = reading()

    async def scenario(trainer, first, second):
        await trainer.prepare(PLANS[0], read)
        stepping = asyncio.create_task(trainer.step(1))
        preparing = asyncio.create_task(trainer.prepare(PLANS[1], read))
        await first.socket.send(messages.encode(messages.BatchReceived(rank=0, step=1)))
        for rank in (first, second):
            assert [type(await rank.answer()) for _ in range(2)] == [messages.Prepare, messages.Step]
        assert asked == list(PLANS[0].numbers) and not preparing.done()
        await second.socket.send(messages.encode(messages.BatchReceived(rank=1, step=1)))
        await preparing
        assert asked == [*PLANS[0].numbers, *PLANS[1].numbers] and not stepping.done()
        assert (await first.answer()).plan == PLANS[1].ranks[0]
        await finish(1, first, second)
        await stepping

    joined(scenario)


def test_no_rank_is_sent_the_next_batch_before_the_step(monkeypatch):
    """A rank holds one batch: sent a second one, it fails. Here the step cannot be sent to the second rank yet."""
    asked, read = reading()
    free = asyncio.Event()

    async def scenario(trainer, first, second):
        await trainer.prepare(PLANS[0], read)
        send = trainer._send

        async def slow(rank, *frames):
            if rank == 1 and len(frames) == 1:  # the step
                await free.wait()
            await send(rank, *frames)

        monkeypatch.setattr(trainer, "_send", slow)
        for number in range(2):
            trainer._note_received(number)
        stepping = asyncio.create_task(trainer.step(1))
        preparing = asyncio.create_task(trainer.prepare(PLANS[1], read))
        assert [type(await first.answer()) for _ in range(2)] == [messages.Prepare, messages.Step]
        assert asked == list(PLANS[0].numbers)
        free.set()
        await preparing
        answers = [type(await second.answer()) for _ in range(3)]
        assert answers == [messages.Prepare, messages.Step, messages.Prepare]
        await finish(1, first, second)
        await stepping

    joined(scenario)


def test_a_batch_that_no_rank_takes_ends_in_time():
    async def scenario(trainer, first, second):
        trainer._command_timeout_s = 0.3
        read = of_rollouts([sample.rollout for sample in SAMPLES])
        await trainer.prepare(PLANS[0], read)
        with pytest.raises(TrainerError, match=r"trainer rank 0, 1: .* a command within 0.3 s"):
            await trainer.step(1)
        with pytest.raises(TrainerError, match=r"trainer rank 0, 1: .* a batch within 0.3 s"):
            await trainer.prepare(PLANS[1], read)

    joined(scenario)


def test_a_store_that_returns_fewer_completions_sends_nothing():
    async def read(numbers):
        return [b""] * (len(numbers) - 1)

    async def scenario(trainer, first, second):
        count = len(PLANS[0].numbers[0])
        with pytest.raises(RuntimeError, match=f"^step 1: .* {count - 1} completions .* {count} samples"):
            await trainer.prepare(PLANS[0], read)

    joined(scenario)


@pytest.mark.parametrize("holds", [(True, True), (False, False)])
def test_one_rank_of_a_data_parallel_rank_receives_its_batches(holds):
    async def scenario(trainer, start):
        with StandInRank(trainer) as first, StandInRank(trainer) as second, pytest.raises(AssertionError):
            await join(start, first, second, dp_rank=(0, 0), holds_batch=holds, dp_size=(1, 1))

    conversation(scenario)
