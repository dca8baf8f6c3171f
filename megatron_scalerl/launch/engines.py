"""The engines of a run on this machine: started, watched, ended when they are evicted, and started again.

One supervisor task per engine (`_supervise`). Consumes: the exits, stalls and evictions of its engine. Waits for: one
of these; then for the end of the engine's processes, for the delay, and for the new server. Unblocked by: the
watchdog (`engine.watchdog`), or whoever evicts the engine (`engine.membership`). It ends when the engine is given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron_scalerl.engine.membership import Member, Membership
from megatron_scalerl.engine.process import EngineProcess
from megatron_scalerl.engine.watchdog import EngineDied, LagClock
from megatron_scalerl.launch.placement import Placement, gpus_at
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.weights.transport import resolve_transport

logger = logging.getLogger(__name__)

FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0
"""Delay before the first restart in a row, which doubles with each, and its bound (seconds)."""
HEALTHY_S = 600.0
"""An engine that ran for so long, besides the longest time in which a fault is found, starts a new row of restarts
(seconds)."""


class LocalEngines:
    """The engine processes of one run. `start`, then `watch`, then `stop`."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        placement: Placement,
        logs: Path,
        secret: str,
        record: Callable[[Member], None] = lambda member: None,
    ) -> None:
        """logs: folder of the engines' logs. Binds the servers' addresses.

        Raises ValueError for a port in use and for options unknown to vLLM.
        """
        self.members = Membership(recipe.engine.count, minimum=recipe.engine.min_engines, record=record)
        self._recipe, self._placement, self._logs, self._secret = recipe, placement, logs, secret
        self._lag = LagClock(recipe.engine)
        self._processes = [self._make(index) for index in range(recipe.engine.count)]
        self._supervisors: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all engines, which are stale then. Raises the first failure: a first start is not repeated."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self._processes)):
                tasks.create_task(self._start(index), name=f"engine-{index}")
        self._supervisors = [
            asyncio.create_task(self._supervise(index), name=f"engine-{index}")
            for index in range(len(self._processes))
        ]

    async def watch(self) -> NoReturn:
        """Wait until fewer engines than engine.min_engines are left, then raise EngineDied.

        Raises the error of a supervisor as well: nobody would end its engine or start it again.
        """
        too_few = asyncio.create_task(self.members.too_few())
        try:
            done, _ = await asyncio.wait({too_few, *self._supervisors}, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            too_few.cancel()
            await asyncio.gather(too_few, return_exceptions=True)
        raise AssertionError("too_few raises")

    async def stop(self) -> None:
        """Stop every process, whatever fails meanwhile; each failure is logged as a one-line warning."""
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        results = await asyncio.gather(*(process.stop() for process in self._processes), return_exceptions=True)
        for process, error in zip(self._processes, results):
            if isinstance(error, BaseException):
                logger.warning("%s could not be stopped: %s", process.name, str(error) or type(error).__name__)

    def _make(self, index: int) -> EngineProcess:
        return EngineProcess(
            self._recipe,
            index=index,
            secret=self._secret,
            log_path=self._logs / f"engine-{index}.log",
            transport=resolve_transport(self._recipe.weights.transport),
            devices=gpus_at(self._placement.engine_positions(index)),
        )

    async def _start(self, index: int) -> None:
        process = self._processes[index]
        self.members.start(index)
        await process.start()
        self.members.join(index, process.client)

    async def _supervise(self, index: int) -> None:
        """Keep one engine running until it is given up."""
        failures, started = 0, time.monotonic()
        while True:
            reason = await self._until_evicted(index)
            failures = 1 if time.monotonic() - started > self._healthy_s else failures + 1
            while not await self._restart(index, failures, reason):
                if self.members.members[index].given_up:
                    return
                failures, reason = failures + 1, self.members.members[index].reason
            started = time.monotonic()

    @property
    def _healthy_s(self) -> float:
        """An engine that ran for longer (s) had no fault at its start: one is found within the longest limit."""
        engine, weights = self._recipe.engine, self._recipe.weights
        return HEALTHY_S + max(engine.stall_timeout_s, engine.first_token_timeout_s, weights.timeout_s)

    async def _until_evicted(self, index: int) -> str:
        """Wait until the engine fails or is evicted; it is evicted then. Returns the reason."""
        process = self._processes[index]
        watch = asyncio.create_task(process.watch(self._lag))
        evicted = asyncio.create_task(self.members.evicted(process.client))
        try:
            await asyncio.wait({watch, evicted}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and (error := watch.exception()) is not None:
                self.members.evict(process.client, str(error))
                return str(error)
            return await evicted
        finally:
            watch.cancel()
            evicted.cancel()
            await asyncio.gather(watch, evicted, return_exceptions=True)

    async def _restart(self, index: int, failures: int, reason: str) -> bool:
        """End what is left of an engine's server and start another; False if it is given up or does not start.

        An engine whose processes do not end is given up: they hold its devices.
        """
        logger.warning("engine-%d is evicted: %s", index, reason)
        process = self._processes[index]
        given_up = failures > self._recipe.engine.max_restarts
        try:
            process.kill()  # it may be stopped or hang, and nothing of it is worth saving
            await process.stop()
        except (RuntimeError, OSError) as error:
            given_up, reason = True, str(error)
        self._lag.forget(process.name)
        self.members.lose(index, reason, given_up=given_up)
        if given_up:
            return False
        await asyncio.sleep(min(FIRST_DELAY_S * 2 ** (failures - 1), LONGEST_DELAY_S))
        try:
            self._processes[index] = self._make(index)
            await self._start(index)
        except (EngineDied, RuntimeError, ValueError, OSError) as error:
            self.members.lose(index, str(error))
            return False
        return True
