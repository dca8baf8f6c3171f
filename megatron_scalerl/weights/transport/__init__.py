"""The wire from the trainer to the engines, the trainer's end: torch only, never vLLM.

A sender is made once from a Connection and then sends every update. gloo serves CPUs, NCCL serves GPUs; both are
one broadcast group, the trainer's sending rank being rank 0 and every engine's workers following.

Who is in the group: the engines learn where to meet over their HTTP path, which demands the run's secret, and on one
host only this user can enter the folder where that is (`rendezvous`). The members do not prove who they are to each
other. A stranger who could join would read the weights; weights that he fed to an engine would show, since
`WeightSync` compares, over HTTP again, the digest of what each engine holds with the digest of what the trainer sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from megatron_scalerl.checkpoints.manifest import Manifest
from megatron_scalerl.distributed import device
from megatron_scalerl.weights.connection import Connection


class Sender(Protocol):
    """The trainer's end of the wire."""

    def send(self, tensors: Iterator[tuple[str, torch.Tensor]], manifest: Manifest, version: int) -> dict[str, Any]:
        """Send one update and return {"seconds", "bytes", "digest"}.

        tensors: (name, tensor) exactly as the manifest lists them, in its order, of its types and shapes.
        Raises ValueError if they differ, RuntimeError if the group breaks; either way the group is closed.
        """

    def close(self) -> None:
        """Leave the group."""


def make_sender(connection: Connection) -> Sender:
    """Open the group as its rank 0 and wait for all engines to join.

    Raises ValueError for an unknown backend, RuntimeError if the engines do not come in time.
    """
    from megatron_scalerl.weights.transport import gloo, nccl

    senders: dict[str, type[gloo.GlooSender]] = {"gloo": gloo.GlooSender, "nccl": nccl.NcclSender}
    if connection.backend not in senders:
        raise ValueError(f"weights.transport: expected one of {sorted(senders)}, found {connection.backend!r}")
    return senders[connection.backend](connection)


def resolve_transport(name: str) -> str:
    """gloo or nccl for the recipe's weights.transport; `auto` is what the trainer's collectives use here."""
    if name != "auto":
        return name
    return device.backend()
