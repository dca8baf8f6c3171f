"""Detects an engine that hangs or lags: has requests, but produces no token for long. Runs in the controller.

    poll --> no answer for stall_timeout_s, or a core has exited       \\
         --> StallClock: a core has requests and produces no token      > EngineDied --> evicted, started again
         --> LagClock: the engine is slower than other engines         /                (`launch.engines`)

A poll reads the token count of each engine core. The server process keeps the counts (`engine.vllm_progress`), so a
hanging core cannot delay the response. A whole completion has a budget of tokens, but no time limit. Time does not
count in which the engine is paused, or in which the controller did not run, as in a suspended job.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import NoReturn

from megatron_scalerl.engine.answers import CoreProgress, EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.processes.child_process import time_limit
from megatron_scalerl.recipe.process_sections import EngineSection

_POLLS = 20
"""Number of polls within `stall_timeout_s`."""
_MAX_INTERVAL_S = 5.0
"""Longest time between two polls (s)."""
_MIN_PEER_RATES = 2
"""Smallest number of further engines with a known rate that LagClock needs to judge an engine."""


class EngineDied(RuntimeError):
    """An engine's server exited, does not respond or produces no tokens; the message names the engine."""


class StallClock:
    """Measures how long each core of an engine has had requests and produced no token."""

    def __init__(self, settings: EngineSection):
        self._limit_s = settings.stall_timeout_s
        self._first_token_limit_s = max(settings.stall_timeout_s, settings.first_token_timeout_s)
        self._tokens: dict[int, int] = {}
        self._stalled_s: dict[int, float] = {}

    def update(self, cores: Sequence[CoreProgress], *, in_flight: int, paused: bool, elapsed_s: float) -> str | None:
        """Add the result of one poll; returns a description of the stall, or None without a stall.

        in_flight: number of requests for whose response the client waits. paused: whether the engine is paused.
        elapsed_s: seconds since the last poll.
        """
        # If the client waits for responses, and no core has a request, the requests are stuck in the server.
        stuck = in_flight > 0 and not any(core.waiting or core.decoding for core in cores)
        for core in cores:
            busy = stuck or core.waiting + core.decoding > 0
            advanced = core.tokens != self._tokens.get(core.core)
            self._tokens[core.core] = core.tokens
            stalled_s = self._stalled_s.get(core.core, 0.0) + elapsed_s
            if advanced or paused or not busy:
                stalled_s = 0.0
            self._stalled_s[core.core] = stalled_s
            key = "first_token_timeout_s"
            limit = self._first_token_limit_s
            if core.decoding:
                key = "stall_timeout_s"
                limit = self._limit_s
            if stalled_s >= limit:
                return (
                    f"produced no token for {stalled_s:.3g} s with requests in flight (core {core.core}: "
                    f"{core.decoding} decoding, {core.waiting} without a token; engine.{key})"
                )
        return None


class LagClock:
    """Compares the rates of a run's engines, and measures how long each engine has lagged.

    The rate is tokens per second and decoding request. The rate does not depend on the lengths of completions, but on
    the number of requests that an engine decodes at once: with more requests, each request gets fewer tokens a
    second.

    The stream gives work to the engine with the least work (`rollouts.stream`), so that as long as there is enough
    work, all engines decode about equally many requests. At times a full engine is compared with engines that decode
    only a few last completions, so the user has to set engine.min_relative_rate low enough.
    """

    def __init__(self, settings: EngineSection):
        self._share = settings.min_relative_rate
        self._limit_s = settings.stall_timeout_s
        self._rates: dict[str, float] = {}
        self._lagging_s: dict[str, float] = {}

    def update(self, name: str, *, tokens: int, decoding: int, elapsed_s: float) -> str | None:
        """Add one poll of an engine that is not paused; returns a description of the lag, or None without a lag.

        tokens: number of tokens since the last poll. decoding: number of requests with at least one token. elapsed_s:
        seconds since the last poll.
        """
        if not decoding or elapsed_s <= 0:
            return None
        rate = self._rates[name] = tokens / decoding / elapsed_s
        peer_rates = [value for engine, value in self._rates.items() if engine != name]
        if len(peer_rates) < _MIN_PEER_RATES or rate >= self._share * statistics.median(peer_rates):
            self._lagging_s[name] = 0.0
            return None
        self._lagging_s[name] = self._lagging_s.get(name, 0.0) + elapsed_s
        if self._lagging_s[name] < self._limit_s:
            return None
        return (
            f"generated {rate:.3g} tokens per second and request for {self._lagging_s[name]:.3g} s, less than "
            f"{self._share:g} of the median of {len(peer_rates)} other engines, {statistics.median(peer_rates):.3g} "
            "(engine.min_relative_rate)"
        )

    def forget(self, name: str) -> None:
        """Drop the rate of an engine that has left the run."""
        self._rates.pop(name, None)
        self._lagging_s.pop(name, None)


async def watch_progress(client: EngineClient, settings: EngineSection, lag: LagClock | None = None) -> NoReturn:
    """Poll an engine's progress until the engine fails.

    Raises EngineDied, with the engine's name, if the engine hangs, lags or does not respond.
    """
    limit = settings.stall_timeout_s
    interval = min(limit / _POLLS, _MAX_INTERVAL_S)
    clock = StallClock(settings)
    polled = answered = time.monotonic()
    tokens = client.produced_tokens
    while True:
        await asyncio.sleep(interval)
        try:
            async with time_limit(limit):
                progress = await client.progress()
        except (EngineError, TimeoutError) as err:
            if time.monotonic() - answered >= limit:
                reason = f": {err}" if str(err) else ""
                raise EngineDied(
                    f"{client.name} gave no answer within {limit:g} s (engine.stall_timeout_s){reason}"
                ) from None
            continue
        if progress.dead:
            raise EngineDied(f"{client.name} lost a core: a process of vLLM's engine exited")
        answered = time.monotonic()
        # The bound on `elapsed` keeps out time in which this process was suspended.
        elapsed = min(answered - polled, limit / 4)
        polled = answered
        paused = client.paused
        stall = clock.update(progress.cores, in_flight=client.in_flight, paused=paused, elapsed_s=elapsed)
        if stall is None and lag is not None and not paused:
            decoding = sum(core.decoding for core in progress.cores)
            new_tokens = progress.tokens - tokens
            stall = lag.update(client.name, tokens=new_tokens, decoding=decoding, elapsed_s=elapsed)
        tokens = progress.tokens
        if stall is not None:
            raise EngineDied(f"{client.name} {stall}")
