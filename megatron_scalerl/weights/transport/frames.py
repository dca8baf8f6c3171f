"""The framing of a weight update, which all backends share.

A sending rank and the workers of one shard in all engines have a group of their own, with the sender as its rank 0.
One update, each line one broadcast in one group, the buckets of all groups taking turns (`plan.buckets`):

    header    int64 [5]: magic, version, number of the group's buckets, the plan's digest for the shard, the version
              that changes are from, or -1 for a whole update
    size      int64 [1], not in a whole update: bytes of the bucket's changes; 0: none, not sent; -1: it is whole
    bucket    uint8 [nbytes + 8]: the packed parameters, or their changes (`weights.changes`), and the digest of these
              bytes, of the version and of the bucket's place in the group's sequence
    ...

A sender (`transport.sender`) packs a bucket, or codes its changes, while the one before is on the wire, and a
receiver loads one while the next one arrives; over NCCL each broadcast ends before that (`NcclGroup.start`). Changes
are those that the optimizer recorded (`weights.written`); where it records none, a sender keeps a bucket as the
receivers have it and compares.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from megatron_scalerl.record import record
from megatron_scalerl.weights.changes import Changes, decode
from megatron_scalerl.weights.digest import digest, mixed
from megatron_scalerl.weights.plan import Bucket, Ranges, Slot, WeightPlan, buckets, volume
from megatron_scalerl.weights.transport.gloo import Finish, Group

MAGIC = 0x4D53524C
"""First word of every header: anything else means that the two sides are out of sync."""
WHOLE = -1
"""Instead of the version that changes are from, and of a bucket's size."""


def place_of(packed: torch.Tensor, slot: Slot, dtype: torch.dtype) -> torch.Tensor:
    """[n] the slot's memory in a bucket."""
    return packed[slot.offset : slot.offset + slot.nbytes].view(dtype)


def shape_of(ranges: Ranges) -> tuple[int, ...]:
    """Of a rectangle."""
    return tuple(b - a for a, b in ranges)


@record
class Values:
    """A rectangle of a tensor, as it arrives."""

    tensor: int
    """Its number in the plan."""
    ranges: Ranges
    values: torch.Tensor
    """Of the rectangle's shape."""


def receive(
    groups: Mapping[int, Group],
    plan: WeightPlan,
    version: int,
    digests: list[int],
    *,
    holds: int | None = None,
    reuse: bool = False,
) -> Iterator[Values | list[Changes]]:
    """The parts of one update, each after its bucket was checked: rectangles, or all changes of a bucket.

    groups: sender -> group. plan: of the receiver's shard alone. digests: that of each bucket is appended, 0 for one
    without changes. holds: the version that the receiver has, None if it takes whole updates only. The values stay
    valid, as each bucket has memory of its own; with `reuse` only until the next part is asked for, and two buckets
    are all the memory that is used. Raises RuntimeError if a sender is out of sync or the bytes are not those that it
    packed.
    """
    any_group = next(iter(groups.values()))
    order = buckets(plan, any_group.bucket_mib)
    counts = Counter(bucket.sender for bucket in order)
    bases = {_base(groups[sender], header(plan, 0, version, counts[sender], WHOLE)) for sender in sorted(groups)}
    if len(bases) > 1 or not bases <= {WHOLE, holds}:
        bases_found = ", ".join(map(str, sorted(bases)))
        raise RuntimeError(
            f"weight update: expected changes of version {holds} or all values, found those of {bases_found}"
        )
    whole = WHOLE in bases
    places = places_of(bucket.sender for bucket in order)
    turns = any_group.turns(max(bucket.nbytes for bucket in order) + 8) if reuse else None

    def arrive(number: int) -> Callable[[], torch.Tensor | None]:
        bucket, into = order[number], None if turns is None else turns[number % 2]
        return _arrive(groups[bucket.sender], bucket, whole, into)

    arriving = [arrive(0)]
    for number, bucket in enumerate(order):
        after = range(number + 1, min(number + 2, len(order)))
        if whole:
            arriving += [arrive(each) for each in after]
        packed = arriving.pop(0)()
        if not whole:  # its size follows on the bytes of this one
            arriving += [arrive(each) for each in after]
        if packed is None:
            digests.append(0)
            continue
        expected, found = read_digest(packed), bucket_digest(packed, version, places[number])
        if expected != found:
            raise RuntimeError(
                f"weight update: bucket {number} of {len(order)}: expected digest {expected:016x}, found {found:016x}"
            )
        digests.append(found)
        yield from _parts_of(plan, bucket, packed[:-8])


def _parts_of(plan: WeightPlan, bucket: Bucket, packed: torch.Tensor) -> Iterator[Values | list[Changes]]:
    """Changes always take fewer bytes than the bucket."""
    tensors = [plan.parts[slot.part].tensor for slot in bucket.slots]
    pieces = [
        (tensor, slot.ranges, getattr(torch, plan.parameters[tensor].dtype))
        for tensor, slot in zip(tensors, bucket.slots)
    ]
    if packed.numel() < bucket.nbytes:
        yield decode(packed, pieces)
        return
    for slot, (tensor, ranges, dtype) in zip(bucket.slots, pieces):
        yield Values(tensor=tensor, ranges=ranges, values=place_of(packed, slot, dtype).view(shape_of(ranges)))


def assembled(parts: Iterable[Values | list[Changes]], plan: WeightPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what `receive` yields, each with its last part. What the shard does not need is not set.

    Raises RuntimeError for changes.
    """
    unfinished: dict[int, tuple[torch.Tensor, int]] = {}
    for part in parts:
        if isinstance(part, list):
            raise RuntimeError("weight update: expected values, found changes")
        meta = plan.parameters[part.tensor]
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


def _arrive(
    group: Group, bucket: Bucket, whole: bool, into: torch.Tensor | None
) -> Callable[[], torch.Tensor | None]:
    """Begin to receive a bucket; what it returns waits for its bytes, None if nothing was sent.

    whole: the update is, and no size comes first. into: memory for it, None for its own.
    """

    def begin(nbytes: int) -> tuple[torch.Tensor, Finish]:
        memory = torch.empty(nbytes + 8, dtype=torch.uint8, device=group.device) if into is None else into
        return memory[: nbytes + 8], group.start(memory[: nbytes + 8])

    if whole:
        packed, finish = begin(bucket.nbytes)
    else:
        size = torch.zeros(1, dtype=torch.int64, device=group.device)
        finish = group.start(size)

    def end() -> torch.Tensor | None:
        finish()
        if whole:
            return packed
        nbytes = int(size)
        if nbytes == 0:
            return None
        if nbytes != WHOLE and not 0 < nbytes < bucket.nbytes:  # the one word that no digest covers
            raise RuntimeError(f"weight update: {nbytes} bytes of changes in a bucket of {bucket.nbytes}")
        changes, last = begin(bucket.nbytes if nbytes == WHOLE else nbytes)
        last()
        return changes

    return end


def _base(group: Group, expected: torch.Tensor) -> int:
    """The version that the group's changes are from, or WHOLE. Raises RuntimeError for another header."""
    head = torch.zeros(len(expected), dtype=torch.int64, device=group.device)
    group.broadcast(head)
    *found, base = head.tolist()
    *wanted, _ = expected.tolist()
    if found != wanted:
        raise RuntimeError(f"weight update: expected the header {wanted}, found {found}")
    return base


def header(plan: WeightPlan, shard: int, version: int, count: int, base: int) -> torch.Tensor:
    """[5] int64: magic, version, number of the group's buckets, digest of the plan for the shard, version that
    changes are from."""
    return torch.tensor([MAGIC, version, count, plan.digests[shard], base], dtype=torch.int64)


def places_of(groups: Iterable[int]) -> list[int]:
    """How many of the same group come before each bucket."""
    before = Counter[int]()
    places = []
    for group in groups:
        places.append(before[group])
        before[group] += 1
    return places


def bucket_digest(packed: torch.Tensor, version: int, place: int) -> int:
    """What the last 8 bytes of a bucket must be: one that is lost, repeated, late or of another update differs."""
    return (digest(packed[:-8]) + mixed(mixed(version) ^ place)) % (1 << 64)


def read_digest(packed: torch.Tensor) -> int:
    """The digest that the sender appended to a bucket."""
    return int(packed[-8:].view(torch.int64)[0]) & ((1 << 64) - 1)
