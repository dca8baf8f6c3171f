"""How the trainer's sending rank and the engines come together; torch-free, since it also travels to the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_scalerl.distributed.rendezvous import Rendezvous


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """One weight group. Produced by `WeightSync.connect`; `msgspec.to_builtins` makes JSON of it."""

    backend: str
    """gloo or nccl."""
    rendezvous: Rendezvous
    """Where the members meet."""
    group: str
    """Name of the group's store there; new for every connection, and no secret."""
    world_size: int
    """1 + all workers of all engines."""
    bucket_mib: int
    """Size of the pieces in which parameters are sent (MiB)."""
    timeout_s: float
    """For joining, and for every single broadcast (seconds)."""
