"""An engine that hangs ends the run; one that is slow, paused or busy with prompts does not."""

import asyncio
from types import SimpleNamespace

import pytest
from fakes.engine import StandInEngine
from fakes.run import in_virtual_time
from waiting import passes

from megatron_scalerl.engine.answers import CoreProgress, EngineProgress
from megatron_scalerl.engine.watchdog import EngineDied, StallClock, watch_progress
from megatron_scalerl.recipe.process_sections import EngineSection

SETTINGS = EngineSection(stall_timeout_s=10, first_token_timeout_s=30)


def core(tokens, waiting=0, decoding=1, number=0):
    return CoreProgress(core=number, tokens=tokens, waiting=waiting, decoding=decoding)


def seconds_until_death(looks, *, in_flight=1, settings=SETTINGS):
    """Poll a clock once a second; the seconds after which it reports a stall, and its message."""
    clock = StallClock(settings)
    for number, (cores, paused) in enumerate(looks):
        wrong = clock.update(cores, in_flight=in_flight, paused=paused, elapsed_s=1.0)
        if wrong is not None:
            return number, wrong
    return None, None


def test_no_token_for_the_limit():
    after, words = seconds_until_death([([core(5)], False)] * 100)
    assert after == 10 and "no token for 10 s with requests in flight (core 0: 1 decoding, 0 without" in words


def test_slow_progress_is_not_a_stall():
    assert seconds_until_death([([core(i // 9)], False) for i in range(1000)]) == (None, None)


def test_an_idle_engine_is_not_a_stall():
    assert seconds_until_death([([core(5, decoding=0)], False)] * 1000, in_flight=0) == (None, None)


def test_paused_time_does_not_count():
    looks = [([core(5)], False)] * 8 + [([core(5)], True)] * 1000
    assert seconds_until_death(looks) == (None, None)
    # and after the pause the whole limit is there again
    assert seconds_until_death(looks + [([core(5)], False)] * 100)[0] == len(looks) - 1 + 10


def test_prefill_has_a_longer_limit_while_nothing_is_decoding():
    waiting = [([core(5, waiting=3, decoding=0)], False)]
    after, words = seconds_until_death(waiting * 100)
    assert after == 30 and "engine.first_token_timeout_s" in words
    # one that has its first token and no second one is not being prefilled
    assert seconds_until_death(waiting * 5 + [([core(6, waiting=2)], False)] * 100)[0] == 5 + 10
    short = EngineSection(stall_timeout_s=10, first_token_timeout_s=1)
    assert seconds_until_death(waiting * 100, settings=short)[0] == 10


def test_a_stalled_core_is_noticed_beside_one_that_progresses():
    looks = [([core(i), core(7, number=1)], False) for i in range(100)]
    after, words = seconds_until_death(looks)
    assert after == 10 and "core 1: 1 decoding" in words
    idle = [([core(i), core(7, decoding=0, number=1)], False) for i in range(1000)]
    assert seconds_until_death(idle) == (None, None)


def test_requests_that_never_reach_a_core_are_stuck():
    assert seconds_until_death([([core(5, decoding=0)], False)] * 100)[0] == 30


def watched_in_virtual_time(monkeypatch, progress, *, paused=False):
    """Ten minutes of watching an engine with a request, whose `progress` is called with the loop."""
    engine = StandInEngine()
    engine.in_flight, engine.paused = 1, paused

    async def scenario():
        loop = asyncio.get_running_loop()
        monkeypatch.setattr("megatron_scalerl.engine.watchdog.time", SimpleNamespace(monotonic=loop.time))
        engine.progress = lambda: progress(loop)
        settings = EngineSection(stall_timeout_s=2, first_token_timeout_s=1e6)
        await asyncio.wait_for(watch_progress(engine, settings), 600)

    in_virtual_time(scenario())


@pytest.mark.parametrize(
    "pace_s, waiting, paused", [(0.5, 0, False), (1e9, 0, True), (1e9, 1, False)], ids=["slow", "paused", "prompt"]
)
def test_slow_tokens_a_pause_and_a_long_prompt_are_not_stalls(monkeypatch, pace_s, waiting, paused):
    async def progress(loop):
        return EngineProgress(cores=(core(loop.time() // pace_s, waiting, 1 - waiting),), dead=False)

    with pytest.raises(TimeoutError):
        watched_in_virtual_time(monkeypatch, progress, paused=paused)


def test_an_engine_that_does_not_answer_is_reported(monkeypatch):
    async def progress(loop):
        await asyncio.Event().wait()

    with pytest.raises(EngineDied, match="engine-0 gave no answer within 2 s"):
        watched_in_virtual_time(monkeypatch, progress)


def test_a_poll_during_which_this_process_was_stopped_is_no_missing_answer(monkeypatch):
    """The first answer arrives while this process is stopped for longer than the limit."""
    polls = []

    async def progress(loop):
        polls.append(loop.now)
        if len(polls) == 1:
            loop.now += 60
        await passes()
        return EngineProgress(cores=(), dead=len(polls) > 1)

    with pytest.raises(EngineDied, match="engine-0 lost a core"):
        watched_in_virtual_time(monkeypatch, progress)
