"""The framing of a weight update, which all backends share.

Each sending rank has one group for each shard: the sender is the group's rank 0, and the shard's workers in all
engines are the further ranks. Life of an update, each line one broadcast in one group; the buckets of all groups take
turns (`plan.buckets`):

    header    int64 [5]: magic, version, number of the group's buckets, the plan's digest for the shard, the base
              version of the changes, or -1 for a whole update
    size      int64 [1], only in an update of changes: bytes of the bucket's changes; 0: the bucket has no changes and
              is not sent; -1: the bucket is whole
    bucket    uint8 [nbytes + 8]: the packed parameters, or the changes (`weights.changes`), and the digest of these
              bytes, of the version and of the bucket's number in the group's sequence
    ...

A sender (`transport.sender`) packs a bucket, or codes the changes, while the previous bucket is on the wire. A
receiver loads a bucket while the next bucket arrives; over NCCL each broadcast ends first (`NcclGroup.start`).
Changes come from the optimizer's record (`weights.change_record`); a sender without a record keeps a copy of each
bucket for comparison.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from megatron_scalerl.record import record
from megatron_scalerl.weights.changes import Changes, decode
from megatron_scalerl.weights.digest import digest, mixed
from megatron_scalerl.weights.plan import Bucket, Ranges, Slot, WeightPlan, buckets, volume
from megatron_scalerl.weights.transport.gloo import Finish, Group

MAGIC = 0x4D53524C
"""First word of every header; any other word means that the two sides are out of sync."""
ALL_VALUES = -1
"""As the base version in a header, or as a bucket's size, this number says that all values are sent."""


def slot_of(packed: Tensor, slot: Slot, dtype: torch.dtype) -> Tensor:
    """[n] the memory of a slot in a bucket, as elements of the tensor's type."""
    return packed[slot.offset : slot.offset + slot.nbytes].view(dtype)


def shape_of(ranges: Ranges) -> tuple[int, ...]:
    """The shape of a rectangle."""
    return tuple(b - a for a, b in ranges)


@record
class Values:
    """The values of a rectangle of a tensor. Produced by `receive`."""

    tensor: int
    """Number of the tensor in the plan."""
    ranges: Ranges
    values: Tensor
    """The values, in the rectangle's shape."""


Payload = Values | list[Changes]
"""One item of `receive`: the values of one slot of a bucket, or the changes of all slots of a bucket."""


def receive(
    groups: Mapping[int, Group],
    plan: WeightPlan,
    version: int,
    digests: list[int],
    *,
    held_version: int | None = None,
    reuse: bool = False,
) -> Iterator[Payload]:
    """The payloads of one update, each from a checked bucket: the values of a slot, or a bucket's changes.

    groups: sender -> group. plan: of the receiver's shard alone. digests: each bucket's digest is appended, 0 for a
    bucket without changes. held_version: the receiver's version, None for a receiver of whole updates only.

    reuse: two buckets take turns in the same memory, and a payload is valid until the request for the next payload;
    without `reuse`, each bucket has fresh memory.

    Raises RuntimeError if a sender is out of sync, or if bytes have changed on the way.
    """
    any_group = next(iter(groups.values()))
    order = buckets(plan, any_group.bucket_mib)
    counts = Counter(bucket.sender for bucket in order)
    bases = {_base(groups[sender], header(plan, 0, version, counts[sender], ALL_VALUES)) for sender in sorted(groups)}
    if len(bases) > 1 or not bases <= {ALL_VALUES, held_version}:
        base_versions = ", ".join(map(str, sorted(bases)))
        version_held = "no version" if held_version is None else f"version {held_version}"
        raise RuntimeError(
            f"weight update: the changes apply to version {base_versions}, but this worker holds {version_held}"
        )
    is_whole = ALL_VALUES in bases
    sequence = sequence_numbers(bucket.sender for bucket in order)
    turns = None
    if reuse:
        turns = any_group.turns(max(bucket.nbytes for bucket in order) + 8)

    def arrive(number: int) -> Callable[[], Tensor | None]:
        bucket = order[number]
        return _arrive(groups[bucket.sender], bucket, is_whole, None if turns is None else turns[number % 2])

    arriving = [arrive(0)]
    for number, bucket in enumerate(order):
        following = range(number + 1, min(number + 2, len(order)))
        # In a whole update, the next bucket arrives while this bucket is awaited. In an update of changes, the next
        # broadcast is the next bucket's size, which the sender sends only after this bucket's bytes.
        if is_whole:
            arriving += map(arrive, following)
        packed = arriving.pop(0)()
        if not is_whole:
            arriving += map(arrive, following)
        if packed is None:
            digests.append(0)
            continue
        sent_digest = read_digest(packed)
        digests.append(bucket_digest(packed, version, sequence[number]))
        if sent_digest != digests[-1]:
            raise RuntimeError(
                f"weight update: bucket {number} of {len(order)} has digest {digests[-1]:016x}, but the sender has "
                f"{sent_digest:016x}: bytes changed on the way"
            )
        yield from _payloads_of(plan, bucket, packed[:-8])


def _payloads_of(plan: WeightPlan, bucket: Bucket, packed: Tensor) -> Iterator[Payload]:
    slots = []
    for slot in bucket.slots:
        tensor = plan.parts[slot.part].tensor
        slots.append((tensor, slot.ranges, getattr(torch, plan.parameters[tensor].dtype)))
    # A payload with fewer bytes than the bucket has changes: a sender sends changes only if they take fewer bytes.
    if packed.numel() < bucket.nbytes:
        yield decode(packed, slots)
        return
    for slot, (tensor, ranges, dtype) in zip(bucket.slots, slots):
        yield Values(tensor=tensor, ranges=ranges, values=slot_of(packed, slot, dtype).view(shape_of(ranges)))


def assembled_tensors(payloads: Iterable[Payload], plan: WeightPlan) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of each tensor, once the tensor's last values have arrived.

    Elements that the shard does not need are not set. Raises RuntimeError if a payload has changes.
    """
    unfinished: dict[int, tuple[Tensor, int]] = {}
    for payload in payloads:
        if isinstance(payload, list):
            raise RuntimeError("weight update: changes arrived, but vLLM's loader takes whole tensors only")
        meta = plan.parameters[payload.tensor]
        if tuple(payload.values.shape) == meta.shape:
            yield meta.name, payload.values
            continue
        needed_elements = sum(map(volume, plan.needs[0][payload.tensor]))
        tensor, missing_elements = unfinished.pop(payload.tensor, (None, needed_elements))
        if tensor is None:
            tensor = torch.empty(meta.shape, dtype=payload.values.dtype, device=payload.values.device)
        tensor[tuple(slice(a, b) for a, b in payload.ranges)] = payload.values
        missing_elements -= volume(payload.ranges)
        if missing_elements:
            unfinished[payload.tensor] = tensor, missing_elements
        else:
            yield meta.name, tensor


def _arrive(group: Group, bucket: Bucket, is_whole: bool, memory: Tensor | None) -> Callable[[], Tensor | None]:
    """Start to receive a bucket, and return a function that waits for the bucket's bytes and returns the bytes.

    The function returns None for a bucket without changes, which is not sent.

    is_whole: the update is whole, so no size comes first. memory: where the bucket goes; None for new memory.
    """

    def begin(nbytes: int) -> tuple[Tensor, Finish]:
        if memory is None:
            packed = torch.empty(nbytes + 8, dtype=torch.uint8, device=group.device)
        else:
            packed = memory[: nbytes + 8]
        return packed, group.start(packed)

    if is_whole:
        packed, finish = begin(bucket.nbytes)
    else:
        size = torch.zeros(1, dtype=torch.int64, device=group.device)
        finish = group.start(size)

    def end() -> Tensor | None:
        finish()
        if is_whole:
            return packed
        nbytes = int(size)
        if nbytes == 0:
            return None
        # No digest covers the size, so the size is checked.
        if nbytes != ALL_VALUES and not 0 < nbytes < bucket.nbytes:
            raise RuntimeError(
                f"weight update: a sender announced {nbytes} bytes of changes, not between 1 and {bucket.nbytes} - 1"
            )
        if nbytes == ALL_VALUES:
            nbytes = bucket.nbytes
        packed_changes, finish_changes = begin(nbytes)
        finish_changes()
        return packed_changes

    return end


def _base(group: Group, expected: Tensor) -> int:
    """The base version of the group's changes, or ALL_VALUES.

    Raises RuntimeError for a header that is not `expected`.
    """
    head = torch.zeros(len(expected), dtype=torch.int64, device=group.device)
    group.broadcast(head)
    *fields, base = head.tolist()
    *expected_fields, _ = expected.tolist()
    if fields != expected_fields:
        raise RuntimeError(f"weight update: the header is {fields}, but this worker expects {expected_fields}")
    return base


def header(plan: WeightPlan, shard: int, version: int, count: int, base: int) -> Tensor:
    """The header of a group as int64 [5]: magic, version, number of buckets, digest of the shard's plan, base
    version."""
    return torch.tensor([MAGIC, version, count, plan.digests[shard], base], dtype=torch.int64)


def sequence_numbers(groups: Iterable[int]) -> list[int]:
    """For each bucket, the number of earlier buckets of the same group. groups: the group of each bucket."""
    buckets_so_far = Counter[int]()
    numbers = []
    for group in groups:
        numbers.append(buckets_so_far[group])
        buckets_so_far[group] += 1
    return numbers


def bucket_digest(packed: Tensor, version: int, number: int) -> int:
    """The digest at a bucket's end, by which the receiver finds changed bytes, and a lost, repeated or late bucket.

    number: the bucket's number in the group's sequence.
    """
    return (digest(packed[:-8]) + mixed(mixed(version) ^ number)) % (1 << 64)


def read_digest(packed: Tensor) -> int:
    """The digest that the sender appended to a bucket."""
    return int(packed[-8:].view(torch.int64)[0]) & ((1 << 64) - 1)
