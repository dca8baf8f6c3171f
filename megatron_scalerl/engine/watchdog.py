"""Detects an engine that hangs: requests in flight, and no token for too long. Runs in the controller.

It polls the token count of each engine core, which the server process keeps (`engine.vllm_progress`): a hanging core
cannot delay the response. No limit applies to a completion as a whole. Time in which the engine is paused does not
count, nor does time in which the controller itself did not run (a suspended job). EngineDied
ends the attempt: `launch.local` stops the processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NoReturn

from megatron_scalerl.engine.answers import CoreProgress, EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.recipe.sections import EngineSection

_POLLS = 20
"""Polls within `stall_timeout_s`."""
_MAX_INTERVAL_S = 5.0
"""Longest time between two polls."""


class EngineDied(RuntimeError):
    """The server exited, does not respond or produces no tokens; the message names the engine."""


class StallClock:
    """Measures how long each core of an engine has had requests and produced no token."""

    def __init__(self, settings: EngineSection) -> None:
        self._limit_s = settings.stall_timeout_s
        self._first_token_limit_s = max(settings.stall_timeout_s, settings.first_token_timeout_s)
        self._tokens: dict[int, int] = {}
        self._stalled_s: dict[int, float] = {}

    def update(self, cores: Sequence[CoreProgress], *, in_flight: int, paused: bool, elapsed_s: float) -> str | None:
        """Add one poll; returns a description of the stall, or None.

        in_flight: requests that the client is waiting for. paused: whether the engine is paused. elapsed_s: seconds
        since the last poll.
        """
        # requests that the client is waiting for and no core has are stuck in the server
        stuck = in_flight > 0 and not any(core.waiting or core.decoding for core in cores)
        for core in cores:
            busy = stuck or core.waiting + core.decoding > 0
            advanced = core.tokens != self._tokens.get(core.core)
            self._tokens[core.core] = core.tokens
            idle = advanced or paused or not busy
            stalled_s = 0.0 if idle else self._stalled_s.get(core.core, 0.0) + elapsed_s
            self._stalled_s[core.core] = stalled_s
            key = "stall_timeout_s" if core.decoding else "first_token_timeout_s"
            limit = self._limit_s if core.decoding else self._first_token_limit_s
            if stalled_s >= limit:
                return (
                    f"produced no token for {stalled_s:.3g} s with requests in flight (core {core.core}: "
                    f"{core.decoding} decoding, {core.waiting} without a token; engine.{key})"
                )
        return None


async def watch_progress(client: EngineClient, settings: EngineSection) -> NoReturn:
    """Poll one engine's progress forever. Raises EngineDied, naming it, once it hangs or does not respond."""
    limit = settings.stall_timeout_s
    interval = min(limit / _POLLS, _MAX_INTERVAL_S)
    clock = StallClock(settings)
    polled = answered = time.monotonic()
    while True:
        await asyncio.sleep(interval)
        try:
            async with asyncio.timeout(limit):
                progress = await client.progress()
        except (EngineError, TimeoutError) as err:
            if time.monotonic() - answered >= limit:
                raise EngineDied(
                    f"{client.name} gave no answer within {limit:g} s (engine.stall_timeout_s): {err}"
                ) from None
            continue
        if progress.dead:
            raise EngineDied(f"{client.name} lost a core")
        answered = time.monotonic()
        # where this process was suspended, that time does not count against the engine
        elapsed, polled = min(answered - polled, limit / 4), answered
        stall = clock.update(progress.cores, in_flight=client.in_flight, paused=client.paused, elapsed_s=elapsed)
        if stall is not None:
            raise EngineDied(f"{client.name} {stall}")
