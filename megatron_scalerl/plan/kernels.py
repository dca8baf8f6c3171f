"""What a trainer computes with: two axes, its layers and its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layers = Literal["fused", "plain"]
"""Transformer Engine's, and those of a trainer without it."""
Device = Literal["cpu", "gpu"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What a trainer computes with. Raises ValueError for fused layers on a CPU."""

    layers: Layers
    device: Device

    def __post_init__(self) -> None:
        if self.layers == "fused" and self.device == "cpu":
            raise ValueError("layers: expected plain on a CPU, where Transformer Engine does not run, found fused")


FUSED = Kernels(layers="fused", device="gpu")
"""Transformer Engine on GPUs."""
PLAIN_ON_GPU = Kernels(layers="plain", device="gpu")
