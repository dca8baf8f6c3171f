"""Verifiers that are coroutine functions: a bound for all of them, retries, and what fails is lost and never paid."""

import asyncio
import contextlib
import json
import os
import signal
import socket

import pytest
from aiohttp import web
from verifier_pools import RIGHT, WRONG, pool_of, prompt, run_pool, wrong
from waiting import until
from worker_pools import starts

from megatron_scalerl.rewards import outages
from megatron_scalerl.rewards.worker import MOST_FAILURES
from megatron_scalerl.types import CompletionLost


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(outages, "PAUSES_S", (0.0, 0.0))


class Judge:
    """A judge on loopback.

    answer: coroutine function that makes the response to (text, how often it came); None breaks the connection.
    """

    def __init__(self, answer):
        self._answer = answer
        self.asked = []
        self.now = self.most = 0

    async def _serve(self, request):
        text = (await request.json())["answer"]
        self.asked.append(text)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            response = await self._answer(text, self.asked.count(text))
        finally:
            self.now -= 1
        if response is None:
            request.transport.abort()
        return response

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_post("/", self._serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
        finally:
            await runner.cleanup()


def score_of(value):
    return web.Response(text=json.dumps({"score": value}), content_type="application/json")


@contextlib.asynccontextmanager
async def judging(answer, **rewards):
    """(the judge, the pool that asks it, a function that scores a text)."""
    judge = Judge(answer)
    async with judge.running() as url, pool_of("users_judges:judged", **rewards) as pool:
        yield judge, pool, lambda text: pool.score(text, prompt({"url": url}))


async def judged(answer, texts, **rewards):
    """(scores or what was raised, the judge) of checks that come at once."""
    async with judging(answer, **rewards) as (judge, _, score):
        return await asyncio.gather(*map(score, texts), return_exceptions=True), judge


@pytest.mark.parametrize("workers, concurrency", [(1, 5), (2, 5), (4, 3)])
async def test_the_judge_sees_the_bound_and_no_more(workers, concurrency):
    full = asyncio.Barrier(concurrency)  # nobody is answered before so many ask at once

    async def answer(text, tries):
        await full.wait()
        return score_of(text == "7")

    texts = [str(n) for n in range(6 * concurrency)]
    scores, judge = await judged(answer, texts, workers=workers, concurrency=concurrency)
    assert scores == [RIGHT if text == "7" else WRONG for text in texts]
    assert judge.most == concurrency and sorted(judge.asked) == sorted(texts)


@pytest.mark.parametrize("statuses", [(429, 503), (500, 408)])
async def test_what_is_unavailable_is_tried_again(statuses):
    async def answer(text, tries):
        return web.Response(status=statuses[tries - 1]) if tries <= 2 else score_of(0.25)

    [score], judge = await judged(answer, ["7"])
    assert (score.reward, score.correct, score.reason) == (0.25, False, "")
    assert len(judge.asked) == outages.TRIES


BAD = {
    "status 500": web.Response(status=500),
    "ServerDisconnectedError": None,
    "ContentTypeError": web.Response(text="<html>", content_type="text/html"),
    "JSONDecodeError": web.Response(text='{"score": ', content_type="application/json"),
    "KeyError: 'score'": web.Response(text='{"error": "busy"}', content_type="application/json"),
    "it returned nan": web.Response(text='{"score": NaN}', content_type="application/json"),
    "it returned 1e": score_of(1e300),
    "it returned 'seven'": score_of("seven"),
    "it returned '1'": score_of("1"),
    "it returned None": score_of(None),
}


@pytest.mark.parametrize("reason", BAD)
async def test_a_judge_that_fails_or_answers_nonsense_pays_nobody(reason):
    async def answer(text, tries):
        made = BAD[reason]
        return made and web.Response(status=made.status, body=made.body, content_type=made.content_type)

    scores, judge = await judged(answer, ["7", "8"])
    assert all(isinstance(lost, CompletionLost) and lost.reason == "verifier_lost" for lost in scores)
    assert all(reason.removeprefix("status ") in str(lost) for lost in scores)
    assert len(judge.asked) == 2 * outages.TRIES


async def test_a_judge_that_does_not_answer_or_is_not_there_pays_nobody(monkeypatch):
    started = starts(monkeypatch)

    async def answer(text, tries):
        await asyncio.Event().wait()

    [late], _ = await judged(answer, ["7"], timeout_s=0.5)
    assert isinstance(late, CompletionLost) and "0.5 s" in str(late) and "computed for 0." in str(late)
    assert len(started) == 1, "the process lives on"

    with socket.socket() as bound:  # nobody listens
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/"
        async with pool_of("users_judges:judged") as pool:
            with pytest.raises(CompletionLost, match="Cannot connect"):
                await pool.score("7", prompt({"url": url}))


def set_pauses(monkeypatch, *pauses_s, wait):
    """The pauses between tries; `wait(pause_s)` is awaited in place of each above 10 s."""
    sleep = asyncio.sleep
    monkeypatch.setattr(outages, "PAUSES_S", pauses_s)
    monkeypatch.setattr(asyncio, "sleep", lambda pause_s: (wait if pause_s > 10 else sleep)(pause_s))


async def between_tries(monkeypatch, answer, texts, others):
    """(scores of the others, of the texts, what was asked): the others come after the first try of each text."""
    paid = asyncio.Event()
    set_pauses(monkeypatch, 100.0, 0.0, wait=lambda pause_s: paid.wait())
    async with judging(answer) as (judge, pool, score):
        checks = [asyncio.create_task(score(text)) for text in texts]
        await until(lambda: len(judge.asked) == len(texts) and not pool._first_tries)
        scores = await asyncio.gather(*map(score, others))
        paid.set()
        return scores, await asyncio.gather(*checks, return_exceptions=True), judge.asked


@pytest.mark.parametrize("breaking", [1, 16, 80])
async def test_answers_that_break_the_judge_are_wrong_whatever_their_share(breaking, monkeypatch):
    """The judge fails on some answers, again and again; between their tries 100 others are paid."""

    async def answer(text, tries):
        return web.Response(status=500) if text.startswith("breaks") else score_of(True)

    texts = [f"breaks {n}" for n in range(breaking)]
    others, broken, asked = await between_tries(monkeypatch, answer, texts, map(str, range(100)))
    assert others == [RIGHT] * 100 and broken == [wrong("unavailable")] * breaking
    # once more after all tries, and before that another answer
    assert len(asked) == 100 + (outages.TRIES + 2) * breaking
    assert all(asked.count(text) == outages.TRIES + 1 for text in texts)


async def test_an_answer_is_lost_where_the_judge_fails_for_one_that_it_judged_before(monkeypatch):
    """The outage ends for one check that began after the first failure, and begins again."""

    async def answer(text, tries):
        return web.Response(status=503) if text == "asked" or tries > 1 else score_of(True)

    others, [lost], asked = await between_tries(monkeypatch, answer, ["asked"], ["other"])
    assert others == [RIGHT] and isinstance(lost, CompletionLost)
    assert asked == ["asked", "other", "asked", "asked", "other"]


async def test_an_answer_that_is_judged_at_last_is_paid_what_the_judge_says(monkeypatch):
    async def answer(text, tries):
        return web.Response(status=503) if text == "asked" and tries <= outages.TRIES else score_of(True)

    _, scores, _ = await between_tries(monkeypatch, answer, ["asked"], ["other"])
    assert scores == [RIGHT]


async def test_a_slow_check_that_began_after_a_failure_decides_whether_it_was_the_answers(monkeypatch):
    set_pauses(monkeypatch, 100.0, 0.0, wait=lambda pause_s: until(lambda: "slow" in judge.asked))

    async def answer(text, tries):
        if text == "breaks":
            return web.Response(status=500)
        if text == "slow":
            await until(lambda: judge.asked.count("breaks") == outages.TRIES)  # it is not yet decided
        return score_of(True)

    async with judging(answer) as (judge, pool, score):
        await asyncio.gather(*map(score, map(str, range(40))))
        breaks = asyncio.create_task(score("breaks"))
        await until(lambda: "breaks" in judge.asked and not pool._first_tries)
        assert await asyncio.gather(breaks, score("slow")) == [wrong("unavailable"), RIGHT]


def results(answers, **rewards):
    """Scores or what was raised for the answers at once, by the judge that does what they say."""
    return run_pool("users_judges:faulty", answers, **rewards)[0]


@pytest.mark.parametrize("fault", ["exit", "leave"])
def test_an_answer_that_ends_the_process_takes_no_other_with_it(fault):
    answers = [*(f"7 {n}" for n in range(12)), fault, *(f"8 {n}" for n in range(12))]
    scores = results(answers, concurrency=8)
    assert scores == [RIGHT] * 12 + [wrong("crash")] + [WRONG] * 12


def test_an_exception_without_a_text_takes_no_other_with_it(monkeypatch):
    started = starts(monkeypatch)
    faults = {"unprintable": "Unprintable", "cancel": "CancelledError", "uncompilable": "SyntaxError"}
    *lost, seven, eight = results([*faults, "7 a", "8 b"])
    assert all(reason in str(completion) for reason, completion in zip(faults.values(), lost))
    assert (seven, eight) == (RIGHT, WRONG) and started == ["verifier-0"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["spin", "block"])
def test_a_coroutine_that_does_not_yield_ends_alone(fault, monkeypatch):
    """A busy one is wrong as any check that exceeds its limit; one that waits is lost, after three tries."""
    monkeypatch.setattr("megatron_scalerl.processes.worker_pool.GRACE_S", 1.0)
    monkeypatch.setattr("megatron_scalerl.rewards.pool.WAITING_SHARE", 0.01)  # a busy machine gives it little more
    started = starts(monkeypatch)
    answers = ["7 a", fault, "7 b", "8"]
    [first, faulty, *others] = results(answers, timeout_s=2.0)
    assert [first, *others] == [RIGHT, RIGHT, WRONG]
    alone = 1
    if fault == "spin":
        assert faulty == wrong("timeout")
    else:
        assert isinstance(faulty, CompletionLost)
        alone = outages.TRIES
    # the shared process has died once; the other one, which tries it alone, is started again after each try
    assert started.count("verifier-0") == 2 and alone <= started.count("verifier-1") <= alone + 1


async def test_a_process_that_is_killed_from_outside_loses_nothing_and_holds_nothing_up(tmp_path):
    """The checks of the killed process are repeated, one by one, and meanwhile new ones are made."""
    extra = {"file": str(tmp_path / "file")}

    async with pool_of("users_judges:held", concurrency=16) as pool:
        [worker] = pool._workers._workers
        calls = [asyncio.create_task(pool.score(f"held {n}", prompt(extra))) for n in range(16)]
        await until(lambda: len(worker._read) == 16)
        os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: pool._workers._extra[0]._read)
        new = await asyncio.gather(*(pool.score(str(n), prompt(extra)) for n in range(4)))
        assert not any(call.done() for call in calls)
        (tmp_path / "file").touch()
        assert new + await asyncio.gather(*calls) == [RIGHT] * 20


async def test_checks_are_lost_where_the_process_that_would_repeat_them_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.processes.worker_pool.START_PAUSE_S", 0.01)
    monkeypatch.setattr("megatron_scalerl.processes.worker_pool.ROUND_PAUSE_S", 0.01)
    extra = {"file": str(tmp_path / "file")}

    async def refuses():
        raise OSError("no memory")

    async with pool_of("users_judges:held", concurrency=4) as pool:
        [worker], [further] = pool._workers._workers, pool._workers._extra
        monkeypatch.setattr(further, "start", refuses)
        calls = [asyncio.create_task(pool.score(f"held {n}", prompt(extra))) for n in range(3)]
        await until(lambda: len(worker._read) == 3)
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(100):
            lost = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(completion) for completion in lost] == [CompletionLost] * 3
        assert not pool._outages._ends, "their judge has not failed"
        assert await pool.score("7", prompt(extra)) == RIGHT


async def test_a_check_is_not_lost_by_the_death_of_others(tmp_path, monkeypatch):
    """A stopped process reads nothing more; it is killed while it has another check."""
    monkeypatch.setattr("megatron_scalerl.processes.worker_pool.MAX_EARLY_LOSSES", 1)
    extra = {"file": str(tmp_path / "file")}

    async with pool_of("users_judges:held", concurrency=2) as pool:
        [worker] = pool._workers._workers
        held = asyncio.create_task(pool.score("held", prompt(extra)))
        await until(lambda: worker._read)
        os.kill(worker.pid, signal.SIGSTOP)
        late = asyncio.create_task(pool.score("late", prompt(extra)))
        await until(lambda: len(worker._replies) == 2)
        os.kill(worker.pid, signal.SIGKILL)
        assert await late == RIGHT
        (tmp_path / "file").touch()
        assert await held == RIGHT


def test_a_process_has_a_thread_for_each_check():
    assert run_pool("users_judges:threaded", map(str, range(40)))[0] == [RIGHT] * 40


async def test_an_outage_pays_no_check_as_wrong_that_was_in_flight():
    """Others come back after it has begun, and none that began after it had failed."""
    down = asyncio.Event()
    calls = []

    async def answer(text, tries):
        if text == "held":
            await (down.wait() if tries < 3 else until(calls[1].done))
        if text == "old":  # the judge ends what it has when it is stopped
            await until(lambda: judge.asked.count("held") >= 2)
            return score_of(True)
        return web.Response(status=503) if down.is_set() else score_of(True)

    async with judging(answer) as (judge, _, score):
        await asyncio.gather(*map(score, map(str, range(40))))
        calls.extend(asyncio.create_task(score(text)) for text in ("held", "old"))
        await until(lambda: {"held", "old"} <= set(judge.asked))
        assert await score("later") == RIGHT
        down.set()
        lost, old = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(lost, CompletionLost) and old == RIGHT


async def test_a_process_in_which_all_checks_fail_is_replaced_after_the_others(tmp_path, monkeypatch):
    started = starts(monkeypatch)
    row = prompt({"file": str(tmp_path / "file")})

    async with pool_of("users_judges:spoiling") as pool:
        [worker] = pool._workers._workers
        slow = asyncio.create_task(pool.score("held", row))
        assert await pool.score("spoil", row) == WRONG
        calls = [asyncio.create_task(pool.score(str(n), row)) for n in range(MOST_FAILURES)]
        await until(lambda: worker._ending)
        assert not slow.done()
        (tmp_path / "file").touch()
        await asyncio.wait(calls)
        assert (await slow, await pool.score("7 after", row)) == (RIGHT, WRONG)
    assert started == ["verifier-0"] * 2, "no other repeats what is held"


async def test_checks_that_held_each_other_up_are_not_tried_again_together(monkeypatch):
    pauses = []

    async def wait(pause_s):
        pauses.append(pause_s)

    async def answer(text, tries):
        return web.Response(status=503)

    set_pauses(monkeypatch, 100.0, 500.0, wait=wait)
    await judged(answer, map(str, range(16)))
    first, second = sorted(pauses)[:16], sorted(pauses)[16:]
    assert len(set(pauses)) == 32
    assert first[0] >= 50 and first[-1] - first[0] > 20 and second[-1] - second[0] > 100


def test_an_object_with_an_async_call_is_a_judge():
    assert run_pool("users_judges:judge", "78", concurrency=2)[0] == [RIGHT, WRONG]


def test_a_coroutine_behind_a_plain_function_is_lost_and_never_wrong():
    [lost], _ = run_pool("users_judges:decorated", "7")
    assert isinstance(lost, CompletionLost) and "returned a coroutine" in str(lost)


def test_a_key_reaches_the_judge_only_by_its_name(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "7")

    names = ["JUDGE_API_KEY"]
    assert run_pool("users_judges:keyed", names)[0] == [WRONG]
    assert run_pool("users_judges:keyed", names, variables=tuple(names))[0] == [RIGHT]
