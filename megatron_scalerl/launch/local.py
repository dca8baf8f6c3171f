"""Start a whole run on one machine: engines and trainer ranks are child processes of the controller.

With GPUs, the trainer ranks use the first ones and the engines the next ones; without, every process uses the CPU.

Who ends a process: `while_alive` raises when any process exits or hangs, `local_launcher` then calls `stop`, which
ends every other process, engines included. An engine that does not start stops itself (`engine.process`).
Nothing else in the controller ends a process, except a second SIGINT
or SIGTERM (`processes.signals`) and the kernel when the controller dies (`processes.parent_death`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megatron_scalerl.distributed.device import environment
from megatron_scalerl.distributed.rendezvous import FolderRendezvous, private_folder
from megatron_scalerl.engine.answers import EngineInfo
from megatron_scalerl.engine.process import EngineProcess
from megatron_scalerl.launch.fleet import Attempt, Devices, Fleet, engine_gpus
from megatron_scalerl.processes.child_process import ChildProcess
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.trainer.client import TrainerClient
from megatron_scalerl.weights.transport import resolve_transport

T = TypeVar("T")
logger = logging.getLogger(__name__)

_TRAINER_STOP_S = 60.0
"""Seconds for all trainer ranks to leave their process groups and answer, once the run is finished."""


class LocalLauncher:
    """The processes of one attempt on this machine. `start`, then work inside `while_alive`, then `stop`."""

    def __init__(self, recipe: Recipe, attempt: Attempt, secret: str, rendezvous: FolderRendezvous) -> None:
        """Raises ValueError for a port in use and for options unknown to vLLM."""
        self._recipe = recipe
        self._attempt = attempt
        self._trainers: list[ChildProcess] = []
        self._watches: list[asyncio.Task[NoReturn]] = []  # one per process; each ends by raising
        self._starts: list[asyncio.Task[EngineInfo]] = []
        self._client = TrainerClient(
            world_size=recipe.trainer.world_size,
            run_id=attempt.run_id,
            incarnation=attempt.incarnation,
            secret=secret,
            rendezvous=rendezvous,
            command_timeout_s=recipe.trainer.step_timeout_s,
        )
        transport = resolve_transport(recipe.weights.transport)
        self._engines = [
            EngineProcess(
                recipe,
                index=index,
                secret=secret,
                log_path=attempt.folder / "logs" / f"engine-{index}.log",
                transport=transport,
                devices=engine_gpus(recipe, index),
            )
            for index in range(recipe.engine.count)
        ]

    async def start(self) -> Fleet:
        """Start all processes and wait until they are ready. Raises the first failure."""
        for rank in range(self._recipe.trainer.world_size):
            self._trainers.append(
                await start_rank(
                    self._recipe,
                    self._client,
                    rank=rank,
                    recipe_file=self._attempt.recipe_file,
                    log=self._attempt.folder / "logs" / f"trainer-{rank}.log",
                )
            )
        self._watches = [asyncio.create_task(p.watch(), name=p.name) for p in self._trainers]
        self._starts = [asyncio.create_task(engine.start(), name=engine.name) for engine in self._engines]
        info, _ = await self.while_alive(
            asyncio.gather(
                self._client.wait_ready(self._recipe.trainer.start_timeout_s), asyncio.gather(*self._starts)
            )
        )
        self._watches += [asyncio.create_task(e.watch(), name=e.name) for e in self._engines]
        return Fleet(
            trainer=self._client,
            info=info,
            engines=[engine.client for engine in self._engines],
            devices=Devices.of(self._recipe),
        )

    async def while_alive(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        """The result of `work`. Raises the error of the first process that exits or hangs meanwhile.

        Consumes the watch task of every process. Waits for the work or the first failing process, whichever comes
        first; a hung process unblocks it too, because the engines' progress is watched (`engine.watchdog`).
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, *self._watches}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                next(watch for watch in self._watches if watch.done()).result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def stop(self, *, graceful: bool) -> None:
        """Stop every process, whatever fails meanwhile; each failure is logged as a one-line warning.

        graceful: let the trainer ranks leave their process groups first.
        """
        for task in (*self._watches, *self._starts):
            task.cancel()
        await asyncio.gather(*self._watches, *self._starts, return_exceptions=True)
        try:
            await self._stop_trainer(graceful)
        finally:
            children: list[EngineProcess | ChildProcess] = [*self._engines, *self._trainers]
            results = await asyncio.gather(*(child.stop() for child in children), return_exceptions=True)
            for child, error in zip(children, results):
                if isinstance(error, BaseException):
                    logger.warning("%s could not be stopped: %s", child.name, str(error) or type(error).__name__)

    async def _stop_trainer(self, graceful: bool) -> None:
        try:
            if graceful:
                async with asyncio.timeout(_TRAINER_STOP_S):
                    await self._client.stop()
        except (RuntimeError, OSError) as error:  # the run is finished and on disk
            reason = str(error) or f"no answer within {_TRAINER_STOP_S:g} s"
            logger.warning("the run is finished, but its trainer did not stop gracefully: %s", reason)
        finally:
            self._client.close()


async def start_rank(
    recipe: Recipe, client: TrainerClient, *, rank: int, recipe_file: Path, log: Path
) -> ChildProcess:
    """Start one trainer rank, which reads `recipe_file` and connects to `client`."""
    env = client.worker_env(rank) | {
        "LOCAL_RANK": str(rank),
        "MSRL_RECIPE": str(recipe_file),
        "OMP_NUM_THREADS": str(recipe.trainer.threads),
        # Megatron-Core warns at every import that Transformer Engine and apex are not installed
        "PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning",
    }
    argv = [sys.executable, "-m", "megatron_scalerl.trainer.worker"]
    return await ChildProcess.start(f"trainer-{rank}", argv, environment(recipe) | os.environ | env, log)


@contextlib.asynccontextmanager
async def local_launcher(recipe: Recipe, attempt: Attempt, secret: str) -> AsyncIterator[LocalLauncher]:
    """A launcher whose processes are stopped on exit from the block, gracefully if nothing was raised."""
    with private_folder() as rendezvous:
        launcher = LocalLauncher(recipe, attempt, secret, rendezvous)
        try:
            yield launcher
        except BaseException:
            await launcher.stop(graceful=False)
            raise
        await launcher.stop(graceful=True)
