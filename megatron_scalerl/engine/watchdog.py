"""Finds an engine that hangs: requests in flight, and no token for too long.

What is watched is the token count of each engine core, which the server's front end keeps (`engine.vllm_plugin`):
a core that hangs cannot delay the answer. No limit applies to a completion as a whole. Time in which the engine is
paused does not count, nor does time in which the controller itself did not run (a suspended job).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NoReturn

from megatron_scalerl.engine.answers import CoreProgress, EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.recipe.sections import EngineSection

_LOOKS = 20
"""Looks within one limit."""
_LONGEST_WAIT_S = 5.0
"""Between two looks."""


class EngineDied(RuntimeError):
    """The server ended, fell silent or produces no more tokens; the message names the engine."""


class StallClock:
    """How long each core of an engine has had work and produced nothing."""

    def __init__(self, settings: EngineSection) -> None:
        self._limit_s = settings.stall_timeout_s
        self._first_token_limit_s = max(settings.stall_timeout_s, settings.first_token_timeout_s)
        self._tokens: dict[int, int] = {}
        self._silent_s: dict[int, float] = {}

    def look(self, cores: Sequence[CoreProgress], *, in_flight: int, paused: bool, passed_s: float) -> str | None:
        """What is wrong, or None.

        in_flight: requests that the client waits for. paused: whether the engine is. passed_s: seconds since the
        last look.
        """
        # what the client waits for and no core has is stuck in the server
        stuck = in_flight > 0 and not any(core.waiting or core.decoding for core in cores)
        for core in cores:
            busy = stuck or core.waiting + core.decoding > 0
            moved = core.tokens != self._tokens.get(core.core)
            self._tokens[core.core] = core.tokens
            silent = 0.0 if moved or paused or not busy else self._silent_s.get(core.core, 0.0) + passed_s
            self._silent_s[core.core] = silent
            key = "stall_timeout_s" if core.decoding else "first_token_timeout_s"
            limit = self._limit_s if core.decoding else self._first_token_limit_s
            if silent >= limit:
                return (
                    f"produced no token for {silent:.3g} s with requests in flight (core {core.core}: "
                    f"{core.decoding} decoding, {core.waiting} without a token; engine.{key})"
                )
        return None


async def watch_progress(client: EngineClient, settings: EngineSection) -> NoReturn:
    """Look at one engine's progress for ever. Raises EngineDied, naming it, once it hangs or does not answer."""
    limit = settings.stall_timeout_s
    wait = min(limit / _LOOKS, _LONGEST_WAIT_S)
    clock = StallClock(settings)
    looked = answered = time.monotonic()
    while True:
        await asyncio.sleep(wait)
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
        # after a pause of this process the engine is given the time of one look, not all that has passed
        passed, looked = min(answered - looked, limit / 4), answered
        wrong = clock.look(progress.cores, in_flight=client.in_flight, paused=client.paused, passed_s=passed)
        if wrong is not None:
            raise EngineDied(f"{client.name} {wrong}")
