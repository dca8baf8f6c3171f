"""A sending rank's side of the framing in `transport.frames`.

Life of a bucket:

    read     views of the parameters, one view for each slot
    code     changes since the last update, from the optimizer's record or by comparison with a copy; else the values
             are packed as a whole
    digest   digests of the bucket's bytes, and of the values; the latter do not depend on buckets
    send     after the previous bucket has been sent; the next bucket is read and coded meanwhile

A sender without a record keeps the packed bucket: the next update compares values with this copy.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_scalerl.weights.change_record import ChangeRecord
from megatron_scalerl.weights.changes import ChangedElements, bits_of, encode, find, most_coded
from megatron_scalerl.weights.digest import total, value_digest
from megatron_scalerl.weights.plan import Bucket, Connection, WeightPlan, buckets, within
from megatron_scalerl.weights.transport.frames import (
    ALL_VALUES,
    bucket_digest,
    header,
    sequence_numbers,
    shape_of,
    slot_of,
)
from megatron_scalerl.weights.transport.gloo import Finish, Group, Read


class Sender:
    """Sends one rank's buckets over the rank's broadcast groups. Created by `make_sender`."""

    def __init__(self, groups: Mapping[int, Group], number: int, connection: Connection):
        """groups: the broadcast group of each shard."""
        self.groups = dict(groups)
        self.number = number
        self._connection = connection
        self.values: dict[int, int] = {}
        """Shard -> digest of the values that the shard's workers have from this rank
        (`weights.digest.value_digest`)."""
        self.sizes: list[int] = []
        """[buckets] bytes of each bucket in the last update, padding included, without headers and digests."""
        self._buckets: list[Bucket] = []
        """The buckets that this rank sends in an update, in order."""
        self._copies: dict[int, Tensor] = {}
        """Number of a bucket -> the bytes that all receivers have, kept to find changes that no optimizer records."""
        self._version = ALL_VALUES
        """The version that all receivers have, ALL_VALUES before the first update."""

    def send(self, plan: WeightPlan, read: Read, version: int, record: ChangeRecord | None = None) -> list[int]:
        """Send this rank's parts of one update, and return the digests of the buckets in the order of `plan.buckets`.

        record: the optimizer's record of changes since the last update. Raises RuntimeError if a group fails; all
        groups are closed then.
        """
        plan_buckets = buckets(plan, self._connection.bucket_mib)
        self._buckets = [bucket for bucket in plan_buckets if bucket.sender == self.number]
        sequence = sequence_numbers(bucket.shard for bucket in self._buckets)
        digests = []
        in_flight: list[Finish] = []
        self.sizes = []
        self.values = dict.fromkeys(self.groups, 0)
        try:
            base = self._begin(plan, version)
            for number, bucket in enumerate(self._buckets):
                values = _values(plan, bucket, read)
                packed = None
                if base != ALL_VALUES:
                    packed = self._changes(number, values, record)
                announced_size = ALL_VALUES
                if packed is None:
                    packed = self._packed(number, values, record)
                else:
                    announced_size = max(packed.numel() - 8, 0)
                self.sizes.append(max(packed.numel() - 8, 0))
                digests.append(0)
                if packed.numel():
                    digests[-1] = bucket_digest(packed, version, sequence[number])
                for slot, slot_values in zip(bucket.slots, values):
                    along = [range(a, b) for a, b in slot.ranges]
                    tensor = plan.parts[slot.part].tensor
                    slot_digest = value_digest(slot_values, tensor, range(len(along)), along)
                    self.values[bucket.shard] = total((self.values[bucket.shard], slot_digest))
                # The previous bucket was on the wire while this bucket was coded, and has to end first.
                for finish in in_flight:
                    finish()
                in_flight = []
                if base != ALL_VALUES:
                    size = torch.tensor([announced_size], device=packed.device)
                    in_flight.append(self.groups[bucket.shard].start(size))
                if packed.numel():
                    packed[-8:] = torch.tensor([digests[-1]], dtype=torch.uint64).view(torch.uint8)
                    in_flight.append(self._ship(bucket.shard, packed))
            for finish in in_flight:
                finish()
        except BaseException:
            # The groups are closed, so that waiting receivers fail at once.
            self.close()
            raise
        self._version = version
        return digests

    @property
    def bytes(self) -> int:
        """Bytes of all buckets of the last update."""
        return sum(self.sizes)

    def close(self) -> None:
        """Leave the groups."""
        for group in self.groups.values():
            group.close()

    def _begin(self, plan: WeightPlan, version: int) -> int:
        """Send the headers, and return the base version of the update's changes, or ALL_VALUES."""
        base = self._version
        if self._connection.deltas == "off":
            base = ALL_VALUES
        for shard, group in sorted(self.groups.items()):
            count = sum(bucket.shard == shard for bucket in self._buckets)
            group.broadcast(header(plan, shard, version, count, base).to(group.device))
        return base

    def _changes(self, number: int, values: Sequence[Tensor], record: ChangeRecord | None) -> Tensor | None:
        """The bytes of a bucket's changes with room for a digest; None for a bucket that is sent as a whole.

        Without changes the result is empty.
        """
        bucket = self._buckets[number]
        if number in self._copies:
            by_slot = _compared(self._copies[number], bucket, values)
        else:
            assert record is not None, "a bucket has no copy of the last update and no optimizer record"
            by_slot = record.changes_of(values)
        slots = []
        for slot, changes in enumerate(by_slot):
            if changes is None:
                return None
            if len(changes.positions):
                slots.append((slot, changes))
        if not slots:
            return torch.empty(0, dtype=torch.uint8, device=self.groups[bucket.shard].device)
        frame = encode(slots)
        # The receiver recognizes changes by a size below the whole bucket's, so larger changes cannot be sent.
        if frame.numel() >= bucket.nbytes:
            return None
        return torch.cat([frame, frame.new_zeros(8)])

    def _packed(self, number: int, values: Sequence[Tensor], record: ChangeRecord | None) -> Tensor:
        """The bytes of a whole bucket, with room for a digest."""
        packed = self._copies.get(number)
        if packed is None:
            is_recorded = record is not None and all(map(record.covers, values))
            is_copy = self._connection.deltas != "off" and not is_recorded
            packed = self._memory(number, lasting=is_copy)
            if is_copy:
                self._copies[number] = packed
        for slot, slot_values in zip(self._buckets[number].slots, values):
            slot_of(packed, slot, slot_values.dtype).view(slot_values.shape).copy_(slot_values)
        return packed

    def _memory(self, number: int, *, lasting: bool) -> Tensor:
        """[nbytes + 8] uint8: memory for a bucket, 0 between the slots.

        On CPUs the bucket two places later reuses the memory, unless `lasting` is True.
        """
        bucket = self._buckets[number]
        device = self.groups[bucket.shard].device
        if lasting or device.type != "cpu":
            return torch.zeros(bucket.nbytes + 8, dtype=torch.uint8, device=device)
        turns = self.groups[self._buckets[0].shard].turns(max(bucket.nbytes for bucket in self._buckets) + 8)
        packed = turns[number % 2, : bucket.nbytes + 8]
        # The padding is set to 0: the digest covers the padding, and the memory holds an earlier bucket's bytes.
        end = 0
        for slot in bucket.slots:
            packed[end : slot.offset] = 0
            end = slot.offset + slot.nbytes
        packed[end:] = 0
        return packed

    def _ship(self, shard: int, tensor: Tensor) -> Finish:
        return self.groups[shard].start(tensor)


def _values(plan: WeightPlan, bucket: Bucket, read: Read) -> list[Tensor]:
    """For each slot of the bucket, the values to send, as a view of a result of `read`."""
    values = []
    for slot in bucket.slots:
        part = plan.parts[slot.part]
        view = read(slot.part)
        meta = plan.parameters[part.tensor]
        assert (str(view.dtype), tuple(view.shape)) == (f"torch.{meta.dtype}", shape_of(part.ranges)), meta.name
        values.append(view.detach()[within(part.ranges, slot.ranges)])
    return values


def _compared(copy: Tensor, bucket: Bucket, values: Sequence[Tensor]) -> list[ChangedElements | None]:
    """For each slot, the changes since `copy` was made; None for a slot with more changes than `most_coded` allows.

    `copy` gets the present values of all slots.
    """
    by_slot: list[ChangedElements | None] = []
    for slot, slot_values in zip(bucket.slots, values):
        changes = find(bits_of(slot_of(copy, slot, slot_values.dtype)), slot_values)
        coded = len(changes.positions) <= most_coded(slot_values.numel())
        by_slot.append(changes if coded else None)
    return by_slot
