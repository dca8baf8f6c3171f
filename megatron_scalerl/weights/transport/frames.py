"""The framing of a weight update, which all backends share.

A sending rank and the workers of one shard in all engines have a group of their own, with the sender as its rank 0.
One update, each line one broadcast in one group, the buckets of all groups taking turns (`plan.buckets`):

    header    int64 [5]: magic, version, number of the group's buckets, the plan's digest for the shard, the version
              that changes are from, or -1 for a whole update
    size      int64 [1], not in a whole update: bytes of the bucket's changes; 0: none, not sent; -1: it is whole
    bucket    uint8 [nbytes + 8]: the packed parameters, or their changes (`weights.changes`), and the digest of these
              bytes, of the version and of the bucket's place in the group's sequence
    ...

A sender packs a bucket, or finds its changes, while the one before is on the wire, and a receiver loads one while the
next one arrives. To find changes, a sender keeps the buckets as the receivers have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron_scalerl.weights.changes import Changes, bits_of, can_code, decode, encode, find, warm_up
from megatron_scalerl.weights.connection import Connection
from megatron_scalerl.weights.digest import digest, mixed
from megatron_scalerl.weights.plan import Bucket, Slot, WeightPlan, buckets
from megatron_scalerl.weights.rectangles import Ranges, volume, within
from megatron_scalerl.weights.transport.gloo import Finish, Group, Read
from megatron_scalerl.weights.transport.store import make_writer
from megatron_scalerl.weights.value_digest import total, value_digest

MAGIC = 0x4D53524C
"""First word of every header: anything else means that the two sides are out of sync."""
HEADER_BYTES = 5 * 8
WHOLE = -1
"""Instead of the version that changes are from, and of a bucket's size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """A rectangle of a tensor, as it arrives."""

    tensor: int
    """Its number in the plan."""
    ranges: Ranges
    values: torch.Tensor
    """Of the rectangle's shape."""


class Told:
    """What a receiver learns of an update."""

    def __init__(self) -> None:
        self.whole = False
        """Whether it has all values; known before its first part."""
        self.digests: list[int] = []
        """Of each bucket so far, 0 for one without changes."""


class Sender:
    """One sending rank's side. Created by `make_sender`."""

    def __init__(self, groups: Mapping[int, Group], number: int, connection: Connection) -> None:
        """groups: shard -> group."""
        self.groups, self.number, self._connection = dict(groups), number, connection
        self.values: dict[int, int] = {}
        """shard -> digest of the values that its workers have of this rank (`weights.value_digest`)."""
        self.sizes: list[int] = []
        """[own buckets] bytes of each as the last update sent it, padding included, without headers and digests."""
        self._own: list[Bucket] = []
        self._held: list[torch.Tensor] = []  # [own buckets] as all receivers have them, if changes may be sent
        self._values: list[int] = []  # [own buckets] digests of their values
        self._version, self._since_whole = WHOLE, 0
        self._store = make_writer(connection, number)
        if connection.deltas != "off":
            warm_up()

    def send(self, plan: WeightPlan, read: Read, version: int) -> list[int]:
        """Send this rank's parts of one update; returns the digests of its buckets, in the order of `plan.buckets`.

        Raises ValueError if a part has another shape or type than the plan says, RuntimeError if a group fails;
        either way all groups are closed.
        """
        every = buckets(plan, self._connection.bucket_mib)
        self._own = [bucket for bucket in every if bucket.sender == self.number]
        places = _places(bucket.shard for bucket in self._own)
        digests: list[int] = []
        in_flight: list[Finish] = []
        self.sizes = []
        try:
            self._begin(plan, version, whole_bytes=sum(bucket.nbytes for bucket in every))
            for number, bucket in enumerate(self._own):
                frame = None if self._version == WHOLE else self._changes_of(plan, number, read)
                packed = self._packed(plan, number, read) if frame is None else frame
                digests.append(_digest(packed, version, places[number]) if packed.numel() else 0)
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
        if self._store is not None:
            self._store.end(version)
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
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _begin(self, plan: WeightPlan, version: int, *, whole_bytes: int) -> None:
        """Decide whether the update is whole, and send the headers. whole_bytes: of all senders."""
        self._since_whole += 1
        if self._connection.deltas == "off" or not self._held or self._since_whole > self._connection.anchor_every:
            self._held = self._held or [torch.empty(0)] * len(self._own) * (self._connection.deltas != "off")
            self._values, self._since_whole, self._version = [0] * len(self._own), 0, WHOLE
        if self._store is not None:
            own = sum(bucket.nbytes for bucket in self._own)
            framed = own + 8 * len(self._own) + HEADER_BYTES * len(self.groups)
            self._store.begin(version, whole=self._version == WHOLE, nbytes=framed, share=own / max(whole_bytes, 1))
        for shard, group in sorted(self.groups.items()):
            count = sum(bucket.shard == shard for bucket in self._own)
            self._start(shard, header(plan, shard, version, count, self._version).to(group.device))()

    def _changes_of(self, plan: WeightPlan, number: int, read: Read) -> torch.Tensor | None:
        """A bucket's changes with room for their digest, empty if there are none, None if it is to be sent whole."""
        found, bucket, change = [], self._own[number], 0
        for place, slot in enumerate(bucket.slots):
            values = _read(plan, slot, read)
            if not can_code(values.dtype):
                return None
            held = bits_of(_place(self._held[number], slot, values.dtype))
            differ = find(held, values)
            if differ is None:
                return None
            if differ.positions.numel():
                part = Changes(
                    tensor=plan.parts[slot.part].tensor,
                    ranges=slot.ranges,
                    positions=differ.positions,
                    steps=None,
                    values=differ.new,
                )
                change += part.digest(differ.old, differ.new)
                found.append((place, differ))
        if not found:
            return torch.empty(0, dtype=torch.uint8)
        frame = encode(found, "ulp" if self._connection.deltas == "ulp" else "absolute")
        if frame.numel() >= bucket.nbytes:
            return None
        self._values[number] = total((self._values[number], change))
        return torch.cat([frame, frame.new_zeros(8)])

    def _packed(self, plan: WeightPlan, number: int, read: Read) -> torch.Tensor:
        """A whole bucket, with room for its digest."""
        bucket, of_slots = self._own[number], []
        packed = self._held[number] if self._held else torch.empty(0)
        if not packed.numel():
            device = self.groups[bucket.shard].device
            packed = torch.zeros(bucket.nbytes + 8, dtype=torch.uint8, device=device)
        for slot in bucket.slots:
            values = _read(plan, slot, read)
            _place(packed, slot, values.dtype).view(_shape(slot.ranges)).copy_(values)
            along = [range(a, b) for a, b in slot.ranges]
            of_slots.append(value_digest(values, plan.parts[slot.part].tensor, range(len(along)), along))
        self._values[number] = total(of_slots)
        if self._held:
            self._held[number] = packed
        return packed

    def _ship(self, shard: int, packed: torch.Tensor) -> Finish:
        return self._start(shard, packed)

    def _start(self, shard: int, tensor: torch.Tensor) -> Finish:
        finish = self.groups[shard].start(tensor)
        if self._store is not None:
            self._store.add(shard, tensor)
        return finish


def _read(plan: WeightPlan, slot: Slot, read: Read) -> torch.Tensor:
    """The values of a slot. Raises ValueError if they are not those of the plan."""
    part = plan.parts[slot.part]
    meta, values = plan.parameters[part.tensor], read(slot.part)
    found, expected = (
        (str(values.dtype).removeprefix("torch."), tuple(values.shape)),
        (meta.dtype, _shape(part.ranges)),
    )
    if found != expected:
        raise ValueError(f"weights: {meta.name}: expected a part of {expected}, found {found}")
    return values.detach()[within(part.ranges, slot.ranges)]


def _place(packed: torch.Tensor, slot: Slot, dtype: torch.dtype) -> torch.Tensor:
    return packed[slot.offset : slot.offset + slot.nbytes].view(dtype)


def receive(
    groups: Mapping[int, Group],
    plan: WeightPlan,
    version: int,
    told: Told | None = None,
    *,
    holds: int | None = None,
) -> Iterator[Values | Changes]:
    """The parts of one update, each after its bucket was checked.

    groups: sender -> group. plan: of the receiver's shard alone. told: what is filled in. holds: the version
    that the receiver has, None if it takes whole updates only. The values stay valid: each bucket has memory of its
    own. Raises RuntimeError if a sender is out of sync or the bytes are not
    those that it packed.
    """
    any_group = next(iter(groups.values()))
    order = buckets(plan, any_group.bucket_mib)
    whole: dict[int, bool] = {}
    for sender, group in sorted(groups.items()):
        count = sum(bucket.sender == sender for bucket in order)
        whole[sender] = _check_header(group, header(plan, 0, version, count, WHOLE), holds)
    places = _places(bucket.sender for bucket in order)
    told = Told() if told is None else told
    told.whole = ahead = all(whole.values())

    def arrive(bucket: Bucket) -> Callable[[], tuple[torch.Tensor | None, bool]]:
        return _arrive(groups[bucket.sender], bucket, whole[bucket.sender])

    arriving = [arrive(bucket) for bucket in order[:1]]
    for number, bucket in enumerate(order):
        after = order[number + 1 : number + 2]
        if ahead:
            arriving += [arrive(each) for each in after]
        packed, is_whole = arriving.pop(0)()
        if not ahead:  # its size follows on the bytes of this one
            arriving += [arrive(each) for each in after]
        if packed is None:
            told.digests.append(0)
            continue
        expected, found = read_digest(packed), _digest(packed, version, places[number])
        if expected != found:
            raise RuntimeError(
                f"weight update: bucket {number} of {len(order)}: expected digest {expected:016x}, found {found:016x}"
            )
        told.digests.append(found)
        yield from _parts_of(plan, bucket, packed[:-8], whole=is_whole)


def _parts_of(plan: WeightPlan, bucket: Bucket, packed: torch.Tensor, *, whole: bool) -> Iterator[Values | Changes]:
    tensors = [plan.parts[slot.part].tensor for slot in bucket.slots]
    pieces = [
        (tensor, slot.ranges, getattr(torch, plan.parameters[tensor].dtype))
        for tensor, slot in zip(tensors, bucket.slots)
    ]
    if whole:
        for slot, (tensor, ranges, dtype) in zip(bucket.slots, pieces):
            yield Values(tensor=tensor, ranges=ranges, values=_place(packed, slot, dtype).view(_shape(ranges)))
        return
    try:
        yield from decode(packed, pieces)
    except ValueError as error:
        raise RuntimeError(f"weight update: {error}") from None


def assembled(parts: Iterable[Values | Changes], plan: WeightPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what `receive` yields, each with its last part. What the shard does not need is not set.

    Raises RuntimeError for changes.
    """
    unfinished: dict[int, tuple[torch.Tensor, int]] = {}
    for part in parts:
        meta = plan.parameters[part.tensor]
        if isinstance(part, Changes):
            raise RuntimeError(f"weight update: {meta.name}: expected values, found changes")
        if tuple(part.values.shape) == meta.shape:
            yield meta.name, part.values
            continue
        every = sum(map(volume, plan.needs[0][part.tensor]))
        tensor, missing = unfinished.pop(part.tensor, (None, every))
        if tensor is None:
            tensor = torch.empty(meta.shape, dtype=part.values.dtype, device=part.values.device)
        tensor[tuple(slice(a, b) for a, b in part.ranges)] = part.values
        missing -= volume(part.ranges)
        if missing:
            unfinished[part.tensor] = tensor, missing
        else:
            yield meta.name, tensor


def _arrive(group: Group, bucket: Bucket, whole: bool) -> Callable[[], tuple[torch.Tensor | None, bool]]:
    """Begin to receive a bucket; what it returns waits for it: (bytes, None if nothing was sent; whether it is all).

    whole: the update is, and no size comes first.
    """

    def begin(nbytes: int) -> tuple[torch.Tensor, Finish]:
        packed = torch.empty(nbytes + 8, dtype=torch.uint8, device=group.device)
        return packed, group.start(packed)

    if whole:
        arriving, finish = begin(bucket.nbytes)
    else:
        size = torch.zeros(1, dtype=torch.int64, device=group.device)
        finish = group.start(size)

    def end() -> tuple[torch.Tensor | None, bool]:
        finish()
        if whole:
            return arriving, True
        nbytes = int(size)
        if nbytes != WHOLE and not 0 <= nbytes < bucket.nbytes:
            raise RuntimeError(f"weight update: expected at most {bucket.nbytes} bytes of changes, found {nbytes}")
        if not nbytes:
            return None, False
        packed, last = begin(bucket.nbytes if nbytes == WHOLE else nbytes)
        last()
        return packed, nbytes == WHOLE

    return end


def _check_header(group: Group, expected: torch.Tensor, holds: int | None) -> bool:
    """Whether the group's update is whole. Raises RuntimeError for another header, or changes of another version."""
    head = torch.zeros(len(expected), dtype=torch.int64, device=group.device)
    group.broadcast(head)
    *found, base = head.tolist()
    *wanted, _ = expected.tolist()
    if found != wanted:
        raise RuntimeError(f"weight update: expected the header {wanted}, found {found}")
    if base not in (WHOLE, holds):
        raise RuntimeError(f"weight update: expected changes of version {holds} or all values, found those of {base}")
    return base == WHOLE


def _shape(ranges: Ranges) -> tuple[int, ...]:
    return tuple(b - a for a, b in ranges)


def header(plan: WeightPlan, shard: int, version: int, count: int, base: int) -> torch.Tensor:
    """[5] int64: magic, version, number of the group's buckets, digest of the plan for the shard, version that
    changes are from."""
    return torch.tensor([MAGIC, version, count, plan.digests[shard], base], dtype=torch.int64)


def _places(groups: Iterable[int]) -> list[int]:
    """How many of the same group come before each bucket."""
    before: dict[int, int] = {}
    found = []
    for group in groups:
        found.append(before.get(group, 0))
        before[group] = found[-1] + 1
    return found


def _digest(packed: torch.Tensor, version: int, place: int) -> int:
    """What the last 8 bytes of a bucket must be: one that is lost, repeated, late or of another update differs."""
    return (digest(packed[:-8]) + mixed(mixed(version) ^ place)) % (1 << 64)


def read_digest(packed: torch.Tensor) -> int:
    """The digest that the sender appended to a bucket."""
    return int(packed[-8:].view(torch.int64)[0]) & ((1 << 64) - 1)


def _as_int64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
