"""Runs of agents in environment processes: what they return, and how they end."""

import asyncio

import pytest
from environment_pools import pool_of
from waiting import until

from megatron_scalerl.environments import pool as pools
from megatron_scalerl.environments.pool import EnvironmentFailed
from megatron_scalerl.environments.response import Agent
from megatron_scalerl.rewards import outages
from megatron_scalerl.types import ENDS


class Session:
    """Asks nothing; `quiet` ends the wait for a request."""

    def __init__(self):
        self.tries = 0
        self.ends = 0
        self.quiet = asyncio.Event()

    def begin(self):
        self.tries += 1
        return Agent(base_url="http://127.0.0.1:1/v1", api_key="k", model="policy")

    def end(self):
        self.ends += 1

    async def silent(self):
        await self.quiet.wait()

    def responses(self):
        return []


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(outages, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(pools, "GRACE_S", 0.5)


async def ran(pool, text, session=None):
    """What run returns, or its failure."""
    try:
        async with pool.episode({"text": text}) as episode:
            return await episode.run(session or Session())
    except EnvironmentFailed as failure:
        return failure


REWARDS = {"True": True, "0.5": 0.5, "None": None, "__import__('numpy').float32(2)": 2.0}


@pytest.mark.parametrize("name", ["Runs", "RunsAsync"])
async def test_a_reward_may_come_with_metrics(name, tmp_path):
    """Of which the latest value of each name counts."""
    async with pool_of(name, tmp_path) as pool:
        async with pool.episode({"text": "(0.5, {'short': True, 'digits': 3})"}) as episode:
            assert await episode.run(Session()) == 0.5 and episode.metrics == {"short": 1.0, "digits": 3.0}
        for text in ("(0.5, {'x': float('nan')})", "(0.5, {'x': 'y'})", "(0.5, 1)", "(0.5,)"):
            assert (await ran(pool, text)).end.reason == "invalid"


@pytest.mark.parametrize("name", ["Runs", "RunsAsync"])
async def test_what_a_run_returns_is_the_reward(name, tmp_path):
    async with pool_of(name, tmp_path) as pool:
        assert pool.agent
        for text, reward in REWARDS.items():
            result = await ran(pool, text)
            assert result == reward and type(result) is type(reward)
        assert await ran(pool, "(agent.base_url, agent.api_key, agent.model)[1] == 'k'") is True
        assert pool.counters == {"episodes": 5}
        for text, reason in (
            ("float('nan')", "invalid"),
            ("'x'", "invalid"),
            ("2e6", "invalid"),
            ("1 / 0", "raised"),
        ):
            session = Session()
            assert (await ran(pool, text, session)).end.reason == reason
            assert session.tries == session.ends == 3


async def test_a_coroutine_that_hangs_is_cancelled_and_its_process_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "GRACE_S", 60.0)
    async with pool_of("RunsAsync", tmp_path, timeout_s=0.5) as pool:
        pids = pool.pids
        session = Session()
        call = asyncio.create_task(ran(pool, "hang", session))
        await until(lambda: session.tries)
        ended, _ = await asyncio.wait([call], timeout=1.5)
        assert not ended, "no limit while its requests are in flight"
        session.quiet.set()
        assert (await call).end.reason == "hung"
        assert pool.pids == pids and pool.counters == {"episodes": 1, "hung": 1}


async def test_a_thread_that_hangs_costs_its_process_and_other_runs_are_made_again(tmp_path):
    async with pool_of("Runs", tmp_path) as pool:
        hanging, other = Session(), Session()
        calls = [asyncio.create_task(ran(pool, "hang", hanging))]
        calls.append(asyncio.create_task(ran(pool, "time.sleep(1) or True", other)))
        await until(lambda: hanging.tries and other.tries)
        hanging.quiet.set()
        failure, reward = await asyncio.gather(*calls)
        assert failure.end.reason == "hung" and reward is True and other.tries >= 2


async def test_a_run_that_ends_its_process_is_tried_alone_at_last_only(tmp_path):
    async with pool_of("Runs", tmp_path, workers=2) as pool:
        for n in range(20):
            assert await ran(pool, str(n)) == n
        session = Session()
        failure = await ran(pool, "exit", session)
        assert (failure.end, session.tries) == (ENDS["died"], 3)
        assert [process.pid for process in pool._processes] == [None, None]
        assert [process._started for process in pool.extra] == [True, False]


async def test_the_run_of_a_cancelled_caller_is_cancelled(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "GRACE_S", 60.0)
    async with pool_of("RunsAsync", tmp_path) as pool:
        pids = pool.pids
        session = Session()
        call = asyncio.create_task(ran(pool, f"hang {tmp_path / 'began'}", session))
        await until((tmp_path / "began").exists)
        call.cancel()
        await until(lambda: not pool._processes[0]._replies)
        assert pool.pids == pids


async def test_runs_whose_process_ended_twice_do_not_wait_for_each_other(tmp_path):
    async with pool_of("Runs", tmp_path, workers=2) as pool:
        calls = [asyncio.create_task(ran(pool, "time.sleep(2) or True")) for _ in range(4)]
        for _ in range(2):
            await until(lambda: sum(len(process._replies) for process in pool._processes) == 4)
            for process in pool._processes:
                await process.end()
        await until(lambda: all(process._replies for process in pool.extra))
        assert await asyncio.gather(*calls) == [True] * 4


async def test_a_failure_outside_of_the_calls_is_lost_as_well(tmp_path):
    async with pool_of("Runs", tmp_path) as pool:
        for reason in ("silent", "changed", "template", "time", "prompt"):
            with pytest.raises(EnvironmentFailed):
                async with pool.episode({"text": "True"}) as episode:
                    await episode.run(Session())
                    raise EnvironmentFailed("no", reason=reason)
        assert [(fate.row, fate.problem) for fate in pool.record._latest] == [(episode._key, "no")] * 5
