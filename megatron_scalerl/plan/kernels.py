"""What a trainer computes with: two axes, its layers and its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layers = Literal["te", "plain"]
"""Transformer Engine's, and those of a trainer without it."""
Device = Literal["cpu", "gpu"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What a trainer computes with. Raises ValueError for te on a CPU."""

    layers: Layers
    device: Device

    def __post_init__(self) -> None:
        if self.layers == "te" and self.device == "cpu":
            raise ValueError("layers: expected plain on a CPU, where Transformer Engine does not run, found te")


FUSED = Kernels(layers="te", device="gpu")
"""Transformer Engine on GPUs."""
PLAIN_ON_GPU = Kernels(layers="plain", device="gpu")
