"""Runs of agents in environment processes: what they return, and how they end."""

import asyncio

import pytest
from environment_pools import pool_of
from waiting import until

from megatron_scalerl.environments.pool import EnvironmentFailed
from megatron_scalerl.environments.response import Agent


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
    monkeypatch.setattr("megatron_scalerl.rewards.outages.PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr("megatron_scalerl.environments.pool.GRACE_S", 0.5)


async def ran(pool, text, session=None):
    """What run returns, with its metrics if it has some, or its failure."""
    try:
        async with pool.episode({"text": text}) as episode:
            reward = await episode.run(session or Session())
            return (reward, episode.metrics) if episode.metrics else reward
    except EnvironmentFailed as failure:
        return failure


REWARDS = {
    "True": True,
    "0.5": 0.5,
    "None": None,
    "__import__('numpy').float32(2)": 2.0,
    "(0.5, {'short': True, 'digits': 3})": (0.5, {"short": 1.0, "digits": 3.0}),
}
FAILURES = {"1 / 0": "raised"} | dict.fromkeys(
    ("float('nan')", "'x'", "2e6", "(0.5, {'x': float('nan')})", "(0.5, {'x': 'y'})", "(0.5, 1)", "(0.5,)"), "invalid"
)


@pytest.mark.parametrize("name", ["Runs", "RunsAsync"])
async def test_what_a_run_returns_is_the_reward(name, tmp_path):
    async with pool_of(name, tmp_path) as pool:
        assert pool.agent
        for text, reward in REWARDS.items():
            result = await ran(pool, text)
            assert result == reward and type(result) is type(reward)
        assert await ran(pool, "(agent.base_url, agent.api_key, agent.model)[1] == 'k'") is True
        assert pool.counters == {"episodes": 6}
        for text, reason in FAILURES.items():
            session = Session()
            assert (await ran(pool, text, session)).end.reason == reason
            assert session.tries == session.ends == 3


async def test_a_coroutine_that_hangs_is_cancelled_and_its_process_lives(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.environments.pool.GRACE_S", 60.0)
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


async def test_the_run_of_a_cancelled_caller_is_cancelled(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.environments.pool.GRACE_S", 60.0)
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
