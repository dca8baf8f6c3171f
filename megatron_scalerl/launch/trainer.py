"""The trainer's ranks of one attempt on this machine: started as child processes of the controller, and stopped.

With GPUs, rank r uses the r-th visible one, and the engines the next ones (`launch.fleet.engine_gpus`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

from megatron_scalerl.distributed.device import environment
from megatron_scalerl.distributed.rendezvous import private_folder
from megatron_scalerl.launch.fleet import Attempt
from megatron_scalerl.processes.child_process import ChildProcess
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.trainer.client import TrainerClient
from megatron_scalerl.trainer.messages import TrainerInfo

logger = logging.getLogger(__name__)

_STOP_S = 60.0
"""Seconds for all ranks to leave their process groups and answer, once the run is finished."""


class LocalTrainer:
    """The ranks of one attempt. `start`, then use `client` while `watch` waits, then `stop`."""

    def __init__(self, recipe: Recipe, attempt: Attempt, client: TrainerClient) -> None:
        self.client = client
        self._recipe, self._attempt = recipe, attempt
        self._ranks: list[ChildProcess] = []
        self._watches: list[asyncio.Task[NoReturn]] = []  # one per rank; each ends by raising
        self._started = asyncio.Event()

    async def start(self) -> TrainerInfo:
        """Start all ranks and wait until they are ready. Raises the first failure."""
        for rank in range(self._recipe.trainer.world_size):
            child = await start_rank(
                self._recipe,
                self.client,
                rank=rank,
                recipe_file=self._attempt.recipe_file,
                log=self._attempt.folder / "logs" / f"trainer-{rank}.log",
            )
            self._ranks.append(child)
            self._watches.append(asyncio.create_task(child.watch(), name=child.name))
        self._started.set()
        return await self.client.wait_ready(self._recipe.trainer.start_timeout_s)

    async def watch(self) -> NoReturn:
        """Wait until a rank has exited, then raise ProcessDied."""
        await self._started.wait()
        await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        next(watch for watch in self._watches if watch.done()).result()

    async def stop(self, *, graceful: bool) -> None:
        """Stop every rank, whatever fails meanwhile; each failure is logged as a one-line warning.

        graceful: let the ranks leave their process groups first.
        """
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        try:
            if graceful:
                async with asyncio.timeout(_STOP_S):
                    await self.client.stop()
        except (RuntimeError, OSError) as error:  # the run is finished and on disk
            reason = str(error) or f"no answer within {_STOP_S:g} s"
            logger.warning("the run is finished, but its trainer did not stop gracefully: %s", reason)
        finally:
            self.client.close()
            results = await asyncio.gather(*(rank.stop() for rank in self._ranks), return_exceptions=True)
            for rank, failure in zip(self._ranks, results):
                if isinstance(failure, BaseException):
                    logger.warning("%s could not be stopped: %s", rank.name, str(failure) or type(failure).__name__)


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
async def local_trainer(recipe: Recipe, attempt: Attempt, secret: str) -> AsyncIterator[LocalTrainer]:
    """The trainer of one attempt, stopped on exit from the block, gracefully if nothing was raised."""
    with private_folder() as rendezvous:
        client = TrainerClient(
            world_size=recipe.trainer.world_size,
            run_id=attempt.run_id,
            incarnation=attempt.incarnation,
            secret=secret,
            rendezvous=rendezvous,
            command_timeout_s=recipe.trainer.step_timeout_s,
        )
        trainer = LocalTrainer(recipe, attempt, client)
        try:
            yield trainer
        except BaseException:
            await trainer.stop(graceful=False)
            raise
        await trainer.stop(graceful=True)
