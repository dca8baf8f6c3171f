"""Recording spans, and their file in Chrome's Trace Event Format."""

import asyncio
import json
import time

import pytest
import trace_checks
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import passes

from megatron_scalerl.processes import spans as module
from megatron_scalerl.processes.chrome import lanes, trace
from megatron_scalerl.processes.spans import (
    Clock,
    RankTrace,
    Recorder,
    Span,
    Spans,
    install,
    passed,
    read_clock,
    span,
    spanned,
)
from megatron_scalerl.trainer import messages

HOME = Clock(host="a", boot="1", realtime_ns=1000)


@pytest.fixture
def recorder():
    """Of this process, on."""
    made = Recorder(active=True)
    install(made)
    yield made
    install(None)


def names(found):
    return [each.name for each in found.spans]


def test_nothing_is_recorded_without_a_recorder():
    assert span("a") is span("b"), "no object is made"
    with span("a") as opened:
        opened.note(tokens=3)
    passed("b", "t", 0, 1)
    recorder = Recorder(active=True)
    assert recorder.drain().spans == ()


def test_spans_have_their_times_and_what_was_noted(recorder):
    before = time.monotonic_ns()
    with span("outer", "t", step=3), span("inner", "t", process="engine-0") as opened:
        opened.note(tokens=7)
    inner, outer = recorder.drain().spans
    assert (inner.name, inner.process, inner.arguments) == ("inner", "engine-0", {"tokens": 7})
    assert (outer.name, outer.process, outer.arguments) == ("outer", "", {"step": 3})
    assert before <= outer.begin_ns <= inner.begin_ns <= inner.end_ns <= outer.end_ns <= time.monotonic_ns()
    assert recorder.drain().spans == ()


async def test_a_coroutine_that_fails_or_is_cancelled_ends_its_span(recorder):
    @spanned("work")
    async def work(never):
        if never:
            await asyncio.Event().wait()
        raise OSError

    with pytest.raises(OSError):
        await work(False)
    task = asyncio.create_task(work(True))
    await passes(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [each.arguments for each in recorder.drain().spans] == [{"error": "OSError"}, {"error": "CancelledError"}]


def test_what_begins_before_the_window_and_what_ends_after_it_are_in_it():
    recorder = Recorder(active=False)
    install(recorder)
    try:
        with span("over"):
            pass
        with span("from before"):
            recorder.active = True
        with span("beyond"):
            found = recorder.drain(cut=True)
    finally:
        install(None)
    assert names(found) == ["from before", "beyond"]
    assert [each.arguments for each in found.spans] == [{}, {"unfinished": 1}]


def test_memory_is_bounded_and_what_is_left_out_is_counted(monkeypatch):
    monkeypatch.setattr(module, "MOST_SPANS", 3)
    recorder = Recorder(active=True)
    install(recorder)
    try:
        for number in range(5):
            with span(f"s{number}"):
                pass
        for rank in (0, 1):
            recorder.from_rank(rank, Spans(clock=HOME, spans=(Span("step", "rank", 0, 1),) * 2))
    finally:
        install(None)
    found = recorder.drain()
    assert names(found) == ["s0", "s1", "s2"] and found.dropped == 2
    assert list(recorder.of_ranks) == [0] and recorder.refused == 1


def test_a_rank_records_the_steps_of_its_window():
    rank = RankTrace((3, 4))
    try:
        for step in range(1, 7):
            with rank.command(messages.Step(call=1, step=step)), span("optimizer", "rank"):
                pass
            with rank.command(messages.Save(call=2, path="", extra={})):
                pass
            with rank.command(messages.SendWeights(call=3, version=step)):
                pass
            sent = rank.drain()
            if step in (3, 4):
                assert names(sent) == ["optimizer", "step", "save", "send weights"]
                assert [each.arguments for each in sent.spans] == [{}, {"step": step}, {}, {"step": step}]
            else:
                assert sent is None
    finally:
        install(None)


def test_a_batch_ahead_of_the_window_is_recorded_and_the_commands_before_the_window_are_not():
    rank = RankTrace((3, 4))
    try:
        rank.at(3)
        with span("receive batch", "rank"):
            pass
        for command in (messages.Step(call=1, step=2), messages.SendWeights(call=2, version=2)):
            with rank.command(command), span("read and send", "rank"):
                pass
        with rank.command(messages.Step(call=3, step=3)):
            pass
        assert names(rank.drain()) == ["receive batch", "step"]
    finally:
        install(None)


def test_a_rank_without_a_window_records_nothing():
    rank = RankTrace(None)
    with rank.command(messages.Step(call=1, step=1)) as opened:
        assert opened is span("x")
    assert rank.drain() is None


def test_spans_travel_in_the_answer_and_an_answer_without_them_is_read():
    sent = Spans(clock=HOME, spans=(Span("step", "rank", 5, 9, {"step": 3}),))
    value = messages.msgspec.Raw(messages.encode(None))
    for spans in (sent, None):
        done = messages.Done(call=1, rank=0, value=value, spans=spans)
        assert messages.decode_for_controller([messages.encode(done)]).spans == spans


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=30)


@given(INTERVALS)
@settings(deadline=None)
def test_the_lanes_of_any_spans_nest_and_lose_none(intervals):
    given_spans = [Span(str(n), "t", begin, begin + size) for n, (begin, size) in enumerate(intervals)]
    found = lanes(given_spans)
    assert sorted(each.name for lane in found for each in lane) == sorted(each.name for each in given_spans)
    for lane in found:
        trace_checks.check_nesting([{"ts": s.begin_ns, "dur": s.end_ns - s.begin_ns} for s in lane])


def test_spans_that_nest_need_one_lane():
    nested = [Span("a", "t", 0, 10), Span("b", "t", 0, 4), Span("c", "t", 4, 10), Span("d", "t", 10, 11)]
    assert [[s.name for s in lane] for lane in lanes(nested)] == [["a", "b", "c", "d"]]
    assert len(lanes([Span("a", "t", 0, 10), Span("b", "t", 5, 15)])) == 2


def step(begin, end, number=1):
    return Span("step", "loop", begin, end, {"step": number})


def traced(controller, ranks):
    made = json.loads(trace(Spans(clock=HOME, spans=tuple(controller)), ranks, {"run": "r"}))
    trace_checks.check(made)
    return made


def test_ranks_of_the_same_boot_share_the_controllers_clock():
    """Even if NTP has set CLOCK_REALTIME between the two readings."""
    same = Clock(host="a", boot="1", realtime_ns=999_000_000)
    made = traced([step(5000, 9000)], {0: [Spans(clock=same, spans=(step(6000, 8000),))]})
    of_controller, of_rank = trace_checks.named(made, "step")
    assert (of_controller["ts"], of_controller["dur"]) == (0, 4) and (of_rank["ts"], of_rank["dur"]) == (1, 2)
    assert made["otherData"]["zero_unix_ns"] == "6000"
    assert made["otherData"]["clocks"] == {"a": {"offset_s": 0.0, "error_s": 0.0}}


def test_another_hosts_clock_is_placed_by_its_own_time_and_its_offset_is_stated():
    """Its CLOCK_REALTIME is 10 s ahead; the tighter of two steps bounds the offset."""
    ahead = 10_000_000_000
    other = Clock(host="b", boot="2", realtime_ns=1000 + ahead)
    wide, tight = step(0, 4_000_000, 1), step(5_000_000, 6_000_000, 2)
    inner = (step(1_000_000, 2_000_000, 1), step(5_100_000, 5_900_000, 2))
    made = traced([wide, tight], {0: [Spans(clock=other, spans=inner)]})
    found = made["otherData"]["clocks"]["b"]
    assert found["offset_s"] == pytest.approx(10, abs=1e-4) and found["error_s"] == pytest.approx(1e-4)
    assert trace_checks.named(made, "step", "trainer-0")[0]["ts"] == pytest.approx(10e6 + 1000)


def test_a_host_without_a_step_has_no_known_offset():
    other = Clock(host="b", boot="2", realtime_ns=0)
    made = traced([step(0, 5)], {0: [Spans(clock=other, spans=(Span("save", "rank", 1, 2),))]})
    assert made["otherData"]["clocks"]["b"] == {"offset_s": None, "error_s": None}


def test_the_clock_is_the_time_of_day():
    begin, begin_of_day = time.monotonic_ns(), time.time_ns()
    offset = read_clock().realtime_ns
    end_of_day, end = time.time_ns(), time.monotonic_ns()
    assert begin_of_day - end <= offset <= end_of_day - begin


def test_processes_and_overlapping_requests_are_told_apart():
    requests = [Span("generate", "requests", n, n + 10, {}, "engine-0") for n in range(3)]
    made = traced([step(0, 20), *requests], {1: [Spans(clock=HOME, spans=(Span("step", "rank", 1, 19),))]})
    metadata = [e for e in made["traceEvents"] if e["ph"] == "M"]
    assert {e["args"]["name"] for e in metadata if e["name"] == "process_name"} == {
        "controller",
        "engine-0",
        "trainer-1",
    }
    threads = [e["args"]["name"] for e in metadata if e["name"] == "thread_name"]
    assert threads == ["loop", "rank", "requests", "requests (2)", "requests (3)"]
