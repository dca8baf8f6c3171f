"""The processes of a run: engines and trainer ranks, on this host and on all hosts that `hosts` names.

Engines live as long as the run (`launch.engines`), trainer ranks as long as one attempt (`launch.trainer`). An engine
that exits or hangs is evicted and started again. A trainer rank that exits ends the attempt. Besides this package's
`launch`, two things end processes: a second SIGINT or SIGTERM (`processes.signals`), and the kernel when the
controller dies (`processes.parent_death`).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn, TypeVar

from megatron_scalerl.engine.membership import Member
from megatron_scalerl.launch.control_folder import secret_file, withdraw
from megatron_scalerl.launch.engines import Engines
from megatron_scalerl.launch.hosts import ONE_HOST, Hosts
from megatron_scalerl.launch.placement import Attempt, Devices, Fleet, Placement
from megatron_scalerl.launch.trainer import TrainerRanks, trainer_ranks
from megatron_scalerl.processes.child_process import cancelled, race
from megatron_scalerl.processes.secret_file import write_secret
from megatron_scalerl.recipe import Recipe

T = TypeVar("T")
Watch = Callable[[], Coroutine[Any, Any, NoReturn]]


class Launcher:
    """The processes of one run: the engines, and the trainer of the current attempt."""

    def __init__(self, recipe: Recipe, attempt: Attempt, secret: str, hosts: Hosts, record: Callable[[Member], None]):
        self._recipe = recipe
        self._secret = secret
        self._hosts = hosts
        self._placement = Placement.of(recipe, hosts)
        if hosts.address is not None:
            write_secret(secret_file(attempt.folder), secret)
        self.engines = Engines(
            recipe, placement=self._placement, hosts=hosts, attempt=attempt, secret=secret, record=record
        )
        self._starting: asyncio.Task[None] | None = None

    def trainer(self, attempt: Attempt) -> AbstractAsyncContextManager[TrainerRanks]:
        """The trainer of one attempt, as a context manager that stops the trainer's ranks at the end of the block."""
        return trainer_ranks(self._recipe, attempt, self._secret, self._hosts, self._placement)

    async def start(self, trainer: TrainerRanks) -> Fleet:
        """Start the trainer, and in the first attempt the engines; wait until all are ready.

        Raises the first failure.
        """
        # Engines keep running between attempts, so only the first attempt starts engines.
        if self._starting is None:
            self._starting = asyncio.create_task(self.engines.start(), name="engines")

        async def ready() -> Any:
            assert self._starting is not None
            return await asyncio.gather(trainer.start(), self._starting)

        info, _ = await until_failure(ready(), trainer.watch)
        return Fleet(
            trainer=trainer.client, info=info, engines=self.engines.members, devices=Devices.of(self._recipe)
        )

    async def stop(self) -> None:
        """Stop the engines, including engines that are being started."""
        if self._starting is not None:
            await cancelled(self._starting)
        await self.engines.stop()


async def until_failure(work: Coroutine[Any, Any, T], *watches: Watch) -> T:
    """Run `work` and return the result.

    If one of `watches` raises first, `work` is cancelled and the error is raised.
    """
    async with race(work, *(watch() for watch in watches)) as (task, *watching):
        if not task.done():
            next(watch for watch in watching if watch.done()).result()
        return task.result()


@contextlib.asynccontextmanager
async def launching(
    recipe: Recipe,
    attempt: Attempt,
    secret: str,
    record: Callable[[Member], None] = lambda member: None,
    *,
    hosts: Hosts = ONE_HOST,
) -> AsyncIterator[Launcher]:
    """A launcher for the block; afterwards all engines are stopped and the run's secret is deleted.

    attempt: first attempt of this process, whose folder and incarnation the engines keep. record: called with every
    change of an engine. Raises ValueError if a port is in use, if vLLM does not know an option, or if the processes
    do not fit on the hosts.
    """
    launcher = Launcher(recipe, attempt, secret, hosts, record)
    try:
        yield launcher
    finally:
        try:
            await launcher.stop()
        finally:
            withdraw(attempt.folder, secret)
