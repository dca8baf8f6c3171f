"""The processes of a run on one machine: engines and trainer ranks are child processes of the controller.

Engines live as long as the run (`launch.engines`), trainer ranks as long as one attempt (`launch.trainer`). An engine
that exits or hangs is evicted and started again. A trainer rank that exits ends the attempt. Nothing else in the
controller ends a process, except a second SIGINT or SIGTERM (`processes.signals`) and the kernel when the controller
dies (`processes.parent_death`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megatron_scalerl.engine.membership import Member
from megatron_scalerl.launch.engines import LocalEngines
from megatron_scalerl.launch.fleet import Attempt, Devices, Fleet
from megatron_scalerl.launch.trainer import LocalTrainer, local_trainer
from megatron_scalerl.recipe import Recipe

T = TypeVar("T")
Watch = Callable[[], Coroutine[Any, Any, NoReturn]]


class LocalLauncher:
    """The processes of one run on this machine: its engines, and the trainer of the current attempt."""

    def __init__(self, recipe: Recipe, secret: str, engines: LocalEngines) -> None:
        self.engines = engines
        self._recipe, self._secret = recipe, secret
        self._starting: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def trainer(self, attempt: Attempt) -> AsyncIterator[LocalTrainer]:
        """The trainer of one attempt; its processes are stopped on exit from the block."""
        async with local_trainer(self._recipe, attempt, self._secret) as trainer:
            yield trainer

    async def start(self, trainer: LocalTrainer) -> Fleet:
        """Start the trainer and, the first time, the engines; wait until all are ready. Raises the first failure."""
        if self._starting is None:
            self._starting = asyncio.create_task(self.engines.start(), name="engines")

        async def ready() -> Any:
            assert self._starting is not None
            return await asyncio.gather(trainer.start(), self._starting)

        info, _ = await until_failure(ready(), trainer.watch)
        return Fleet(
            trainer=trainer.client, info=info, engines=self.engines.members, devices=Devices.of(self._recipe)
        )

    async def while_alive(self, trainer: LocalTrainer, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises the error of the first trainer rank that exits, and if engines are too few."""
        return await until_failure(work, trainer.watch, self.engines.watch)

    async def stop(self) -> None:
        """Stop the engines, those that are being started too."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self.engines.stop()


async def until_failure(work: Coroutine[Any, Any, T], *watches: Watch) -> T:
    """The result of `work`, which is cancelled when the first of `watches` raises; that is raised then."""
    task = asyncio.ensure_future(work)
    watching = [asyncio.create_task(watch()) for watch in watches]
    try:
        await asyncio.wait({task, *watching}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            next(watch for watch in watching if watch.done()).result()
        return task.result()
    finally:
        for unfinished in (task, *watching):
            unfinished.cancel()
        await asyncio.gather(task, *watching, return_exceptions=True)


@contextlib.asynccontextmanager
async def local_launcher(
    recipe: Recipe, folder: Path, secret: str, record: Callable[[Member], None] = lambda member: None
) -> AsyncIterator[LocalLauncher]:
    """A launcher whose processes are stopped on exit from the block.

    folder: RUN/. record: called with every change of an engine. Raises ValueError for a port in use and for options
    unknown to vLLM.
    """
    engines = LocalEngines(recipe, logs=folder / "logs", secret=secret, record=record)
    launcher = LocalLauncher(recipe, secret, engines)
    try:
        yield launcher
    finally:
        await launcher.stop()
