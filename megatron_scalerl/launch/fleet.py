"""The processes of a run as the controller sees them, whoever started them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_scalerl.ledger import Unit
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.engine_client import EngineClient
from megatron_scalerl.trainer.client import TrainerClient
from megatron_scalerl.trainer.wire import TrainerInfo
from megatron_scalerl.weights.transport import resolve_transport


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What a run holds, known before anything is started."""

    unit: Unit
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


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Trainer ranks and engines, ready to work. Produced by a launcher."""

    trainer: TrainerClient
    info: TrainerInfo
    engines: Sequence[EngineClient]
    devices: Devices
