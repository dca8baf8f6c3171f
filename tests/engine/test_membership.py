"""What an eviction does, whatever fails beside it."""

import asyncio

import pytest
from waiting import passes

from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl
from megatron_scalerl.controller.train import _record
from megatron_scalerl.engine.answers import EngineLost
from megatron_scalerl.engine.client import EngineClient, SamplingSpec
from megatron_scalerl.engine.membership import EngineState, Member, Membership
from megatron_scalerl.engine.watchdog import EngineDied


async def test_an_eviction_that_cannot_be_recorded_still_ends_requests_and_waits():
    def full(member):
        if member.state is EngineState.DRAINING:
            raise OSError(28, "No space left on device")

    members = Membership(1, record=full)
    client = client_of("engine-0")
    members.join(0, client)
    waiting = asyncio.create_task(members.evicted(client))
    await passes()
    with pytest.raises(OSError, match="No space left"):
        members.evict(client, "garbage")
    with pytest.raises(EngineLost, match="garbage"):
        await client.generate([1], sampling=SamplingSpec(max_tokens=1))
    assert await asyncio.wait_for(waiting, 120) == "garbage"


async def test_a_client_of_an_evicted_engine_opens_no_session():
    client = client_of("engine-0")
    client.abort("garbage")
    await client.close()
    with pytest.raises(EngineLost):
        await client.get("/health")
    assert client._session is None


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


def client_of(name):
    return EngineClient(url="http://127.0.0.1:1", secret="s", name=name)


def test_an_engine_that_joined_leaves_and_comes_back_under_its_number():
    changes = []
    members = Membership(1, devices=2, record=changes.append)
    held = []
    members.on_devices = held.append
    members.join(0, client_of("engine-0"))
    index = members.add("extra-7-0", 4)
    client = client_of("extra-7-0")
    members.join(index, client)
    assert (members.devices, members.left, members.alive[1]) == (6, 2, client)
    members.evict(client, "garbage")
    assert (members.devices, members.left, members.members[1].given_up) == (6, 1, False)
    members.lose(index, "garbage")
    assert (members.devices, members.left, members.members[1].given_up) == (2, 1, False)
    assert members.add("extra-7-0", 1) == index and members.devices == 3
    assert members.members[1].restarts == 1 and members.add("extra-7-1", 1) == 2
    assert held == [6, 2, 3, 4]
    states = [str(change.state) for change in changes if change.name == "extra-7-0"]
    assert states == ["starting", "stale", "draining", "lost", "starting"]
    with pytest.raises(AssertionError):
        members.add("engine-0", 1)
    with pytest.raises(AssertionError):
        members.add("extra-7-0", 1)


async def test_engines_that_leave_are_never_too_few_but_one_that_is_there_counts():
    members = Membership(2, minimum=2)
    few = asyncio.create_task(members.too_few())
    index = members.add("extra-7-0", 1)
    members.lose(index, "left")
    await passes()
    assert not few.done() and members.left == 2
    members.add("extra-7-0", 1)
    members.lose(0, "broken", given_up=True)
    await passes()
    assert not few.done() and members.left == 2
    members.lose(index, "left")
    with pytest.raises(EngineDied, match=r"1 engines are left, and the run needs 2 \(engine-0: broken\)"):
        await asyncio.wait_for(few, 120)


def test_devices_are_held_until_an_engine_is_given_up_and_its_host_is_gone():
    members = Membership(3, devices=2)
    for index, (given_up, host_gone) in enumerate(((False, True), (True, False), (True, True))):
        members.lose(index, "lost", given_up=given_up, host_gone=host_gone)
        assert members.devices == (6, 6, 4)[index]
