"""The processes of a run as the controller sees them, whoever started them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.distributed.device import gpu_count
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.trainer.client import TrainerClient
from megatron_scalerl.trainer.messages import TrainerInfo
from megatron_scalerl.types import ComputeUnit
from megatron_scalerl.weights.transport import resolve_transport


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What a run holds, known before anything is started."""

    unit: ComputeUnit
    """gpu_hours where the devices are GPUs, device_hours where they are processes on CPUs."""
    trainer: int
    """Devices that the trainer holds."""
    engine: int
    """Devices that all engines hold together."""

    @classmethod
    def of(cls, recipe: Recipe) -> "Devices":
        """The devices that a recipe asks for on this machine."""
        return cls(
            unit="gpu_hours" if resolve_transport(recipe.weights.transport) == "nccl" else "device_hours",
            trainer=recipe.trainer.world_size,
            engine=recipe.engine.count * recipe.engine.devices_per_engine,
        )


def engine_gpus(recipe: Recipe, index: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of engine number `index`: the trainer has the first GPUs. None without GPUs.

    Raises ValueError where fewer are visible.
    """
    if resolve_transport(recipe.weights.transport) != "nccl":
        return None
    each = recipe.engine.devices_per_engine
    first = recipe.trainer.world_size + index * each
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(n) for n in range(gpu_count())]
    if len(names) < first + each:
        raise ValueError(
            f"engine.count: expected at least {first + each} visible GPUs for trainer and engines, found {len(names)}"
        )
    return ",".join(names[first : first + each])


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run, as its processes need to know it."""

    run_id: str
    """The same for every attempt of the run."""
    incarnation: str
    """`JOB_ID.RESTART_COUNT` on Slurm, else `local.N`; a process of an earlier attempt is refused by it."""
    folder: Path
    """RUN/; logs of the processes go to its folder `logs`."""
    recipe_file: Path
    """The recipe as resolved, which every process reads."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Trainer ranks and engines, ready to work. Produced by a launcher."""

    trainer: TrainerClient
    info: TrainerInfo
    engines: Sequence[EngineClient]
    devices: Devices
