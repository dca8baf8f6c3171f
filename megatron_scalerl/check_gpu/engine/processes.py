"""An engine and a trainer as child processes of a part, each started, timed and ended by itself."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.check_gpu.logs import cause, read_log, serving_facts
from megatron_scalerl.distributed.rendezvous import FolderRendezvous
from megatron_scalerl.engine.answers import EngineInfo
from megatron_scalerl.engine.process import EngineProcess
from megatron_scalerl.launch.local import start_rank
from megatron_scalerl.processes.child_process import ChildProcess
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import dump_recipe
from megatron_scalerl.trainer.client import TrainerClient
from megatron_scalerl.trainer.messages import TrainerInfo

SECRET = "check-gpu-" + uuid.uuid4().hex
TRANSPORT = "gloo"
"""Trainer and engine share a GPU, and NCCL refuses two ranks on one."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """An engine that answers. Produced by `serve`."""

    process: EngineProcess
    info: EngineInfo
    seconds: float
    """From the start of its process until it answered."""
    facts: dict[str, str]
    """See `logs.serving_facts`."""


async def serve(recipe: Recipe, log: Path, *, index: int = 0) -> Serving:
    """Start an engine. Raises RuntimeError: one line with the cause from its log."""
    process = EngineProcess(recipe, index=index, secret=SECRET, log_path=log, transport=TRANSPORT)
    begin = time.monotonic()
    try:
        info = await process.start()
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0].removesuffix(f"; the end of {log}:")
        raise RuntimeError(f"{first}: {cause(read_log(log))}") from error
    seconds = time.monotonic() - begin
    return Serving(process=process, info=info, seconds=seconds, facts=serving_facts(read_log(log)))


class Training:
    """One trainer rank. `start`, then `client`; `stop` whenever."""

    def __init__(self, recipe: Recipe, folder: Path, name: str, rendezvous: FolderRendezvous) -> None:
        self._recipe, self._file = recipe, folder / f"{name}.yaml"
        self.log = folder / f"{name}.log"
        self._process: ChildProcess | None = None
        self.client = TrainerClient(
            world_size=1,
            run_id=name,
            incarnation=uuid.uuid4().hex,
            secret=SECRET,
            rendezvous=rendezvous,
            command_timeout_s=recipe.trainer.step_timeout_s,
        )

    async def start(self) -> TrainerInfo:
        """Start the rank and wait until its policy is built. Raises RuntimeError: one line with the cause."""
        self._file.write_text(dump_recipe(self._recipe), encoding="utf8")
        self._process = await start_rank(self._recipe, self.client, rank=0, recipe_file=self._file, log=self.log)
        ready = asyncio.create_task(self.client.wait_ready(self._recipe.trainer.start_timeout_s))
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise RuntimeError(f"trainer ended with {ended.result()}: {cause(read_log(self.log))}")
            return ready.result()
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)

    async def stop(self) -> None:
        """End the rank."""
        self.client.close()
        if self._process is not None:
            await self._process.stop(5.0)
