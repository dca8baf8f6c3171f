"""The broadcast groups over gloo, and the framing that all backends share.

A sending rank and the workers of one shard in all engines have a group of their own, with the sender as its rank 0.
One update, each line one broadcast in one group, the buckets of all groups taking turns (`plan.buckets`):

    header    int64 [4]: magic, version, number of the group's buckets, the plan's digest for the shard
    bucket    uint8 [nbytes + 8]: the packed parameters, then the digest of these bytes
    ...

A sender packs a bucket while the one before is on the wire, and a receiver loads one while the next one arrives.
The groups are separate process groups on stores of their own; the default groups of trainer and engine are not
involved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_scalerl.distributed.rendezvous import gloo_device, open_store
from megatron_scalerl.weights.connection import Connection
from megatron_scalerl.weights.digest import digest
from megatron_scalerl.weights.plan import Bucket, WeightPlan, buckets
from megatron_scalerl.weights.rectangles import Ranges, volume, within
from megatron_scalerl.weights.value_digest import total, value_digest

MAGIC = 0x4D53524C
"""First word of every header: anything else means that the two sides are out of sync."""
Read = Callable[[int], torch.Tensor]
"""Number of a part -> its values, of the shape of its rectangle; valid until the next call."""
Finish = Callable[[], None]


class Group:
    """A broadcast group with a sending rank of the trainer as rank 0."""

    device = torch.device("cpu")

    def __init__(self, connection: Connection, rank: int, sender: int = 0, shard: int = 0) -> None:
        """Join the group of a sender and a shard; returns when all members have.

        Raises RuntimeError after connect_timeout_s.
        """
        self.timeout = timedelta(seconds=connection.timeout_s)
        self.bucket_mib = connection.bucket_mib
        joining = timedelta(seconds=connection.connect_timeout_s)
        name, self._world_size = f"{connection.group}-{sender}-{shard}", connection.world_sizes[shard]
        self._store: dist.Store | None = open_store(connection.rendezvous, name, timeout=joining)
        self._group: Any = self._make(connection, rank)

    def _make(self, connection: Connection, rank: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # its options are not in torch's stubs
        options = gloo._Options()
        options._devices = [gloo_device(connection.rendezvous)]
        options._timeout = timedelta(seconds=connection.connect_timeout_s)
        return gloo(self._store, rank, self._world_size, options)

    def start(self, tensor: torch.Tensor) -> Finish:
        """Begin to broadcast rank 0's tensor; what it returns waits for the end. Both raise RuntimeError."""
        if self._group is None:
            raise RuntimeError("the group of the weight update is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self.timeout
        work = self._group.broadcast([tensor], options)
        return lambda: work.wait(self.timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast rank 0's tensor. Raises RuntimeError if the group is closed, fails or times out."""
        self.start(tensor)()

    def close(self) -> None:
        """Leave the group; the other members' pending broadcasts fail at once."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._store = None


class Sender:
    """One sending rank's side. Created by `make_sender`."""

    def __init__(self, groups: Mapping[int, Group], number: int, bucket_mib: int) -> None:
        """groups: shard -> group."""
        self.groups, self.number, self.bucket_mib = dict(groups), number, bucket_mib
        self.values: dict[int, int] = {}
        """shard -> digest of the values that this rank sent it last (`weights.value_digest`)."""

    def send(self, plan: WeightPlan, read: Read, version: int) -> list[int]:
        """Send this rank's parts of one update; returns the digests of its buckets, in the order of `plan.buckets`.

        Raises ValueError if a part has another shape or type than the plan says, RuntimeError if a group fails;
        either way all groups are closed.
        """
        own = [bucket for bucket in buckets(plan, self.bucket_mib) if bucket.sender == self.number]
        digests: list[int] = []
        in_flight: list[Finish] = []
        self.values = dict.fromkeys(self.groups, 0)
        try:
            for shard, group in sorted(self.groups.items()):
                count = sum(bucket.shard == shard for bucket in own)
                group.broadcast(header(plan, shard, version, count).to(group.device))
            for bucket in own:
                packed = self._pack(plan, bucket, read)
                digests.append(read_digest(packed))
                for finish in in_flight:
                    finish()
                in_flight = [self._ship(bucket.shard, packed)]
            for finish in in_flight:
                finish()
        except BaseException:
            self.close()
            raise
        return digests

    def close(self) -> None:
        """Leave the groups."""
        for group in self.groups.values():
            group.close()

    def _pack(self, plan: WeightPlan, bucket: Bucket, read: Read) -> torch.Tensor:
        packed = torch.zeros(bucket.nbytes + 8, dtype=torch.uint8, device=self.groups[bucket.shard].device)
        for slot in bucket.slots:
            part = plan.parts[slot.part]
            meta, values = plan.parameters[part.tensor], read(slot.part)
            found = (str(values.dtype).removeprefix("torch."), tuple(values.shape))
            if found != (meta.dtype, _shape(part.ranges)):
                expected = (meta.dtype, _shape(part.ranges))
                raise ValueError(f"weights: {meta.name}: expected a part of {expected}, found {found}")
            values = values.detach()[within(part.ranges, slot.ranges)]
            place = packed[slot.offset : slot.offset + slot.nbytes].view(values.dtype)
            place.view(_shape(slot.ranges)).copy_(values)
            along = [range(a, b) for a, b in slot.ranges]
            of_slot = value_digest(values, part.tensor, range(len(along)), along)
            self.values[bucket.shard] = total((self.values[bucket.shard], of_slot))
        packed[-8:].view(torch.int64).fill_(_as_int64(digest(packed[:-8])))
        return packed

    def _ship(self, shard: int, packed: torch.Tensor) -> Finish:
        return self.groups[shard].start(packed)


def receive(
    groups: Mapping[int, Group], plan: WeightPlan, version: int, digests: list[int]
) -> Iterator[tuple[int, Ranges, torch.Tensor]]:
    """(tensor's number in the plan, rectangle, its values) of one update, after its bucket was checked.

    groups: sender -> group. plan: of the receiver's shard alone. digests: filled with the digest of each bucket. The
    values stay valid: each bucket has memory of its own. Raises RuntimeError if a sender is out of sync or the bytes
    are not those that it packed.
    """
    any_group = next(iter(groups.values()))
    order = buckets(plan, any_group.bucket_mib)
    for number, group in sorted(groups.items()):
        _check_header(group, header(plan, 0, version, sum(bucket.sender == number for bucket in order)))
    arriving = [_arrive(groups, order[0])]
    for number, bucket in enumerate(order):
        if number + 1 < len(order):
            arriving.append(_arrive(groups, order[number + 1]))
        packed, finish = arriving.pop(0)
        finish()
        sent, found = read_digest(packed), digest(packed[:-8])
        if sent != found:
            raise RuntimeError(
                f"weight update: bucket {number} of {len(order)}: expected digest {sent:016x}, found {found:016x}"
            )
        digests.append(found)
        for slot in bucket.slots:
            tensor = plan.parts[slot.part].tensor
            dtype = getattr(torch, plan.parameters[tensor].dtype)
            values = packed[slot.offset : slot.offset + slot.nbytes].view(dtype).view(_shape(slot.ranges))
            yield tensor, slot.ranges, values


def assembled(
    parts: Iterable[tuple[int, Ranges, torch.Tensor]], plan: WeightPlan
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what `receive` yields, each with its last part. What the shard does not need is not set."""
    unfinished: dict[int, tuple[torch.Tensor, int]] = {}
    for number, ranges, values in parts:
        meta = plan.parameters[number]
        if tuple(values.shape) == meta.shape:
            yield meta.name, values
            continue
        tensor, missing = unfinished.pop(number, (None, sum(map(volume, plan.needs[0][number]))))
        if tensor is None:
            tensor = torch.empty(meta.shape, dtype=values.dtype, device=values.device)
        tensor[tuple(slice(a, b) for a, b in ranges)] = values
        missing -= volume(ranges)
        if missing:
            unfinished[number] = tensor, missing
        else:
            yield meta.name, tensor


def _arrive(groups: Mapping[int, Group], bucket: Bucket) -> tuple[torch.Tensor, Finish]:
    group = groups[bucket.sender]
    packed = torch.empty(bucket.nbytes + 8, dtype=torch.uint8, device=group.device)
    return packed, group.start(packed)


def _check_header(group: Group, expected: torch.Tensor) -> None:
    head = torch.zeros(len(expected), dtype=torch.int64, device=group.device)
    group.broadcast(head)
    if head.tolist() != expected.tolist():
        raise RuntimeError(f"weight update: expected the header {expected.tolist()}, found {head.tolist()}")


def _shape(ranges: Ranges) -> tuple[int, ...]:
    return tuple(b - a for a, b in ranges)


def header(plan: WeightPlan, shard: int, version: int, count: int) -> torch.Tensor:
    """[4] int64: magic, version, number of the group's buckets, digest of the plan for the shard."""
    return torch.tensor([MAGIC, version, count, plan.digests[shard]], dtype=torch.int64)


def read_digest(packed: torch.Tensor) -> int:
    """The digest that the sender appended to a bucket."""
    return int(packed[-8:].view(torch.int64)[0]) & ((1 << 64) - 1)


def _as_int64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
