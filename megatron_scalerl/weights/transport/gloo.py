"""The broadcast group over gloo, and the framing that all backends share.

One update, each line one broadcast from rank 0:

    header    int64 [4]: magic, version, number of buckets, first 63 bits of the manifest's digest
    bucket    uint8 [nbytes + 8]: the packed parameters, then the digest of these bytes
    ...

The group is a separate process group on a separate store; the default groups of trainer and engine are not involved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_scalerl.checkpoints.manifest import Bucket, Manifest, ParamMeta, buckets, manifest_digest
from megatron_scalerl.distributed.rendezvous import gloo_device, open_store
from megatron_scalerl.weights.connection import Connection, SendReport
from megatron_scalerl.weights.digest import combine, digest

MAGIC = 0x4D53524C
"""First word of every header: anything else means that the two sides are out of sync."""


class Group:
    """A broadcast group with the trainer's sending rank as rank 0."""

    device = torch.device("cpu")

    def __init__(self, connection: Connection, rank: int) -> None:
        """Join; returns when all members have joined. Raises RuntimeError after connect_timeout_s."""
        self.timeout = timedelta(seconds=connection.timeout_s)
        self.bucket_mib = connection.bucket_mib
        joining = timedelta(seconds=connection.connect_timeout_s)
        self._store: dist.Store | None = open_store(connection.rendezvous, connection.group, timeout=joining)
        self._group: Any = self._make(connection, rank)

    def _make(self, connection: Connection, rank: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # its options are not in torch's stubs
        options = gloo._Options()
        options._devices = [gloo_device(connection.rendezvous)]
        options._timeout = timedelta(seconds=connection.connect_timeout_s)
        return gloo(self._store, rank, connection.world_size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast rank 0's tensor. Raises RuntimeError if the group is closed, fails or times out."""
        if self._group is None:
            raise RuntimeError("the group of the weight update is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self.timeout
        self._group.broadcast([tensor], options).wait(self.timeout)

    def close(self) -> None:
        """Leave the group; the other members' pending broadcasts fail at once."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._store = None


class Sender:
    """The trainer's side. Created by `make_sender`."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def send(self, tensors: Iterator[tuple[str, torch.Tensor]], manifest: Manifest, version: int) -> SendReport:
        """Send one update.

        tensors: (name, tensor) exactly as the manifest lists them: order, dtypes and shapes. Raises ValueError if
        they differ, RuntimeError if the group fails; either way the group is closed.
        """
        start, digests, sent = time.perf_counter(), [], 0
        plan = list(buckets(manifest, self.group.bucket_mib))
        tensors = iter(tensors)
        try:
            self.group.broadcast(header(manifest, version, len(plan)).to(self.group.device))
            for bucket in plan:
                packed = self._pack(bucket, tensors)
                digests.append(read_digest(packed))
                self._ship(packed)
                sent += bucket.nbytes
            if (extra := next(tensors, None)) is not None:
                raise ValueError(f"weights: expected the manifest's parameters, found {extra[0]} after the last")
        except BaseException:
            self.close()
            raise
        return SendReport(seconds=time.perf_counter() - start, bytes=sent, digest=combine(digests))

    def close(self) -> None:
        """Leave the group."""
        self.group.close()

    def _pack(self, bucket: Bucket, tensors: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
        packed = torch.zeros(bucket.nbytes + 8, dtype=torch.uint8, device=self.group.device)
        for slot in bucket.slots:
            name, tensor = next(tensors, ("nothing", torch.empty(0)))
            found = ParamMeta(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            if found != slot.meta:
                raise ValueError(f"weights: expected {slot.meta}, found {found}")
            place = packed[slot.offset : slot.offset + slot.meta.nbytes]
            place.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
        packed[-8:].view(torch.int64).fill_(_as_int64(digest(packed[:-8])))
        return packed

    def _ship(self, packed: torch.Tensor) -> None:
        self.group.broadcast(packed)


def receive(group: Group, manifest: Manifest, version: int, digests: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of one update in the manifest's order, every bucket checked before its first parameter.

    digests: filled with the digest of each bucket. The tensors stay valid: each bucket has its own memory. Raises
    RuntimeError if the sender is out of sync or the bytes are not those it packed.
    """
    plan = list(buckets(manifest, group.bucket_mib))
    expected = header(manifest, version, len(plan)).tolist()
    head = torch.zeros(len(expected), dtype=torch.int64, device=group.device)
    group.broadcast(head)
    if head.tolist() != expected:
        raise RuntimeError(f"weight update: expected the header {expected}, found {head.tolist()}")
    for number, bucket in enumerate(plan):
        packed = torch.empty(bucket.nbytes + 8, dtype=torch.uint8, device=group.device)
        group.broadcast(packed)
        sent, found = read_digest(packed), digest(packed[:-8])
        if sent != found:
            raise RuntimeError(
                f"weight update: bucket {number} of {len(plan)}: expected digest {sent:016x}, found {found:016x}"
            )
        digests.append(found)
        for slot in bucket.slots:
            piece = packed[slot.offset : slot.offset + slot.meta.nbytes]
            yield slot.meta.name, piece.view(getattr(torch, slot.meta.dtype)).view(slot.meta.shape)


def header(manifest: Manifest, version: int, count: int) -> torch.Tensor:
    """[4] int64: magic, version, number of buckets, first 63 bits of the manifest's digest."""
    return torch.tensor([MAGIC, version, count, int(manifest_digest(manifest)[:16], 16) >> 1], dtype=torch.int64)


def read_digest(packed: torch.Tensor) -> int:
    """The digest that the sender appended to a bucket."""
    return int(packed[-8:].view(torch.int64)[0]) & ((1 << 64) - 1)


def _as_int64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
