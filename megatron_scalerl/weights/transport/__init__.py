"""The wire from the trainer to the engines, the trainer's end: torch only, never vLLM.

A sender is made once from a plain dict (it travels as JSON) and then sends every update. gloo serves CPUs,
NCCL serves GPUs; both are one broadcast group, the trainer's sending rank being rank 0 and every engine's
workers following.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from megatron_scalerl.trainer import device
from megatron_scalerl.weights.manifest import Manifest


class Sender(Protocol):
    """The trainer's end of the wire."""

    def send(self, tensors: Iterator[tuple[str, torch.Tensor]], manifest: Manifest, version: int) -> dict[str, Any]:
        """Send one update and return {"seconds", "bytes", "digest"}.

        tensors: (name, tensor) exactly as the manifest lists them, in its order, of its types and shapes.
        Raises ValueError if they differ, RuntimeError if the group breaks; either way the group is closed.
        """

    def close(self) -> None:
        """Leave the group."""


def make_sender(spec: dict[str, Any]) -> Sender:
    """Open the group and wait for all engines to join.

    spec: backend (gloo, nccl), host, port, world_size (1 + all workers of all engines), bucket_mib, timeout_s,
    secret. Raises ValueError for a broken spec, RuntimeError if the engines do not come in time.
    """
    expected = {"backend", "host", "port", "world_size", "bucket_mib", "timeout_s", "secret"}
    if spec.keys() != expected:
        raise ValueError(f"weights: expected a connection of {sorted(expected)}, found {sorted(spec)}")
    from megatron_scalerl.weights.transport import gloo, nccl

    senders: dict[str, type[gloo.GlooSender]] = {"gloo": gloo.GlooSender, "nccl": nccl.NcclSender}
    if spec["backend"] not in senders:
        raise ValueError(f"weights.transport: expected one of {sorted(senders)}, found {spec['backend']!r}")
    return senders[spec["backend"]](spec)


def resolve_transport(name: str) -> str:
    """gloo or nccl for the recipe's weights.transport; `auto` is what the trainer's collectives use here."""
    if name != "auto":
        return name
    return device.backend()
