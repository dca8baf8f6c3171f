"""A sending rank's side of the framing in `transport.frames`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_scalerl.weights.changes import encode
from megatron_scalerl.weights.digest import total, value_digest
from megatron_scalerl.weights.plan import Bucket, Connection, WeightPlan, buckets
from megatron_scalerl.weights.transport.frames import (
    HEADER_BYTES,
    WHOLE,
    bucket_digest,
    compared,
    digest_change,
    header,
    is_recorded,
    place_of,
    places_of,
    read_slot,
    recorded,
    shape_of,
)
from megatron_scalerl.weights.transport.gloo import Finish, Group, Read
from megatron_scalerl.weights.written import Written


class Sender:
    """One sending rank's side. Created by `make_sender`."""

    def __init__(self, groups: Mapping[int, Group], number: int, connection: Connection) -> None:
        """groups: shard -> group."""
        self.groups, self.number, self._connection = dict(groups), number, connection
        self.values: dict[int, int] = {}
        """shard -> digest of the values that its workers have of this rank (`weights.digest.value_digest`)."""
        self.sizes: list[int] = []
        """[own buckets] bytes of each as the last update sent it, padding included, without headers and digests."""
        self._own: list[Bucket] = []
        self._held: list[torch.Tensor] = []  # [own buckets] as all receivers have them, if changes may be sent;
        # empty where the optimizer records them
        self._values: list[int] = []  # [own buckets] digests of their values
        self._version, self._since_whole = WHOLE, 0

    def send(self, plan: WeightPlan, read: Read, version: int, written: Written | None = None) -> list[int]:
        """Send this rank's parts of one update; returns the digests of its buckets, in the order of `plan.buckets`.

        written: what optimizer steps changed since the last update. Raises ValueError if a part has another shape or
        type than the plan says, RuntimeError if a group fails, and if a whole update finds values that the updates of
        changes before did not tell; either way all groups are closed.
        """
        self._written = written or Written()
        every = buckets(plan, self._connection.bucket_mib)
        self._own = [bucket for bucket in every if bucket.sender == self.number]
        places = places_of(bucket.shard for bucket in self._own)
        digests: list[int] = []
        in_flight: list[Finish] = []
        self.sizes = []
        try:
            self._begin(plan, version)
            for number, bucket in enumerate(self._own):
                frame = None if self._version == WHOLE else self._changes_of(plan, number, read)
                packed = self._packed(plan, number, read) if frame is None else frame
                digests.append(bucket_digest(packed, version, places[number]) if packed.numel() else 0)
                self.sizes.append(max(packed.numel() - 8, 0))
                for finish in in_flight:
                    finish()
                in_flight = []
                if self._version != WHOLE:
                    size = torch.tensor([WHOLE if frame is None else self.sizes[-1]])
                    in_flight.append(self._start(bucket.shard, size.to(self.groups[bucket.shard].device)))
                if packed.numel():
                    packed[-8:].view(torch.int64).fill_(_as_int64(digests[-1]))
                    in_flight.append(self._ship(bucket.shard, packed))
            for finish in in_flight:
                finish()
        except BaseException:
            self.close()
            raise
        self._version = version
        self.values = {
            shard: total([v for b, v in zip(self._own, self._values) if b.shard == shard]) for shard in self.groups
        }
        return digests

    @property
    def bytes(self) -> int:
        """Of all buckets of the last update."""
        return sum(self.sizes)

    def close(self) -> None:
        """Leave the groups."""
        for group in self.groups.values():
            group.close()

    def _begin(self, plan: WeightPlan, version: int) -> None:
        """Decide whether the update is whole, and send the headers."""
        self._since_whole += 1
        if self._connection.deltas == "off" or not self._held or self._since_whole > self._connection.anchor_every:
            self._held = self._held or [torch.empty(0)] * len(self._own) * (self._connection.deltas != "off")
            self._since_whole, self._version = 0, WHOLE
            self._values = self._values or [0] * len(self._own)
        for shard, group in sorted(self.groups.items()):
            count = sum(bucket.shard == shard for bucket in self._own)
            self._start(shard, header(plan, shard, version, count, self._version).to(group.device))()

    def _changes_of(self, plan: WeightPlan, number: int, read: Read) -> torch.Tensor | None:
        """A bucket's changes with room for their digest, empty if there are none, None if it is to be sent whole."""
        bucket, held = self._own[number], self._held[number]
        found = compared(plan, bucket, read, held) if held.numel() else recorded(plan, bucket, read, self._written)
        if found is None:
            return None
        if not found:
            return torch.empty(0, dtype=torch.uint8)
        frame = encode(found, "ulp" if self._connection.deltas == "ulp" else "absolute")
        if frame.numel() >= bucket.nbytes:
            return None
        self._values[number] = total((self._values[number], digest_change(plan, bucket, found)))
        return torch.cat([frame, frame.new_zeros(8)])

    def _packed(self, plan: WeightPlan, number: int, read: Read) -> torch.Tensor:
        """A whole bucket, with room for its digest."""
        bucket, of_slots = self._own[number], []
        keep = bool(self._held) and not is_recorded(plan, bucket, read, self._written)
        packed = self._held[number] if keep and self._held[number].numel() else self._memory(number, lasting=keep)
        for slot in bucket.slots:
            values = read_slot(plan, slot, read)
            place_of(packed, slot, values.dtype).view(shape_of(slot.ranges)).copy_(values)
            along = [range(a, b) for a, b in slot.ranges]
            of_slots.append(value_digest(values, plan.parts[slot.part].tensor, range(len(along)), along))
        before, self._values[number] = self._values[number], total(of_slots)
        if keep:
            self._held[number] = packed
        elif self._held and self.values:
            self._check_recorded(plan, number, read, before)
        return packed

    def _memory(self, number: int, *, lasting: bool) -> torch.Tensor:
        """[nbytes + 8] uint8, 0 between the slots. On CPUs, unless it is `lasting`, the bucket after the next has it,
        too."""
        bucket = self._own[number]
        device = self.groups[bucket.shard].device
        if lasting or device.type != "cpu":
            return torch.zeros(bucket.nbytes + 8, dtype=torch.uint8, device=device)
        turns = self.groups[self._own[0].shard].turns(max(each.nbytes for each in self._own) + 8)
        packed, end = turns[number % 2, : bucket.nbytes + 8], 0
        for slot in bucket.slots:
            packed[end : slot.offset] = 0
            end = slot.offset + slot.nbytes
        packed[end:] = 0
        return packed

    def _check_recorded(self, plan: WeightPlan, number: int, read: Read, before: int) -> None:
        """Raise RuntimeError if the changes since the values with digest `before` do not make up those of now."""
        bucket = self._own[number]
        found = recorded(plan, bucket, read, self._written)
        if found is not None and total((before, digest_change(plan, bucket, found))) != self._values[number]:
            self._written.is_wrong = True
            raise RuntimeError(
                "weights: expected the changes that the optimizer recorded, found other values: something else "
                "writes the parameters; changes are found by comparing from now on"
            )

    def _ship(self, shard: int, packed: torch.Tensor) -> Finish:
        return self._start(shard, packed)

    def _start(self, shard: int, tensor: torch.Tensor) -> Finish:
        return self.groups[shard].start(tensor)


def _as_int64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
