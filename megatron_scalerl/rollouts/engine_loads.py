"""The work that the stream has submitted to each engine: who gets the next group, and how long nobody had any."""

from __future__ import annotations

import time

from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.types import Prompt

_FORGET = 0.02
"""Weight of the newest completion in the running mean of their lengths."""


class _Load:
    """Work of one engine."""

    def __init__(self) -> None:
        self.completions = 0
        self.tokens = 0.0
        """Prompt tokens and expected completion tokens of the completions."""


class EngineLoads:
    """Completions and expected tokens per engine. Not safe for several threads."""

    def __init__(self, engines: Membership, *, group_size: int, max_in_flight: int, expected_tokens: float) -> None:
        """max_in_flight: completions per engine. expected_tokens: of a completion, before the first has finished."""
        self._engines = engines
        self._group_size, self._max_in_flight = group_size, max_in_flight
        self._expected_tokens = expected_tokens
        self._loads: dict[EngineClient, _Load] = {}
        self._idle_since: float | None = None
        self._idle_seconds = 0.0

    def free_engine(self) -> EngineClient | None:
        """The serving engine with the fewest expected tokens, of those with slots for a whole group."""
        serving = self._engines.serving
        self._loads = {engine: self._loads.get(engine) or _Load() for engine in self._engines.there}
        free = [e for e in serving if self._loads[e].completions + self._group_size <= self._max_in_flight]
        return min(free, key=lambda engine: self._loads[engine].tokens, default=None)

    def add(self, engine: EngineClient, prompt: Prompt, completions: int) -> float:
        """Count so many completions of a prompt; returns the expected tokens of each, with its prompt's."""
        there = self._engines.there  # one that is held goes on with its requests, and comes back
        self._loads = {e: load for e, load in self._loads.items() if e in there}
        load = self._loads.setdefault(engine, _Load())
        weight = len(prompt.token_ids) + self._expected_tokens
        load.completions += completions
        load.tokens += completions * weight
        self.note_idle()
        return weight

    def remove(self, engine: EngineClient, weight: float) -> None:
        """A completion with the weight that `add` returned is over."""
        if (load := self._loads.get(engine)) is not None:
            load.completions -= 1
            load.tokens -= weight
        self.note_idle()

    def note_idle(self) -> None:
        """Begin or end the time in which engines serve and none has work; to be called when one joins or leaves, too.

        Time in which no engine serves is not idle: the engines are being started then.
        """
        serving, now = self._engines.serving, time.monotonic()
        idle = bool(serving) and not any(self._loads[e].completions for e in serving if e in self._loads)
        if not idle and self._idle_since is not None:
            self._idle_seconds += now - self._idle_since
        self._idle_since = (self._idle_since or now) if idle else None

    def observe(self, tokens: int) -> None:
        """A completion was so long."""
        self._expected_tokens += _FORGET * (tokens - self._expected_tokens)

    def take_idle_seconds(self) -> float:
        """Seconds since the last call in which engines served and none had work."""
        now = time.monotonic()
        idle = self._idle_seconds + (now - self._idle_since if self._idle_since is not None else 0.0)
        self._idle_seconds = 0.0
        self._idle_since = now if self._idle_since is not None else None
        return idle
