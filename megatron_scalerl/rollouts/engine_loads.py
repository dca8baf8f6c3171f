"""The work that the stream has submitted to each engine: which one gets the next group, and how long none had any.

Completions are counted from `add` to `remove`. Those of an engine that has left count no more; those of an engine
that is held for a measurement do, since it goes on with its requests and comes back.
"""

import time

from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.types import Prompt

_NEWEST_WEIGHT = 0.02
"""Weight of the newest completion in the running mean of their lengths."""


class _Load:
    """The work of one engine."""

    def __init__(self) -> None:
        self.completions = 0
        self.tokens = 0.0
        """Prompt tokens and expected completion tokens of the completions."""


class EngineLoads:
    """Completions and expected tokens per engine. Not safe for several threads."""

    def __init__(self, engines: Membership, *, group_size: int, max_in_flight: int, expected_tokens: float):
        """max_in_flight: completions per engine. expected_tokens: of a completion, before the first has finished."""
        self._engines = engines
        self._group_size = group_size
        self._max_in_flight = max_in_flight
        self._expected_tokens = expected_tokens
        self._loads: dict[EngineClient, _Load] = {}
        self._idle_since: float | None = None
        """Since when engines serve and none has work (monotonic seconds); None while one has, or none serves."""
        self._idle_seconds = 0.0
        """Idle seconds before `_idle_since`, since `take_idle_seconds` was called last."""

    def free_engine(self) -> EngineClient | None:
        """The serving engine with the fewest expected tokens, of those with slots for a whole group."""
        # a held engine answers without serving: it keeps its load, and gets no group
        self._loads = {engine: self._loads.get(engine) or _Load() for engine in self._engines.answering}
        free = [
            engine
            for engine in self._engines.serving
            if self._loads[engine].completions + self._group_size <= self._max_in_flight
        ]
        return min(free, key=lambda engine: self._loads[engine].tokens, default=None)

    def add(self, engine: EngineClient, prompt: Prompt, completions: int) -> float:
        """Count completions of a prompt; returns the expected tokens of each, with its prompt's."""
        present = self._engines.answering
        self._loads = {e: load for e, load in self._loads.items() if e in present}
        load = self._loads.setdefault(engine, _Load())
        weight = len(prompt.token_ids) + self._expected_tokens
        load.completions += completions
        load.tokens += completions * weight
        self.note_idle()
        return weight

    def remove(self, engine: EngineClient, weight: float) -> None:
        """A completion with the weight that `add` returned is over."""
        load = self._loads.get(engine)
        if load is not None:
            load.completions -= 1
            load.tokens -= weight
        self.note_idle()

    def observe(self, tokens: int) -> None:
        """Note the length of a finished completion, from which later ones are expected."""
        self._expected_tokens += _NEWEST_WEIGHT * (tokens - self._expected_tokens)

    def note_idle(self) -> None:
        """Begin or end the time in which engines serve and none has work; also called when one joins or leaves.

        Time in which no engine serves is not idle: the engines are being started then.
        """
        serving = self._engines.serving
        busy = any(self._loads[engine].completions for engine in serving if engine in self._loads)
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
