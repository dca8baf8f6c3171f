"""Counts the stream's completions on each engine, chooses the engine of the next group, and measures idle time.

A completion counts from `add` to `remove`. An engine that keeps an older policy version for a validation takes no new
completions but finishes earlier completions, which stay counted.
"""

import time
from collections import Counter

from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership


class EngineLoads:
    """The number of completions in flight on each engine. Only one thread may call the methods."""

    def __init__(self, engines: Membership, *, group_size: int, max_in_flight: int):
        """max_in_flight: largest number of completions in flight per engine."""
        self._engines = engines
        self._group_size = group_size
        self._max_in_flight = max_in_flight
        self._completions: Counter[EngineClient] = Counter()
        self._idle_since: float | None = None
        """Value of time.monotonic() at the start of idle time; None while an engine has work, or no engine serves."""
        self._idle_seconds = 0.0
        """Idle time that ended before `_idle_since`, counted since the last call of `take_idle_seconds` (s)."""

    def free_engine(self) -> EngineClient | None:
        """The serving engine with the fewest completions; None if no engine has room for a whole group."""
        load_limit = self._max_in_flight - self._group_size
        free_engines = [engine for engine in self._engines.serving if self._completions[engine] <= load_limit]
        return min(free_engines, key=self._completions.__getitem__, default=None)

    def add(self, engine: EngineClient, completions: int) -> None:
        """Count new completions on an engine."""
        self._completions[engine] += completions
        self.note_idle()

    def remove(self, engine: EngineClient) -> None:
        """Note that one completion on an engine has ended."""
        self._completions[engine] -= 1
        self.note_idle()

    def note_idle(self) -> None:
        """Start or stop measuring idle time, in which engines serve and no engine has work.

        The caller also calls this method when an engine joins or leaves. Time without a serving engine does not
        count, since engines are being started.
        """
        serving = self._engines.serving
        busy = any(self._completions[engine] for engine in serving)
        if not serving or busy:
            self._end_idle()
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()

    def take_idle_seconds(self) -> float:
        """Seconds since the last call during which engines served and no engine had work."""
        self._end_idle()
        seconds = self._idle_seconds
        self._idle_seconds = 0.0
        return seconds

    def _end_idle(self) -> None:
        """Add the time since `_idle_since` to the idle seconds, and measure from now on."""
        if self._idle_since is not None:
            now = time.monotonic()
            self._idle_seconds += now - self._idle_since
            self._idle_since = now
