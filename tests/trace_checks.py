"""Checks of a file in Chrome's Trace Event Format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    """The trace, after every check of its form."""
    trace = json.loads(path.read_bytes())
    check(trace)
    return trace


def check(trace: dict[str, Any]) -> None:
    """Keys and types of every event, a name for each process and thread, and spans that nest."""
    events = trace["traceEvents"]
    assert events and set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    processes, threads, spans = {}, {}, {}
    for event in events:
        assert event["ph"] in ("M", "X") and isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int), event
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["args"], dict), event
            spans.setdefault((event["pid"], event["tid"]), []).append(event)
        elif event["name"] == "process_name":
            assert event["pid"] not in processes
            processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in threads
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    assert threads.keys() == spans.keys() and {pid for pid, _ in threads} == processes.keys()
    assert len(set(processes.values())) == len(processes)
    for of_thread in spans.values():
        check_nesting(of_thread)


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Any two spans of a thread are apart, or one contains the other."""
    ends: list[float] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        while ends and ends[-1] <= event["ts"] + 1e-3:
            ends.pop()
        assert not ends or end <= ends[-1] + 1e-3, event
        ends.append(end)


def named(trace: dict[str, Any], name: str, process: str | None = None) -> list[dict[str, Any]]:
    """Spans of this name, in time."""
    pids = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    found = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == name]
    return sorted((e for e in found if process in (None, pids[e["pid"]])), key=lambda e: e["ts"])


def encloses(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    """Whether one span lies within another, to the microsecond."""
    end = inner["ts"] + inner["dur"]
    return outer["ts"] <= inner["ts"] + 1 and end <= outer["ts"] + outer["dur"] + 1
