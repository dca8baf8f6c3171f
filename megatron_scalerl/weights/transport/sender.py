"""A sending rank's side of the framing in `transport.frames`."""

from collections.abc import Mapping, Sequence

import torch

from megatron_scalerl.weights.changes import Found, bits_of, encode, find, most_coded
from megatron_scalerl.weights.digest import total, value_digest
from megatron_scalerl.weights.plan import Bucket, Connection, WeightPlan, buckets, within
from megatron_scalerl.weights.transport.frames import (
    WHOLE,
    bucket_digest,
    header,
    place_of,
    places_of,
    shape_of,
)
from megatron_scalerl.weights.transport.gloo import Finish, Group, Read
from megatron_scalerl.weights.written import Written


class Sender:
    """One sending rank's side. Created by `make_sender`."""

    def __init__(self, groups: Mapping[int, Group], number: int, connection: Connection):
        """groups: shard -> group."""
        self.groups, self.number, self._connection = dict(groups), number, connection
        self.values: dict[int, int] = {}
        """shard -> digest of the values that its workers have of this rank (`weights.digest.value_digest`)."""
        self.sizes: list[int] = []
        """[own buckets] bytes of each as the last update sent it, padding included, without headers and digests."""
        self._own: list[Bucket] = []
        self._copies: dict[int, torch.Tensor] = {}
        # own bucket -> it as all receivers have it, where changes may be sent and the optimizer records none
        self._version = WHOLE

    def send(self, plan: WeightPlan, read: Read, version: int, written: Written | None = None) -> list[int]:
        """Send this rank's parts of one update; returns the digests of its buckets, in the order of `plan.buckets`.

        written: what optimizer steps changed since the last update. Raises RuntimeError if a group fails; then all
        groups are closed.
        """
        every = buckets(plan, self._connection.bucket_mib)
        self._own = [bucket for bucket in every if bucket.sender == self.number]
        places = places_of(bucket.shard for bucket in self._own)
        digests = []
        in_flight: list[Finish] = []
        self.sizes = []
        self.values = dict.fromkeys(self.groups, 0)
        try:
            base = self._begin(plan, version)
            for number, bucket in enumerate(self._own):
                values = _values(plan, bucket, read)
                frame = None if base == WHOLE else self._changes(number, values, written)
                packed = self._packed(number, values, written) if frame is None else frame
                digests.append(bucket_digest(packed, version, places[number]) if packed.numel() else 0)
                self.sizes.append(max(packed.numel() - 8, 0))
                for slot, part in zip(bucket.slots, values):
                    along = [range(a, b) for a, b in slot.ranges]
                    of_slot = value_digest(part, plan.parts[slot.part].tensor, range(len(along)), along)
                    self.values[bucket.shard] = total((self.values[bucket.shard], of_slot))
                for finish in in_flight:
                    finish()
                in_flight = []
                if base != WHOLE:
                    size = torch.tensor([WHOLE if frame is None else self.sizes[-1]])
                    in_flight.append(self.groups[bucket.shard].start(size.to(packed.device)))
                if packed.numel():
                    packed[-8:] = torch.tensor([digests[-1]], dtype=torch.uint64).view(torch.uint8)
                    in_flight.append(self._ship(bucket.shard, packed))
            for finish in in_flight:
                finish()
        except BaseException:
            self.close()
            raise
        self._version = version
        return digests

    @property
    def bytes(self) -> int:
        """Of all buckets of the last update."""
        return sum(self.sizes)

    def close(self) -> None:
        """Leave the groups."""
        for group in self.groups.values():
            group.close()

    def _begin(self, plan: WeightPlan, version: int) -> int:
        """Send the headers; the version that the update's changes are from, or WHOLE."""
        base = WHOLE if self._connection.deltas == "off" else self._version
        for shard, group in sorted(self.groups.items()):
            count = sum(bucket.shard == shard for bucket in self._own)
            group.broadcast(header(plan, shard, version, count, base).to(group.device))
        return base

    def _changes(self, number: int, values: Sequence[torch.Tensor], written: Written | None) -> torch.Tensor | None:
        """A bucket's changes with room for their digest, empty if there are none, None if it is to be sent whole."""
        bucket = self._own[number]
        if number in self._copies:
            found = _compared(self._copies[number], bucket, values)
        else:
            assert written is not None, "no copy is kept where changes are recorded"
            found = written.of(values)
        if None in found:
            return None
        pieces = [(place, piece) for place, piece in enumerate(found) if piece is not None and len(piece.positions)]
        if not pieces:
            return torch.empty(0, dtype=torch.uint8, device=self.groups[bucket.shard].device)
        frame = encode(pieces)
        return torch.cat([frame, frame.new_zeros(8)]) if frame.numel() < bucket.nbytes else None

    def _packed(self, number: int, values: Sequence[torch.Tensor], written: Written | None) -> torch.Tensor:
        """A whole bucket, with room for its digest."""
        packed = self._copies.get(number)
        if packed is None:
            recorded = written is not None and all(map(written.covers, values))
            keeps = self._connection.deltas != "off" and not recorded
            packed = self._memory(number, lasting=keeps)
            if keeps:
                self._copies[number] = packed
        for slot, part in zip(self._own[number].slots, values):
            place_of(packed, slot, part.dtype).view(part.shape).copy_(part)
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

    def _ship(self, shard: int, tensor: torch.Tensor) -> Finish:
        return self.groups[shard].start(tensor)


def _values(plan: WeightPlan, bucket: Bucket, read: Read) -> list[torch.Tensor]:
    """[slots] views of the parameters."""
    values = []
    for slot in bucket.slots:
        part = plan.parts[slot.part]
        whole = read(slot.part)
        meta = plan.parameters[part.tensor]
        assert (str(whole.dtype), tuple(whole.shape)) == (f"torch.{meta.dtype}", shape_of(part.ranges)), meta.name
        values.append(whole.detach()[within(part.ranges, slot.ranges)])
    return values


def _compared(copy: torch.Tensor, bucket: Bucket, values: Sequence[torch.Tensor]) -> list[Found | None]:
    """[slots] what changed since a copy was made, which becomes equal to the values; None where much did."""
    found = []
    for slot, part in zip(bucket.slots, values):
        piece = find(bits_of(place_of(copy, slot, part.dtype)), part)
        found.append(piece if len(piece.positions) <= most_coded(part.numel()) else None)
    return found
