"""Identical checks run once: which scores are shared, and between which callers."""

import asyncio

from verifier_pools import RIGHT, WRONG, pool_of, prompt, wrong
from waiting import passes
from worker_pools import shorten


def ask(pool, text, extra=None):
    return pool.score(text, prompt(extra))


def requests(pool):
    """Requests to the first process, without the setup."""
    return pool._workers._workers[0]._number - 1


async def test_identical_checks_run_once_at_a_time_and_later():
    async with pool_of("counting", workers=2) as pool:
        together = await asyncio.gather(*(ask(pool, "x") for _ in range(50)))
        later = [await ask(pool, "x") for _ in range(3)]
        assert {score.reward for score in [*together, *later]} == {1.0}


async def test_text_reference_and_extra_columns_identify_a_check():
    async with pool_of("counting") as pool:
        asked = [("x", {"a": 1}), ("x ", None), ("x", {"a": 2}), ("x", {"a": 1})]
        assert [(await ask(pool, *check)).reward for check in asked] == [1.0, 2.0, 3.0, 1.0]
        assert requests(pool) == 3


async def test_results_that_may_differ_next_time_are_not_cached(monkeypatch):
    async with pool_of("counting") as pool:
        assert [await ask(pool, "raise") for _ in range(2)] == [wrong("error")] * 2
        # each once more, after the reference
        assert (await ask(pool, "x")).reward == requests(pool) == 7
    shorten(monkeypatch, [2, 4])
    async with pool_of("faulty") as pool:
        assert [await ask(pool, "spin") for _ in range(2)] == [wrong("timeout")] * 2
        assert await ask(pool, "7") == RIGHT


async def test_a_cancelled_caller_does_not_cancel_the_check_of_others():
    async with pool_of("same") as pool:
        calls = [asyncio.create_task(ask(pool, "8")) for _ in range(4)]
        await passes(1)
        calls[0].cancel()
        first, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, asyncio.CancelledError)
        assert [*others, await ask(pool, "8")] == [WRONG] * 4
        assert requests(pool) == 1


async def test_a_check_whose_callers_were_all_cancelled_runs_again():
    async with pool_of("same") as pool:
        gone = asyncio.create_task(ask(pool, "7"))
        await passes(1)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert await ask(pool, "7") == RIGHT


async def test_cached_scores_are_bounded(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rewards.pool.CACHE_SIZE", 2)
    async with pool_of("counting") as pool:
        rewards = [(await ask(pool, text)).reward for text in ("a", "b", "a", "c", "a", "b")]
        assert rewards == [1.0, 2.0, 1.0, 3.0, 1.0, 4.0], "b was the least recently used when c came"
        assert len(pool._cache) == 2
