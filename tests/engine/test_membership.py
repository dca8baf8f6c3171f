"""What an eviction does, whatever fails beside it."""

import asyncio

import pytest

from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl
from megatron_scalerl.controller.train import _record
from megatron_scalerl.engine.answers import EngineLost
from megatron_scalerl.engine.client import EngineClient, SamplingSpec
from megatron_scalerl.engine.membership import EngineState, Member, Membership


def test_an_eviction_that_cannot_be_recorded_still_ends_requests_and_waits():
    def full(member):
        if member.state is EngineState.DRAINING:
            raise OSError(28, "No space left on device")

    async def scenario():
        members = Membership(1, record=full)
        client = EngineClient(url="http://127.0.0.1:1", secret="s")
        members.join(0, client)
        waiting = asyncio.create_task(members.evicted(client))
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="No space left"):
            members.evict(client, "garbage")
        with pytest.raises(EngineLost, match="garbage"):
            await client.generate([1], sampling=SamplingSpec(max_tokens=1))
        return await asyncio.wait_for(waiting, 10)

    assert asyncio.run(scenario()) == "garbage"


def test_a_client_of_an_evicted_engine_opens_no_session():
    async def scenario():
        client = EngineClient(url="http://127.0.0.1:1", secret="s")
        client.abort("garbage")
        await client.close()
        with pytest.raises(EngineLost):
            await client.get("/health")
        return client._session

    assert asyncio.run(scenario()) is None


def test_a_change_of_an_engine_is_recorded_unless_the_disk_is_full(tmp_path, monkeypatch, caplog):
    engines = JsonlWriter(tmp_path / "engines.jsonl", private=True)
    member = Member(name="engine-3", state=EngineState.LOST, epoch=7, reason="exited")
    _record(engines, member)

    def full(*rows):
        raise OSError(28, "No space left on device", "engines.jsonl")

    monkeypatch.setattr(engines, "append", full)
    _record(engines, member)
    assert "a change of engine-3 is not recorded: [Errno 28]" in caplog.text
    [row] = read_jsonl(tmp_path / "engines.jsonl")
    assert (row["name"], row["state"], row["epoch"], row["reason"]) == ("engine-3", "lost", 7, "exited")
    assert "client" not in row
