"""How the trainer's sending ranks and the engines connect, and their report. Free of torch, for the controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_scalerl.distributed.rendezvous import Rendezvous

VLLM_BACKEND = "msrl"
"""Our name among vLLM's weight-transfer backends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """The broadcast groups for weights. Produced by `WeightSync`; `msgspec.to_builtins` makes JSON of it."""

    backend: str
    """gloo, nccl or shm; of an engine that reads the store, file."""
    rendezvous: Rendezvous
    """Where the members find the group's store."""
    group: str
    """The store of sender n and shard s is GROUP-n-s there; unique per connection, not a secret."""
    world_sizes: tuple[int, ...]
    """[shards] of their groups: 1 + the workers of all engines that need the shard."""
    bucket_mib: int
    """Size of the buckets in which parameters are sent (MiB)."""
    timeout_s: float
    """For every single broadcast (seconds)."""
    connect_timeout_s: float
    """For joining, on gloo; NCCL connects in its first broadcast (seconds)."""
    deltas: Literal["off", "absolute", "ulp"] = "off"
    """How changes are coded (`weights.changes`); off: all updates are whole."""
    anchor_every: int = 20
    """Every update after this many updates of changes is whole."""
    store: str = ""
    """Folder of the store (`transport.store`); "" for none."""
    store_bytes: int = 0
    """Most that all senders write into it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SendReport:
    """One finished broadcast of all weights, as the sending ranks measured it."""

    seconds: float
    bytes: int
    """Bytes sent by all ranks, padding included."""
    whole_bytes: int
    """What they would have sent without deltas."""
    most_sent: int
    """Bytes of the rank that sent most."""
    most_received: int
    """Bytes of the worker that got most."""
    digests: tuple[str, ...]
    """[shards] digest of the buckets that were sent to each (hex)."""
    values: tuple[str, ...]
    """[shards] digest of the values that each got (hex), whatever buckets they were sent in."""
    failure: str = ""
    """Why the group failed, as when an engine ends during the broadcast; then nothing above counts."""
