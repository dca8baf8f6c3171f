"""Records spans in one process. Off unless a recorder is installed; then `span` costs one comparison.

Times are of CLOCK_MONOTONIC (ns), which all processes since one boot of a host share. `Clock` says which boot that
is, and how far it is from CLOCK_REALTIME, so that spans of several hosts meet on one axis (`tracing.chrome`).

Spans of a trainer rank: recorded while it works on a step of the window, sent with the answer to each command.
"""

from __future__ import annotations

import functools
import itertools
import re
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import msgspec

P = ParamSpec("P")
T = TypeVar("T")

MOST_SPANS = 200_000
"""Spans that a process keeps, about 60 MB; those after them are counted."""
CONTROLLER, LOOP = "controller", "loop"
"""The process and the track of the training loop."""
STEP = "step"
"""Name of a rank's span of an optimizer step, and of the controller's span that encloses those of all ranks."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that a process did."""

    name: str
    track: str
    """What it belongs to within its process; spans of one track may overlap."""
    begin_ns: int
    """CLOCK_MONOTONIC."""
    end_ns: int
    arguments: dict[str, int | float | str] = {}
    process: str = ""
    """The process that it is shown in, if it is another one than the recorder's."""


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """The clock of a host."""

    host: str
    boot: str
    """The kernel's boot id; equal on processes that share CLOCK_MONOTONIC."""
    realtime_ns: int
    """CLOCK_REALTIME - CLOCK_MONOTONIC."""


class Spans(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has recorded since the last time."""

    clock: Clock
    spans: tuple[Span, ...]
    dropped: int = 0
    """Spans beyond MOST_SPANS."""


class Recorder:
    """Keeps the spans that end while it is active, and those that are open when it is drained with `cut`."""

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self.clock = read_clock()
        self._spans: list[Span] = []
        self._open: dict[int, Open] = {}
        self._numbers = itertools.count()
        self._dropped = 0
        self.of_ranks: dict[int, list[Spans]] = {}
        """Rank -> what it has sent."""
        self.refused = 0
        """Messages of ranks beyond MOST_SPANS spans."""
        self._spans_of_ranks = 0

    def enter(self, opened: Open) -> int:
        """A span has begun; returns its number."""
        number = next(self._numbers)
        if len(self._open) < MOST_SPANS:
            self._open[number] = opened
        return number

    def leave(self, number: int, opened: Open) -> None:
        """A span has ended."""
        self._open.pop(number, None)
        if self.active:
            self.add(opened.ended())

    def add(self, found: Span) -> None:
        """Keep a span, or count it if there are too many."""
        if len(self._spans) < MOST_SPANS:
            self._spans.append(found)
        else:
            self._dropped += 1

    def from_rank(self, rank: int, sent: Spans) -> None:
        """Keep what a trainer rank has sent, or count it if it is too much."""
        self._spans_of_ranks += len(sent.spans)
        if self._spans_of_ranks <= MOST_SPANS:
            self.of_ranks.setdefault(rank, []).append(sent)
        else:
            self.refused += 1

    def drain(self, *, cut: bool = False) -> Spans:
        """All spans since the last call. cut: those that have not ended, too, up to now."""
        if cut:
            for opened in self._open.values():
                self.add(opened.ended(unfinished=True))
        spans, dropped = tuple(self._spans), self._dropped
        self._spans, self._dropped = [], 0
        return Spans(clock=self.clock, spans=spans, dropped=dropped)


_recorder: Recorder | None = None


def install(recorder: Recorder | None) -> None:
    """Record in this process from now on; None: no more."""
    global _recorder
    _recorder = recorder


class Open:
    """A span that has begun, as a context manager. `arguments` may be added to until it ends."""

    def __init__(self, recorder: Recorder, name: str, track: str, process: str, arguments: dict[str, Any]) -> None:
        self.arguments: dict[str, int | float | str] = arguments
        self._recorder, self._name, self._track, self._process = recorder, name, track, process

    def note(self, **arguments: int | float | str) -> None:
        """Add arguments."""
        self.arguments |= arguments

    def ended(self, *, unfinished: bool = False) -> Span:
        """The span, if it ended now."""
        arguments = self.arguments | {"unfinished": 1} if unfinished else self.arguments
        return Span(self._name, self._track, self._begin, time.monotonic_ns(), arguments, self._process)

    def __enter__(self) -> Open:
        self._begin = time.monotonic_ns()
        self._number = self._recorder.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.arguments["error"] = kind.__name__
        self._recorder.leave(self._number, self)


class Off:
    """A span that nobody records."""

    def note(self, **arguments: int | float | str) -> None:
        """Nothing."""

    def __enter__(self) -> Off:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_OFF = Off()


def span(name: str, track: str = LOOP, *, process: str = "", **arguments: int | float | str) -> Open | Off:
    """A context manager around something that takes time. process: shown in this one, for example an engine."""
    recorder = _recorder
    return _OFF if recorder is None else Open(recorder, name, track, process, arguments)


def spanned(
    name: str, track: str = LOOP
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """A decorator: every call of a coroutine function is a span."""

    def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @functools.wraps(function)
        async def traced(*args: P.args, **keywords: P.kwargs) -> T:
            with span(name, track):
                return await function(*args, **keywords)

        return traced

    return decorate


def passed(name: str, track: str, begin_ns: int, end_ns: int, *, process: str = "", **arguments: Any) -> None:
    """A span whose begin and end (CLOCK_MONOTONIC, ns) are known afterwards."""
    if _recorder is not None and _recorder.active:
        _recorder.add(Span(name, track, begin_ns, end_ns, arguments, process))


def from_rank(rank: int, sent: Spans | None) -> None:
    """A trainer rank has sent its spans; None for none."""
    if sent is not None and _recorder is not None:
        _recorder.from_rank(rank, sent)


def read_clock() -> Clock:
    """The clock of this host."""
    before = time.monotonic_ns()
    realtime = time.time_ns()
    monotonic = (before + time.monotonic_ns()) // 2
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: hosts are told apart by their names
        boot = socket.gethostname()
    return Clock(host=socket.gethostname(), boot=boot, realtime_ns=realtime - monotonic)


RANK = "rank"
"""Track of a rank's commands."""


class RankTrace:
    """Turns the recorder of this process on and off with the step that it works on."""

    def __init__(self, window: tuple[int, int] | None) -> None:
        """window: first and last step; None: nothing is ever recorded."""
        self._window = window
        self._recorder: Recorder | None = None

    def at(self, step: int | None) -> None:
        """The next command or batch is of this step; None: of the same as the last one."""
        if self._window is None or step is None:
            return
        if step > self._window[1]:
            self._recorder = None
        elif step >= self._window[0] and self._recorder is None:
            self._recorder = Recorder(active=True)
        install(None if step < self._window[0] else self._recorder)

    def command(self, command: object) -> Open | Off:
        """The span of a command, named like its class; recorded if its step or version is in the window."""
        step = getattr(command, "step", getattr(command, "version", None))
        self.at(step)
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(command).__name__).lower()
        return span(name, RANK) if step is None else span(name, RANK, step=step)

    def drain(self) -> Spans | None:
        """What was recorded since the last call; None outside of the window."""
        return None if self._recorder is None else self._recorder.drain()
