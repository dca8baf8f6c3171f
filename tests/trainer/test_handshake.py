"""Who may join a run, and which messages are valid: real worker processes and raw sockets against a real client."""

import asyncio
import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from fakes.rank import WHERE, StandInRank, client, conversation, joined, ready
from waiting import passes, until

from megatron_scalerl.distributed import sockets
from megatron_scalerl.distributed.rendezvous import HostRendezvous
from megatron_scalerl.trainer import messages, worker
from megatron_scalerl.trainer.client import TrainerClient, TrainerError

pytestmark = pytest.mark.slow

WORKER = [sys.executable, "-m", "megatron_scalerl.trainer.worker"]


RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_cpu.yaml"


def environment(trainer, **changes):
    return {**os.environ, **trainer.worker_env(0), "MSRL_RECIPE": "nowhere.yaml", "OMP_NUM_THREADS": "1", **changes}


async def outcome(trainer, env, *, fails):
    """Exit status and last line of a worker, and the error of the client, which `fails` or goes on waiting."""
    process = await asyncio.create_subprocess_exec(*WORKER, env=env, stderr=subprocess.PIPE)
    waiting = asyncio.create_task(trainer.wait_ready(timeout_s=120))
    _, errors = await process.communicate()
    if not fails:
        waiting.cancel()
    [failure] = await asyncio.gather(waiting, return_exceptions=True)
    trainer.close()
    return process.returncode, errors.decode().strip().splitlines()[-1], str(failure)


def test_the_socket_of_several_hosts_may_have_an_address_of_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")

    async def scenario():
        trainer = TrainerClient(
            world_size=1, run_id="run", incarnation="1.0", secret="a secret", rendezvous=None, address="::1"
        )
        assert trainer.endpoint.startswith("tcp://[::1]:")
        return await outcome(trainer, environment(trainer, MSRL_RUN_ID="other"), fails=False)

    code, last, _ = asyncio.run(scenario())
    assert code == sockets.EXIT_REFUSED and "belongs to run other" in last


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"run_id": "other"}, "this controller to run run"),
        ({"incarnation": "1.1"}, "this controller is 1.0"),
        ({"world_size": 2}, "WORLD_SIZE: .* has 2, .* 1 ranks$"),
        ({"rank": 1}, "RANK: .* with 1, .* 0 to 0"),
    ],
)
def test_strangers_are_refused_with_a_reason(changes, reason):
    async def scenario(trainer, start):
        with StandInRank(trainer) as stranger:
            await stranger.hello(**({"rank": 0, "world_size": 1} | changes))
            refused = await stranger.answer()
            assert isinstance(refused, messages.Refused) and re.search(reason, refused.reason)
            assert not start.done()  # the client goes on waiting for its own

    conversation(scenario, world_size=1)


def test_a_wrong_secret_gets_no_answer():
    async def scenario():
        trainer = client()
        env = environment(trainer, MSRL_SECRET="another secret", MSRL_GREETING_TIMEOUT_S="1")
        return await outcome(trainer, env, fails=False)

    status, line, failure = asyncio.run(scenario())
    assert status == sockets.EXIT_REFUSED
    assert "MSRL_SECRET belongs to another run" in line
    assert failure == ""


def test_an_exception_reaches_the_client_with_its_rank():
    async def scenario():
        trainer = client()
        return await outcome(trainer, environment(trainer), fails=True)

    status, line, failure = asyncio.run(scenario())
    assert status == 1
    assert line.endswith("nowhere.yaml: there is no such file; it should be a recipe file")
    assert failure.startswith("trainer rank 0: ")
    assert failure.endswith("nowhere.yaml: there is no such file; it should be a recipe file")


def test_nobody_came():
    async def scenario():
        trainer = client(world_size=2)
        with pytest.raises(TrainerError, match=r"trainer rank 0, 1: .* start within 0.05 s"):
            await trainer.wait_ready(timeout_s=0.05)
        trainer.close()

    asyncio.run(scenario())


def test_missing_settings_are_named():
    with pytest.raises(ValueError, match=r"environment: .* MSRL_SECRET"):
        worker.WorkerSettings.from_environment({name: "1" for name in worker._VARIABLES if name != "MSRL_SECRET"})


def test_the_controller_s_public_key_alone_opens_nothing():
    async def scenario(trainer, start):
        with StandInRank(trainer, keys=zmq.curve_keypair()) as stranger, StandInRank(trainer) as ours:
            await stranger.hello(0)
            await ours.hello(0)
            assert await ours.answer() == messages.Welcome()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stranger.socket.recv(), 1)

    conversation(scenario)


def test_nobody_is_admitted_while_nobody_answers_for_the_door():
    async def scenario(trainer, start):
        trainer._socket.authenticator.stop()
        with StandInRank(trainer) as ours:
            await ours.hello(0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ours.socket.recv(), 1)

    conversation(scenario)


HOSTILE = {
    "empty": [b""],
    "no msgpack": [b"\xc1\xff\x00"],
    "another message": [msgspec.msgpack.encode({"type": "Hello", "rank": "zero"})],
    "nested without end": [b"\x91" * 100_000],
    "no UTF-8": [b"\x81\xa4type\xa5\xd0ello"],
    "a huge length": [b"\xdd\xff\xff\xff\xff"],
    "two frames": [b"a", b"b"],
    "no frame of its own": [b"", b"", b""],
    "a rank's message": [messages.encode(messages.Failed(rank=0, error="made up"))],
}


@pytest.mark.parametrize("frames", HOSTILE.values(), ids=HOSTILE)
def test_what_a_stranger_says_does_not_end_the_controller(frames):
    async def scenario(trainer, start):
        with StandInRank(trainer) as stranger, StandInRank(trainer) as ours:
            await stranger.socket.send_multipart(frames)
            await ours.hello(0)
            assert await ours.answer() == messages.Welcome()
            assert await ours.answer() == messages.Meet(rendezvous=WHERE)
            assert not start.done()

    conversation(scenario)


@pytest.mark.parametrize(
    "message, error",
    [
        ([b"\xc1"], r"^trainer rank 1: the 1 bytes received are no valid message"),
        ([b"a", b"b"], r"^trainer rank 1: a message has one frame, but 2"),
        ([messages.encode(ready(0))], r"^trainer rank 1: .* of rank 0"),
    ],
)
def test_a_rank_with_an_invalid_message_is_named(message, error):
    async def scenario(trainer, start):
        with StandInRank(trainer) as rank:
            await rank.hello(1)
            assert await rank.answer() == messages.Welcome()
            await rank.socket.send_multipart(message)
            with pytest.raises(TrainerError, match=error):
                await start

    conversation(scenario)


def test_a_value_of_another_kind_is_the_trainer_s_failure_not_the_user_s():
    async def scenario(trainer, rank):
        asking = asyncio.create_task(trainer.manifest())
        call = (await rank.answer()).call
        done = messages.Done(call=call, rank=0, value=msgspec.Raw(messages.encode("no manifest")))
        await rank.socket.send(messages.encode(done))
        with pytest.raises(TrainerError, match=r"^trainer rank 0: the 12 bytes received are no valid message"):
            await asking

    joined(scenario, world_size=1)


def test_a_stop_without_an_answer_ends_in_time_and_closes(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.trainer.client.STOP_TIMEOUT_S", 0.2)

    async def scenario(trainer, rank):
        pending = asyncio.create_task(trainer.manifest())  # a command that is never answered holds the line
        await passes(1)
        with pytest.raises(TrainerError, match=r"trainer rank 0: .* stop within 0.2 s"):
            await asyncio.wait_for(trainer.stop(), 120)
        assert trainer._socket.closed
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)

    joined(scenario, world_size=1)


@pytest.mark.parametrize("times, stay", [(3_000, False), (200, True)], ids=["come and go", "left open"])
def test_strangers_who_connect_between_commands_hold_up_neither_a_rank_nor_the_end(times, stay):
    async def scenario(trainer, start):
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        host, port = trainer.endpoint.removeprefix("tcp://").split(":")
        with contextlib.ExitStack() as strangers:
            for _ in range(times):
                stranger = strangers.enter_context(socket.create_connection((host, int(port)), timeout=60))
                if not stay:
                    stranger.close()
            waiting = asyncio.create_task(trainer.wait_ready(timeout_s=240))
            with StandInRank(trainer) as rank:
                await rank.hello(0, world_size=1)
                assert await rank.answer() == messages.Welcome()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            closing = threading.Thread(target=trainer.close, daemon=True)
            closing.start()
            closing.join(240)
            assert not closing.is_alive()

    conversation(scenario, world_size=1)


def test_pings_that_a_busy_rank_does_not_read_cost_it_nothing(monkeypatch):
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 200)
    monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT_MS", 8_000)
    monkeypatch.setattr("megatron_scalerl.trainer.client.PROBE_INTERVAL_MS", 5)
    lost, probes = TrainerClient._lost, []
    monkeypatch.setattr(TrainerClient, "_lost", lambda trainer: probes.append(trainer) or lost(trainer))

    async def scenario(trainer, start):
        with StandInRank(trainer) as rank:
            await rank.hello(0, world_size=1)
            await until(lambda: len(probes) > 2_000)  # without reading: longer than the heartbeat's time-out
            assert not start.done()
            await rank.socket.send(messages.encode(ready(0, dp_size=1)))
            await start
            assert await rank.answer() == messages.Welcome()

    conversation(scenario, world_size=1)


def test_on_several_hosts_everybody_waits_for_the_address_that_rank_0_has_bound():
    bound = HostRendezvous(host="127.0.0.1", port=4711)

    async def scenario(trainer, start):
        with StandInRank(trainer) as other, StandInRank(trainer) as first:
            await other.hello(1, bound=HostRendezvous(host="127.0.0.1", port=1))  # not its place to say
            assert await other.answer() == messages.Welcome()
            await first.hello(0)
            refused = await first.answer()
            assert isinstance(refused, messages.Refused) and "MSRL_BIND_HOST" in refused.reason
            await first.hello(0, bound=bound)
            assert await first.answer() == messages.Welcome()
            for rank in (first, other):
                assert await rank.answer() == messages.Meet(rendezvous=bound)
            assert trainer.rendezvous == bound

    conversation(scenario, rendezvous=None)


def test_a_rank_that_hangs_is_lost_after_the_heartbeat_s_limit(monkeypatch):
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 300)  # in this process: the controller asks, the rank answers
    monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT_MS", 8_000)

    async def scenario(trainer, start):
        env = environment(trainer, RANK="1", WORLD_SIZE="2", MSRL_RECIPE=str(RECIPE))
        process = await asyncio.create_subprocess_exec(*WORKER, env=env)
        try:
            await until(lambda: 1 in trainer._identities)  # then it waits for the address of rank 0
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(TrainerError, match="trainer rank 1: the process exited unexpectedly"):
                await asyncio.wait_for(start, 120)
        finally:
            process.kill()
            await process.wait()

    conversation(scenario, rendezvous=None)


def test_each_side_has_a_key_of_its_own_and_each_secret_its_own_pair():
    each = itertools.product(("a", "b"), sockets.Purpose, sockets.Side)
    keys = {sockets._keys(secret, purpose, side) for secret, purpose, side in each}
    assert len(keys) == 8 and len({public for public, _ in keys}) == 8
    with pytest.raises(ValueError, match=r"secret: .*empty"):
        sockets._keys("", sockets.Purpose.TRAINER, sockets.Side.PEER)
