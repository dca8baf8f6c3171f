"""The processes of a run as the controller sees them, whoever started them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_scalerl.ledger import Unit
from megatron_scalerl.rollouts.engine_client import EngineClient
from megatron_scalerl.trainer.client import TrainerClient
from megatron_scalerl.trainer.wire import TrainerInfo


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Trainer ranks and engines, ready to work. Produced by a launcher."""

    trainer: TrainerClient
    info: TrainerInfo
    engines: Sequence[EngineClient]
    unit: Unit
    """gpu_hours where the devices are GPUs, device_hours where they are processes on CPUs."""
    trainer_devices: int
    """Devices that the trainer holds."""
    engine_devices: int
    """Devices that all engines hold together."""
    held_since: float
    """Monotonic time from which the devices were held (seconds)."""

    @property
    def devices(self) -> int:
        """All devices of the run."""
        return self.trainer_devices + self.engine_devices
