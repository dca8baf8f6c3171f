"""The completions that each engine has of the stream: which one gets the next group, and how long none had any.

Completions are counted from `add` to `remove`, those of an engine that is held for a measurement too: it goes on with
its requests and comes back.
"""

import time
from collections import Counter

from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership


class EngineLoads:
    """Completions per engine. Not safe for several threads."""

    def __init__(self, engines: Membership, *, group_size: int, max_in_flight: int):
        """max_in_flight: completions per engine."""
        self._engines = engines
        self._group_size = group_size
        self._max_in_flight = max_in_flight
        self._completions: Counter[EngineClient] = Counter()
        self._idle_since: float | None = None
        """Since when engines serve and none has work (monotonic seconds); None while one has, or none serves."""
        self._idle_seconds = 0.0
        """Idle seconds before `_idle_since`, since `take_idle_seconds` was called last."""

    def free_engine(self) -> EngineClient | None:
        """The serving engine with the fewest completions, of those with slots for a whole group."""
        most = self._max_in_flight - self._group_size
        free = [engine for engine in self._engines.serving if self._completions[engine] <= most]
        return min(free, key=self._completions.__getitem__, default=None)

    def add(self, engine: EngineClient, completions: int) -> None:
        """Count completions."""
        self._completions[engine] += completions
        self.note_idle()

    def remove(self, engine: EngineClient) -> None:
        """A completion is over."""
        self._completions[engine] -= 1
        self.note_idle()

    def note_idle(self) -> None:
        """Begin or end the time in which engines serve and none has work; also called when one joins or leaves.

        Time in which no engine serves is not idle: the engines are being started then.
        """
        serving = self._engines.serving
        busy = any(self._completions[engine] for engine in serving)
        if not serving or busy:
            self._end_idle()
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()

    def take_idle_seconds(self) -> float:
        """Seconds since the last call in which engines served and none had work."""
        self._end_idle()
        seconds = self._idle_seconds
        self._idle_seconds = 0.0
        return seconds

    def _end_idle(self) -> None:
        """Add the time since `_idle_since`, and begin anew."""
        if self._idle_since is not None:
            now = time.monotonic()
            self._idle_seconds += now - self._idle_since
            self._idle_since = now
