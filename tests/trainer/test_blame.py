"""The rank that a failure names: the one that exited unheard, otherwise the first that failed."""

import asyncio

import pytest
from fakes.rank import StandInRank, conversation, join, joined

from megatron_scalerl.trainer import messages
from megatron_scalerl.trainer.client import TrainerClient, TrainerError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "last_words, error",
    [
        (None, r"^trainer rank 1: the process exited unexpectedly \(rank 0: a collective failed\)$"),
        ("my peer is gone", r"^trainer rank 0: a collective failed$"),
    ],
    ids=["unheard", "heard"],
)
def test_a_connection_that_closes_after_a_peers_failure(last_words, error, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.trainer.client.BLAME_S", 240.0)
    blame, heard = TrainerClient._blame, asyncio.Event()

    def hears(client, failed):
        heard.set()
        return blame(client, failed)

    monkeypatch.setattr(TrainerClient, "_blame", hears)

    async def scenario(trainer, start):
        with StandInRank(trainer) as first:
            with StandInRank(trainer) as second:
                await join(start, first, second)
                asking = asyncio.create_task(trainer.manifest())
                await second.answer()
                await first.socket.send(messages.encode(messages.Failed(rank=0, error="a collective failed")))
                await heard.wait()
                if last_words:
                    await second.socket.send(messages.encode(messages.Failed(rank=1, error=last_words)))
                    second.socket.close(linger=10_000)
            with pytest.raises(TrainerError, match=error):
                await asyncio.wait_for(asking, 300)

    conversation(scenario)


def test_a_failure_is_not_held_up_by_peers_that_stay(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.trainer.client.BLAME_S", 0.3)

    async def scenario(trainer, first, second):
        asking = asyncio.create_task(trainer.manifest())
        await first.socket.send(messages.encode(messages.Failed(rank=0, error="no space", full="runs/r/x")))
        with pytest.raises(TrainerError, match=r"^trainer rank 0: no space$") as failed:
            await asyncio.wait_for(asking, 300)
        assert failed.value.full == "runs/r/x"

    joined(scenario)


def test_a_rank_that_left_before_the_command_was_sent_is_heard():
    async def scenario(trainer, first, second):
        await first.socket.send(messages.encode(messages.Failed(rank=0, error="no memory")))
        first.socket.close(linger=10_000)
        with pytest.raises(TrainerError, match=r"^trainer rank 0: no memory$"):
            await asyncio.wait_for(gone(trainer), 120)

    async def gone(trainer):
        """A command, once the client's socket does not reach rank 0 any more."""
        while await trainer._lost() != 0:
            await asyncio.sleep(0.05)
        await trainer.manifest()

    joined(scenario)
