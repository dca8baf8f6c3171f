"""The processes of a run as the controller uses them, independent of the launcher that started them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.trainer.client import TrainerClient
from megatron_scalerl.trainer.messages import TrainerInfo
from megatron_scalerl.types import ComputeUnit
from megatron_scalerl.weights.transport import resolve_transport


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that a run holds, known before any process is started."""

    unit: ComputeUnit
    """gpu_hours if the devices are GPUs, device_hours if they are processes on CPUs."""
    trainer: int
    """Devices of the trainer."""
    engine: int
    """Devices of all engines together."""

    @classmethod
    def of(cls, recipe: Recipe) -> Devices:
        """The devices that a recipe requires on this machine."""
        return cls(
            unit="gpu_hours" if resolve_transport(recipe.weights.transport) == "nccl" else "device_hours",
            trainer=recipe.trainer.world_size,
            engine=recipe.engine.count * recipe.engine.devices_per_engine,
        )


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run, as its processes identify it. Produced by `controller.run_folder`."""

    run_id: str
    """The same in every attempt of the run."""
    incarnation: str
    """`JOB_ID.RESTART_COUNT` on Slurm, otherwise `local.N`; processes of an earlier attempt are refused by it."""
    folder: Path
    """RUN/; the processes write their logs to its subfolder `logs`."""
    recipe_file: Path
    """The resolved recipe, which every process reads."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Trainer ranks and engines, ready for requests. Produced by a launcher."""

    trainer: TrainerClient
    info: TrainerInfo
    engines: Membership
    devices: Devices
