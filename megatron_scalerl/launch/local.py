"""Starts a whole run on one machine: engines and trainer ranks as child processes, watched together.

On a machine with GPUs the trainer ranks take the first ones and the engines the next ones; without GPUs every
process works on the CPU. Not run on GPUs yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from megatron_scalerl.launch.fleet import Fleet
from megatron_scalerl.launch.processes import ChildProcess
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.engine import EngineInfo, EngineProcess
from megatron_scalerl.run_folder import RunFolder
from megatron_scalerl.trainer.client import TrainerClient
from megatron_scalerl.weights.sync import free_port
from megatron_scalerl.weights.transport import resolve_transport

T = TypeVar("T")
logger = logging.getLogger(__name__)

_LEAVE_S = 60.0
"""For all trainer ranks to leave their process groups and answer, once the run is finished."""


class LocalLauncher:
    """Processes of one life of a run on this machine."""

    def __init__(self, recipe: Recipe, folder: RunFolder, secret: str) -> None:
        """Raises ValueError for a port in use and for options that vLLM does not know."""
        self._recipe = recipe
        self._folder = folder
        self._transport = resolve_transport(recipe.weights.transport)
        self._held_since = time.monotonic()
        self._trainers: list[ChildProcess] = []
        self._watches: list[asyncio.Task[BaseException]] = []
        self._starts: list[asyncio.Task[EngineInfo]] = []
        self._client = TrainerClient(
            world_size=recipe.trainer.world_size,
            run_id=folder.run_id,
            incarnation=folder.incarnation,
            secret=secret,
            command_timeout_s=recipe.trainer.step_timeout_s,
        )
        self._engines = [
            EngineProcess(
                recipe,
                index=index,
                secret=secret,
                log_path=folder.path / "logs" / f"engine-{index}.log",
                transport=self._transport,
                devices=self._engine_gpus(index),
            )
            for index in range(recipe.engine.count)
        ]

    async def start(self) -> Fleet:
        """Start everything and wait until it is ready. Raises what went wrong first."""
        port = free_port("127.0.0.1")
        for rank in range(self._recipe.trainer.world_size):
            self._trainers.append(await self._start_rank(rank, port))
        self._watches = [asyncio.create_task(p.died(), name=p.name) for p in self._trainers]
        self._starts = [asyncio.create_task(engine.start(), name=engine.name) for engine in self._engines]
        info, _ = await self.while_alive(
            asyncio.gather(
                self._client.wait_ready(self._recipe.trainer.start_timeout_s), asyncio.gather(*self._starts)
            )
        )
        self._watches += [asyncio.create_task(_end_of(e), name=e.name) for e in self._engines]
        return Fleet(
            trainer=self._client,
            info=info,
            engines=[engine.client for engine in self._engines],
            unit="gpu_hours" if info.backend == "nccl" else "device_hours",
            trainer_devices=self._recipe.trainer.world_size,
            engine_devices=self._recipe.engine.count * self._recipe.engine.devices_per_engine,
            held_since=self._held_since,
        )

    async def while_alive(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        """The result of `work`, or the error of the first process that ends under it."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, *self._watches}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise next(w for w in self._watches if w.done()).result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def stop(self, *, kindly: bool) -> None:
        """End every process, whatever fails on the way; each failure is a warning of one line.

        `kindly` lets the trainer ranks leave their process groups first.
        """
        for task in (*self._watches, *self._starts):
            task.cancel()
        await asyncio.gather(*self._watches, *self._starts, return_exceptions=True)
        try:
            await self._leave(kindly)
        finally:
            children: list[EngineProcess | ChildProcess] = [*self._engines, *self._trainers]
            ends = await asyncio.gather(*(child.stop() for child in children), return_exceptions=True)
            for child, end in zip(children, ends):
                if isinstance(end, BaseException):
                    logger.warning("%s could not be stopped: %s", child.name, str(end) or type(end).__name__)

    async def _leave(self, kindly: bool) -> None:
        try:
            if kindly:
                async with asyncio.timeout(_LEAVE_S):
                    await self._client.stop()
        except (RuntimeError, OSError) as failure:  # the run is finished and on disk
            why = str(failure) or f"no answer within {_LEAVE_S:g} s"
            logger.warning("the run is finished, but its trainer did not end in order: %s", why)
        finally:
            self._client.close()

    async def _start_rank(self, rank: int, port: int) -> ChildProcess:
        env = self._client.worker_env(rank) | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "LOCAL_RANK": str(rank),
            "MSRL_RECIPE": str(self._folder.recipe_file),
            "OMP_NUM_THREADS": str(self._recipe.trainer.threads),
            # upstream says at every import that Transformer Engine and apex are absent
            "PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning",
        }
        return await ChildProcess.start(
            f"trainer-{rank}",
            [sys.executable, "-m", "megatron_scalerl.trainer.worker"],
            os.environ | env,
            self._folder.path / "logs" / f"trainer-{rank}.log",
        )

    def _engine_gpus(self, index: int) -> str | None:
        if self._transport != "nccl":
            return None
        each = self._recipe.engine.devices_per_engine
        first = self._recipe.trainer.world_size + index * each
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(n) for n in range(first + each)]
        if len(names) < first + each:
            raise ValueError(
                f"engine.count: expected at least {first + each} visible GPUs for trainer and engines, "
                f"found {len(names)}"
            )
        return ",".join(names[first : first + each])


@contextlib.asynccontextmanager
async def local_launcher(recipe: Recipe, folder: RunFolder, secret: str) -> AsyncIterator[LocalLauncher]:
    """A launcher whose processes are gone when the block is left, kindly if nothing was raised."""
    launcher = LocalLauncher(recipe, folder, secret)
    try:
        yield launcher
    except BaseException:
        await launcher.stop(kindly=False)
        raise
    await launcher.stop(kindly=True)


async def _end_of(engine: EngineProcess) -> BaseException:
    try:
        await engine.watch()
    except asyncio.CancelledError:
        raise
    except RuntimeError as end:
        return end
    raise AssertionError("watch returned")
