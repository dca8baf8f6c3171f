"""Environments and processes that fail: whose failure it is, what is tried again, and who goes on."""

import asyncio
import os
import re
import signal

import psutil
import pytest
from environment_pools import counted, played, pool_of
from own_processes import own_processes
from users_environments import FORGED
from waiting import until

from megatron_scalerl.environments.pool import EnvironmentFailed
from megatron_scalerl.environments.response import Response


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rewards.outages.PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr("megatron_scalerl.environments.pool.GRACE_S", 0.5)


async def others(pool, count=5):
    """Episodes that succeed: beside them a failure that repeats is wrong, if the class says so."""
    rows = [{"start": 1000 + n} for n in range(count)]
    turns = await asyncio.gather(*(played(pool, row, ["1", "2", "3"]) for row in rows))
    assert turns == [counted(1000 + n, 1, 2, 3) for n in range(count)]


def facts(failure):
    assert isinstance(failure, EnvironmentFailed), failure
    return failure.end.reason, failure.end.paid


async def test_a_step_that_kills_its_process_is_repeated_for_its_episode_alone(tmp_path):
    async with pool_of("Counting", tmp_path) as pool:
        rows = [{"start": n} for n in range(11)]
        texts = [["1", "exit", "2"] if n == 5 else ["1", "2", "3", "4"] for n in range(11)]
        turns = await asyncio.gather(*(played(pool, row, text) for row, text in zip(rows, texts, strict=True)))
        assert facts(turns.pop(5)) == ("died", False)
        assert turns == [counted(n, 1, 2, 3, 4) for n in range(11) if n != 5]
        assert pool.counters["died"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Counting", "CountingAsync"])
async def test_a_step_that_hangs_costs_its_process_and_no_other_episode(name, tmp_path):
    """In a thread, or in the event loop, which answers nobody then."""
    async with pool_of(name, tmp_path, timeout_s=2.0) as pool:
        calls = [played(pool, {"start": n}, ["1", "hang" if n == 3 else "2", "3"]) for n in range(8)]
        turns = await asyncio.gather(*calls)
        assert facts(turns.pop(3)) == ("hung", False)
        assert turns == [counted(n, 1, 2, 3) for n in range(8) if n != 3]


async def test_a_coroutine_that_hangs_is_cancelled_and_its_process_lives(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rewards.outages.TRIES", 2)
    monkeypatch.setattr("megatron_scalerl.environments.pool.GRACE_S", 60.0)
    async with pool_of("CountingAsync", tmp_path, timeout_s=0.5) as pool:
        pids = pool.pids
        assert facts(await played(pool, {}, ["1", "sleep"])) == ("hung", False)
        assert pool.pids == pids and pool.counters["restarts"] == 0


async def test_the_call_of_a_cancelled_caller_cannot_hang_unnoticed(tmp_path):
    async with pool_of("Counting", tmp_path, timeout_s=0.5) as pool:
        [pid] = pool.pids
        call = asyncio.create_task(played(pool, {}, ["hang"]))
        async with pool.episode({"start": 4}) as waiting:
            await waiting.reset()
            await until(lambda: pool.counters["steps"] == 1)
            call.cancel()
            await until(lambda: pid not in pool.pids)
            assert (await waiting.step(Response(text="1"))).reward == 5.0
        assert call.cancelled()


@pytest.mark.parametrize("name", ["Counting", "CountingAsync"])
@pytest.mark.parametrize("word", ["raise", "quit", "stop", "no_such_fault"])
async def test_an_exception_is_lost_or_wrong_as_the_class_says(word, name, tmp_path):
    async with pool_of(name, tmp_path) as pool:
        await others(pool)
        pids = pool.pids
        failure = await played(pool, {}, ["1", word])
        assert facts(failure) == ("raised", name == "CountingAsync")
        assert "Traceback" in str(failure) and failure.turns == counted(0, 1)
        assert pool.counters["raised"] == 1 and pool.counters["replays"] == 2
        # the last try was alone in a process of its own
        assert pool.pids[:1] == pids and len(pool.pids) == 2
    for number, failures in ((0, 2), (1, 1)):
        log = (tmp_path / "logs" / f"environment-{number}.log").read_text()
        assert log.count("step failed (raised):") == failures


INVALID = {
    "None": "cannot unpack",
    "('x', None)": "not enough values to unpack",
    "('x', float('nan'), False)": "not JSON compliant",
    "('x', float('-inf'), False)": "not JSON compliant",
    "('x', 10**400, False)": "reward",
    "('x', 2e6, False)": "the reward is 2000000",
    "('x', '1', False)": "reward",
    "('x', None, 0)": "done",
    "({'role': 'assistant', 'content': 'x'}, None, False)": "needs a role .user, tool.",
    "({'role': 'system', 'content': 'x'}, None, False)": "needs a role",
    "({'role': 'user'}, None, False)": "needs a role",
    "({'role': 'user', 'content': 7}, None, False)": "needs a role",
    "({'role': 'user', 'content': 'x', 'more': [[]]}, None, False)": "strings, numbers",
    "({'role': 'user', 'content': object()}, None, False)": "object",
    "([], None, False)": "no message",
    "('x', type('L', (list,), {})([[]] * 9), False)": "reward",
    "((lambda l: l.append(l) or (l, None, False))([]))": "dict",
    "((lambda l: [l := [l] for _ in range(5000)] and ('x', l, False))(0))": "recursion|reward",
}


async def test_processes_that_an_episode_has_spoiled_are_left_to_the_last(tmp_path):
    """All that happens in them afterwards fails; the three tries of the one that spoils take three of four."""
    async with pool_of("Spoiling", tmp_path, workers=4) as pool:
        assert (await played(pool, {}, ["spoil"])).end.reason == "raised"
        assert await asyncio.gather(*(played(pool, {}, ["1"]) for _ in range(30))) == [counted(0, 1)] * 30
        assert pool.counters["restarts"] == 0


async def test_a_process_in_which_all_fails_that_succeeds_elsewhere_is_replaced_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.environments.pool.MOST_FAILURES", 3)
    async with pool_of("Spoiling", tmp_path, workers=1) as pool:
        assert (await played(pool, {}, ["spoil"])).end.reason == "raised"
        [process] = pool._processes
        pending = process._replies[-1] = asyncio.get_running_loop().create_future()
        for n in range(2):
            assert await played(pool, {"start": n}, ["1"]) == counted(n, 1)
        line = "environment-0: replaced after 3 failures in a row, the last: OSError: Too many open files"
        assert str(await pending) == line
        # the extra one, which the first episode has spoiled, and this one
        assert await played(pool, {}, ["1"]) == counted(0, 1) and pool.counters["restarts"] == 2


async def test_what_is_no_turn_is_invalid(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rewards.outages.TRIES", 1)
    async with pool_of("Messages", tmp_path) as pool:
        for text, problem in INVALID.items():
            failure = await played(pool, {"first": "'x'"}, [text])
            assert facts(failure)[0] == "invalid", text
            assert re.search(problem, str(failure)), (text, str(failure))
        assert (await played(pool, {"first": "[]"}, [])).end.reason == "invalid"
        assert (await played(pool, {"first": "'x' * 2**21"}, [])).end.reason == "oversized"
        assert (await played(pool, {"first": "'x'"}, ["('x' * 2**21, None, False)"])).end.reason == "oversized"
        assert pool.counters["restarts"] == 0


async def test_the_pool_ends_where_only_failures_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rewards.outages.MAX_UNAVAILABLE", 4)
    async with pool_of("Counting", tmp_path) as pool, pool.episode({}) as waiting:
        await waiting.reset()
        for _ in range(3):
            assert facts(await played(pool, {"fault": "refused"}, [])) == ("unavailable", False)
        hanging = asyncio.create_task(played(pool, {}, ["hang"]))
        await until(lambda: pool.counters["steps"])
        with pytest.raises(RuntimeError, match="4 episodes in a row"):
            await played(pool, {"fault": "refused"}, [])
        for call in (hanging, waiting.step(Response(text="1")), played(pool, {}, [])):
            with pytest.raises(
                RuntimeError,
                match="4 episodes in a row could not be made, the last: ConnectionRefusedError: nobody listens",
            ):
                await call


@pytest.mark.parametrize("word", FORGED)
async def test_damage_costs_the_process_and_nothing_else(word, tmp_path):
    async with pool_of("Counting", tmp_path, timeout_s=60) as pool, pool.episode({"start": 1}) as waiting:
        await waiting.reset()
        assert facts(await played(pool, {}, ["1", word])) == ("died", False)
        assert (await waiting.step(Response(text="1"))).reward == 2.0


async def test_the_end_of_a_process_is_noticed_though_its_child_is_left(tmp_path):
    async with pool_of("Counting", tmp_path, timeout_s=600) as pool:
        failure = await played(pool, {}, [f"child {tmp_path / 'child'}"])
        assert failure.end.reason == "died" and "code 4" in str(failure)
        child = int((tmp_path / "child").read_text())
        await until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    assert own_processes(lambda process: "megatron_scalerl.environments.worker" in process.cmdline()) == []


async def test_signals_of_the_terminal_are_the_controllers(tmp_path):
    async with pool_of("Counting", tmp_path) as pool:
        [pid] = pool.pids
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert await played(pool, {}, ["1"]) == counted(0, 1)
        assert pool.pids == [pid]


async def test_a_class_that_is_gone_after_the_start_is_an_outage(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "fleeting_environment.py"
    module.write_text("from users_environments import *\n")
    async with pool_of("fleeting_environment:Counting", tmp_path) as pool:
        module.write_text("import gone")
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not pool.pids)
        failure = await played(pool, {}, ["1"])
        assert facts(failure) == ("unavailable", False) and "No module named 'gone'" in str(failure)
        module.write_text("from users_environments import *\n")
        assert await played(pool, {}, ["1"]) == counted(0, 1)
