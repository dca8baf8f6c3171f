"""Identical checks run once: which scores are shared, and between which callers."""

import asyncio

from verifier_pools import RIGHT, WRONG, pool_of, prompt, wrong
from waiting import passes
from worker_pools import shorten

from megatron_scalerl.rewards import pool as verifier_pool


def run(main, function, **rewards):
    """(what `main` returns, requests to the first process, without the setup)."""

    async def in_pool():
        async with pool_of(function, **rewards) as pool:
            return await main(pool), pool._workers._workers[0]._number - 1

    return asyncio.run(in_pool())


def ask(pool, text, extra=None):
    return pool.score(text, prompt(extra))


def test_identical_checks_run_once_at_a_time_and_later():
    async def main(pool):
        together = await asyncio.gather(*(ask(pool, "x") for _ in range(50)))
        later = [await ask(pool, "x") for _ in range(3)]
        return {score.reward for score in [*together, *later]}

    rewards, _ = run(main, "counting", workers=2)
    assert rewards == {1.0}


def test_text_reference_and_extra_columns_identify_a_check():
    async def main(pool):
        same = await ask(pool, "x", {"a": 1})
        others = [await ask(pool, "x "), await ask(pool, "x", {"a": 2}), await ask(pool, "x", {"a": 1})]
        return [same.reward, *(score.reward for score in others)]

    rewards, requests = run(main, "counting")
    assert rewards == [1.0, 2.0, 3.0, 1.0]
    assert requests == 3


def test_results_that_may_differ_next_time_are_not_cached(monkeypatch):
    async def main(pool):
        raised = [await ask(pool, "raise") for _ in range(2)]
        return raised, (await ask(pool, "x")).reward

    (raised, calls), requests = run(main, "counting")
    assert raised == [wrong("error")] * 2
    # each once more, after the reference
    assert calls == 7.0
    assert requests == 7

    async def hung(pool):
        return [await ask(pool, "spin") for _ in range(2)], await ask(pool, "7")

    shorten(monkeypatch, [2, 4])
    (scores, right), _ = run(hung, "faulty")
    assert scores == [wrong("timeout")] * 2
    assert right == RIGHT


def test_a_cancelled_caller_does_not_cancel_the_check_of_others():
    async def main(pool):
        calls = [asyncio.create_task(ask(pool, "8")) for _ in range(4)]
        await passes(1)
        calls[0].cancel()
        scores = await asyncio.gather(*calls, return_exceptions=True)
        return scores, await ask(pool, "8")

    ((first, *others), later), requests = run(main, "same")
    assert isinstance(first, asyncio.CancelledError)
    assert [*others, later] == [WRONG] * 4
    assert requests == 1


def test_a_check_whose_callers_were_all_cancelled_runs_again():
    async def main(pool):
        gone = asyncio.create_task(ask(pool, "7"))
        await passes(1)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        return await ask(pool, "7")

    assert run(main, "same")[0] == RIGHT


def test_cached_scores_are_bounded(monkeypatch):
    monkeypatch.setattr(verifier_pool, "CACHE_SIZE", 2)

    async def main(pool):
        rewards = [(await ask(pool, text)).reward for text in ("a", "b", "a", "c", "a", "b")]
        return rewards, len(pool._cache)

    (rewards, known), _ = run(main, "counting")
    assert rewards == [1.0, 2.0, 1.0, 3.0, 1.0, 4.0], "b was the least recently used when c came"
    assert known == 2
