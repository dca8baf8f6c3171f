"""Spans of all processes as Chrome's Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: an object with `traceEvents`; `M`
events name processes and threads, `X` events are spans with `ts` and `dur` in microseconds. Spans of one thread have
to nest there, so that a track whose spans overlap otherwise is shown as several threads, LANE 2, LANE 3 ...

The time axis is CLOCK_REALTIME of the controller's host, from the earliest span on. A process on another host is
placed by its own CLOCK_REALTIME. How far the two clocks are apart is not corrected; it is bounded by the spans that
enclose one another: a rank's step begins after the controller asked for it and ends before the controller has the
answer. `otherData.clocks` has the offset in the middle of these bounds and the half of their distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from megatron_scalerl.processes.spans import CONTROLLER, STEP, Clock, Span, Spans

FIRST_TRACKS = ("loop", "batch", "weight update", "validation", "evaluation")
"""Shown above the other tracks of their process."""


def trace(controller: Spans, ranks: Mapping[int, Sequence[Spans]], other: Mapping[str, Any]) -> bytes:
    """The whole file. ranks: rank -> what it sent, in order. other: more entries of `otherData`."""
    home = controller.clock
    own: list[Span] = []
    engines: dict[str, list[Span]] = {}
    for each in controller.spans:
        shown = engines.setdefault(each.process, []) if each.process not in ("", CONTROLLER) else own
        shown.append(_at(each, home, home))
    placed = {CONTROLLER: own}
    for rank, parts in sorted(ranks.items()):
        placed[f"trainer-{rank}"] = [_at(each, part.clock, home) for part in parts for each in part.spans]
    placed |= dict(sorted(engines.items()))  # below the ranks: they have a thread for each request at a time
    zero = min((each.begin_ns for spans in placed.values() for each in spans), default=0)
    dropped = controller.dropped + sum(part.dropped for parts in ranks.values() for part in parts)
    data = {
        "clock": "CLOCK_REALTIME",
        "zero_unix_ns": str(zero),
        "clocks": _clocks(home, own, ranks),
        "dropped_spans": dropped,
        **other,
    }
    begin = msgspec.json.encode({"displayTimeUnit": "ms", "otherData": data})[:-1] + b',"traceEvents":['
    return begin + b",".join(map(msgspec.json.encode, _events(placed, zero))) + b"]}"


def lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans of a track as lanes: in each of them any two spans are apart, or one contains the other."""
    found: list[list[Span]] = []
    ends: list[list[int]] = []  # [lanes] ends of the spans that are open
    for each in sorted(spans, key=lambda each: (each.begin_ns, -each.end_ns)):
        lane = next((n for n, of_lane in enumerate(ends) if _fits(each, of_lane)), len(found))
        if lane == len(found):
            found.append([])
            ends.append([])
        found[lane].append(each)
        ends[lane].append(each.end_ns)
    return found


def _fits(each: Span, ends: list[int]) -> bool:
    """Whether a span begins after those of a lane, or lies in the innermost one that is open then."""
    while ends and ends[-1] <= each.begin_ns:
        ends.pop()
    return not ends or each.end_ns <= ends[-1]


def _at(each: Span, clock: Clock, home: Clock) -> Span:
    """A span in CLOCK_REALTIME (ns). Processes of the controller's boot share its clock, whatever NTP did between."""
    offset = (home if clock.boot == home.boot else clock).realtime_ns
    return msgspec.structs.replace(each, begin_ns=each.begin_ns + offset, end_ns=each.end_ns + offset)


def _events(placed: Mapping[str, Sequence[Span]], zero: int) -> Iterator[dict[str, Any]]:
    """Of processes in their order. No thread has a process' number: Perfetto would take it for its main thread."""
    tid = len(placed)
    for pid, (process, spans) in enumerate(placed.items(), 1):
        yield _named("process_name", pid, 0, name=process)
        yield _named("process_sort_index", pid, 0, sort_index=pid)
        tracks: dict[str, list[Span]] = {}
        for each in spans:
            tracks.setdefault(each.track, []).append(each)
        for track in sorted(tracks, key=_place):
            for number, lane in enumerate(lanes(tracks[track]), 1):
                tid += 1
                yield _named("thread_name", pid, tid, name=track if number == 1 else f"{track} ({number})")
                yield _named("thread_sort_index", pid, tid, sort_index=tid)
                for each in lane:
                    yield _complete(pid, tid, each, zero)


def _place(track: str) -> tuple[int, str]:
    return FIRST_TRACKS.index(track) if track in FIRST_TRACKS else len(FIRST_TRACKS), track


def _named(what: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def _complete(pid: int, tid: int, each: Span, zero: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": each.name,
        "cat": each.track,
        "pid": pid,
        "tid": tid,
        "ts": (each.begin_ns - zero) / 1000,
        "dur": (each.end_ns - each.begin_ns) / 1000,
        "args": each.arguments,
    }


def _clocks(home: Clock, asked: Sequence[Span], ranks: Mapping[int, Sequence[Spans]]) -> dict[str, Any]:
    """Host -> its offset to the controller's host in seconds, and the error of that; None where nothing bounds it."""
    found: dict[str, Any] = {home.host: {"offset_s": 0.0, "error_s": 0.0}}
    outer = {each.arguments.get(STEP): each for each in asked if each.name == STEP}
    for parts in ranks.values():
        for part in parts:
            if part.clock.boot == home.boot:
                continue
            best = found.setdefault(part.clock.host, {"offset_s": None, "error_s": None})
            for each in part.spans:
                around = outer.get(each.arguments.get(STEP)) if each.name == STEP else None
                if around is None:
                    continue
                # the host's clock minus the controller's lies between these two
                least = _at(each, part.clock, home).end_ns - around.end_ns
                most = _at(each, part.clock, home).begin_ns - around.begin_ns
                error = (most - least) / 2e9
                if best["error_s"] is None or error < best["error_s"]:
                    best |= {"offset_s": (most + least) / 2e9, "error_s": error}
    return found
