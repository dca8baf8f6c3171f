"""The plan of a weight update: which rank sends which part of which tensor to whom, and in which buckets.

    manifest_of      names, types and shapes of the Hugging Face checkpoint's tensors, layer by layer, by the trainer
    Needs            what a worker of an engine needs of each tensor, a set of rectangles; all workers with the same
                     needs are one shard, as the workers of one tensor-parallel rank in all engines
    WeightPlan       made on every trainer rank by `weights.owners`, when engines connect: each rectangle is sent by
                     the one rank that holds it, so nothing is gathered, and no worker gets what it does not need
    of_shard         what concerns one shard, as JSON to its workers; `digests` stand in the header of every update
    buckets          in every update, on both sides: a sender's rectangles for a shard, packed in the plan's order;
                     buckets of all senders take turns
    SendReport       what the senders say of an update, for the controller to compare

Trainer and engines agree on one plan when they connect; an update then sends bytes only. Free of torch, for the
controller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, Literal

import msgspec
import numpy as np

from megatron_scalerl.distributed.rendezvous import Rendezvous
from megatron_scalerl.record import record

MOST_CHANNELS = 8
"""Of a broadcast group over NCCL: each has buffers on every member's device. An estimate; NCCL's own choice goes up
to 32."""

ALIGNMENT = 16
"""Every rectangle starts at a multiple of this many bytes in its bucket, so that it can be viewed in its type."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1}
VLLM_BACKEND = "msrl"
"""Our name among vLLM's weight-transfer backends."""
Ranges = tuple[tuple[int, int], ...]
"""A rectangle: (first, end) along each dimension of a tensor; () of a scalar."""
Needs = tuple[tuple[Ranges, ...], ...]
"""[tensors] the rectangles of each that a worker needs, none overlapping another."""


def overlap(one: Ranges, other: Ranges) -> Ranges | None:
    """The rectangle that two have in common, None if there is none."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
    return common if all(a < b for a, b in common) else None


def volume(ranges: Ranges) -> int:
    """Elements of a rectangle."""
    return prod(b - a for a, b in ranges)


def within(outer: Ranges, inner: Ranges) -> tuple[slice, ...]:
    """Where a rectangle lies in a larger one's own coordinates."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(inner, outer))


def split(ranges: Ranges, most: int) -> Iterable[Ranges]:
    """Pieces of at most `most` elements: cut along the first dimension, and where one index is too many, the next."""
    if volume(ranges) <= most:
        return [ranges]
    (first, end), rest = ranges[0], ranges[1:]
    rows = most // volume(rest)
    if rows == 0:
        return [((row, row + 1), *tail) for row in range(first, end) for tail in split(rest, most)]
    return [((row, min(row + rows, end)), *rest) for row in range(first, end, rows)]


def merged(rectangles: Iterable[Ranges]) -> tuple[Ranges, ...]:
    """Disjoint rectangles with the same elements: neighbors along one dimension become one."""
    current = sorted(disjoint(rectangles))
    for axis in reversed(range(len(current[0]) if current else 0)):
        by_rest: dict[Ranges, list[tuple[int, int]]] = {}
        for ranges in current:
            by_rest.setdefault(ranges[:axis] + ranges[axis + 1 :], []).append(ranges[axis])
        current = [
            (*rest[:axis], along, *rest[axis:]) for rest, parts in by_rest.items() for along in _joined(sorted(parts))
        ]
    return tuple(sorted(current))


def disjoint(rectangles: Iterable[Ranges]) -> list[Ranges]:
    """The same elements without repetition: what overlaps is cut at the boundaries of the other rectangle."""
    done: list[Ranges] = []
    for ranges in sorted(rectangles):
        rest = [ranges]
        for other in done:
            rest = [piece for part in rest for piece in _without(part, other)]
        done += rest
    return done


def _without(ranges: Ranges, other: Ranges) -> Iterator[Ranges]:
    """`ranges` less `other`, as rectangles."""
    if any(b <= c or d <= a for (a, b), (c, d) in zip(ranges, other)):
        yield ranges
        return
    head: Ranges = ()
    for axis, ((a, b), (c, d)) in enumerate(zip(ranges, other)):
        tail = ranges[axis + 1 :]
        if a < c:
            yield (*head, (a, c), *tail)
        if d < b:
            yield (*head, (d, b), *tail)
        head = (*head, (max(a, c), min(b, d)))


def _joined(parts: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first, end = parts[0]
    for a, b in parts[1:]:
        if a > end:
            yield first, end
            first = a
        end = b
    yield first, end


@record
class ParamMeta:
    """One tensor as engines get it."""

    name: str
    """Name in the Hugging Face checkpoint."""
    dtype: str
    """float32, bfloat16 ..."""
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Size of one element."""
        return _ITEM_BYTES[self.dtype]


Manifest = tuple[ParamMeta, ...]


def manifest_of(items: Iterable[tuple[str, str, Iterable[int]]]) -> Manifest:
    """A manifest from (name, dtype, shape) in the order of sending.

    Raises ValueError for an empty manifest, a duplicate name, a type that cannot be sent, and a negative size.
    """
    manifest = tuple(ParamMeta(name=n, dtype=d, shape=tuple(s)) for n, d, s in items)
    if not manifest:
        raise ValueError("weights: expected at least one tensor, found none")
    seen = set()
    for meta in manifest:
        if meta.name in seen:
            raise ValueError(f"weights: expected every name once, found {meta.name} twice")
        if meta.dtype not in _ITEM_BYTES:
            raise ValueError(f"weights: {meta.name}: expected one of {sorted(_ITEM_BYTES)}, found {meta.dtype}")
        if any(size < 0 for size in meta.shape):
            raise ValueError(f"weights: {meta.name}: expected sizes >= 0, found {meta.shape}")
        seen.add(meta.name)
    return manifest


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of one tensor, and who sends it to whom."""

    tensor: int
    """Index into the plan's parameters."""
    sender: int
    """Index from 0 of the sending rank."""
    shard: int
    """Index from 0 of the workers that get it."""
    ranges: Ranges


class WeightPlan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The parts that make up what every shard needs, exactly once. Produced by `weights.owners` or `whole`."""

    parameters: Manifest
    senders: int
    """Number of sending ranks."""
    needs: tuple[Needs, ...]
    """[shards]"""
    parts: tuple[Part, ...]
    """Layer by layer."""

    @cached_property
    def pairs(self) -> dict[tuple[int, int], list[int]]:
        """(sender, shard) -> numbers of the parts that one sends the other; a group is formed for each."""
        found: dict[tuple[int, int], list[int]] = {}
        for number, part in enumerate(self.parts):
            found.setdefault((part.sender, part.shard), []).append(number)
        return found

    def of_shard(self, shard: int) -> WeightPlan:
        """What concerns one shard, which is number 0 of the plan returned; its buckets are those of this plan."""
        own = tuple(self._by_shard[shard])
        return WeightPlan(parameters=self.parameters, senders=self.senders, needs=(self.needs[shard],), parts=own)

    @cached_property
    def _by_shard(self) -> list[list[Part]]:
        found: list[list[Part]] = [[] for _ in self.needs]
        for part in self.parts:
            found[part.shard].append(Part(part.tensor, part.sender, 0, part.ranges))
        return found

    @cached_property
    def digests(self) -> tuple[int, ...]:
        """[shards] 63 bits of a fingerprint of all that concerns a shard: equal on its senders and workers."""
        texts = (to_json(self.of_shard(shard)) for shard in range(len(self.needs)))
        return tuple(int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) >> 1 for text in texts)


@record
class Slot:
    """The place of a rectangle in its bucket."""

    part: int
    """Index into the plan's parts."""
    ranges: Ranges
    """The rectangle, of the whole tensor: all of the part's, or a piece of it if that is larger than a bucket."""
    offset: int
    """First byte."""
    nbytes: int
    """Without padding."""


@record
class Bucket:
    """Rectangles that one sender sends as one buffer."""

    sender: int
    shard: int
    slots: tuple[Slot, ...]
    nbytes: int
    """Size of the buffer, padding included; a multiple of the alignment."""


def all_of(manifest: Manifest) -> Needs:
    """The needs of a worker that takes every tensor as a whole."""
    return tuple((tuple((0, size) for size in meta.shape),) for meta in manifest)


def whole(manifest: Manifest) -> WeightPlan:
    """The plan of one sender that has all tensors as a whole, and of workers that need them so."""
    needs = all_of(manifest)
    parts = (Part(number, 0, 0, ranges) for number, [ranges] in enumerate(needs))
    return WeightPlan(parameters=manifest, senders=1, needs=(needs,), parts=tuple(parts))


def manifest_to_json(manifest: Manifest) -> str:
    """[[name, dtype, shape], ...]"""
    return msgspec.json.encode([[m.name, m.dtype, m.shape] for m in manifest]).decode()


def manifest_from_json(text: str) -> Manifest:
    """Inverse of `manifest_to_json`. Raises ValueError."""
    return manifest_of(_decoded(text, list[tuple[str, str, list[int]]], "a list of name, dtype and shape"))


def needs_to_json(needs: Needs) -> str:
    """A worker's needs as JSON."""
    return msgspec.json.encode(needs).decode()


def needs_from_json(text: str, manifest: Manifest) -> Needs:
    """Inverse of `needs_to_json`. Raises ValueError for all but disjoint rectangles of the manifest's tensors."""
    needs: Needs = _decoded(text, Needs, "rectangles of every tensor")
    parts = tuple(Part(number, 0, 0, ranges) for number, of in enumerate(needs) for ranges in of)
    check(WeightPlan(parameters=manifest, senders=1, needs=(needs,), parts=parts))
    return needs


def to_json(plan: WeightPlan) -> str:
    """The plan as JSON."""
    return msgspec.json.encode(plan).decode()


def from_json(text: str) -> WeightPlan:
    """Inverse of `to_json`. Raises ValueError for anything but a plan that sends what is needed exactly once."""
    plan: WeightPlan = _decoded(text, WeightPlan, "a plan")
    manifest_of((meta.name, meta.dtype, meta.shape) for meta in plan.parameters)
    check(plan)
    return plan


def _decoded(text: str, kind: Any, expected: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"weights: expected {expected}, found {error}") from None


def check(plan: WeightPlan) -> None:
    """Raise ValueError unless what every shard needs is sent exactly once, each part by a sender of the plan."""
    count = (len(plan.parameters), plan.senders, len(plan.needs))
    sent: list[list[list[Ranges]]] = [[[] for _ in plan.parameters] for _ in plan.needs]
    for part in plan.parts:
        if not all(0 <= n < most for n, most in zip((part.tensor, part.sender, part.shard), count)):
            raise ValueError(
                f"weights: expected one of {count[0]} tensors, {count[1]} senders and {count[2]} shards, found {part}"
            )
        sent[part.shard][part.tensor].append(part.ranges)
    for shard, needs in enumerate(plan.needs):
        if len(needs) != len(plan.parameters):
            raise ValueError(f"weights: expected the needs of {len(plan.parameters)} tensors, found {len(needs)}")
        for meta, rectangles, needed in zip(plan.parameters, sent[shard], needs):
            _check_cover(meta, rectangles, needed)


def _check_cover(meta: ParamMeta, rectangles: Sequence[Ranges], needed: Sequence[Ranges]) -> None:
    for ranges in (*rectangles, *needed):
        inside = len(ranges) == len(meta.shape) and all(0 <= a < b <= n for (a, b), n in zip(ranges, meta.shape))
        if not inside:
            raise ValueError(f"weights: {meta.name}: expected rectangles inside {meta.shape}, found {ranges}")
    if len(needed) <= 1 and list(rectangles) == list(needed):
        return
    sent, wanted = _counted(meta, rectangles, needed)
    if np.any(wanted > 1):
        raise ValueError(f"weights: {meta.name}: expected every element to be needed once, found some twice")
    if not np.array_equal(sent, wanted):
        found = "missing" if np.any(sent < wanted) else "sent twice" if np.any(sent > 1) else "sent for nothing"
        raise ValueError(f"weights: {meta.name}: expected every needed element once, found some {found}")


def _counted(meta: ParamMeta, *groups: Sequence[Ranges]) -> list[np.ndarray]:
    """How often each group of rectangles has each cell: the boundaries of all cut the tensor into cells."""
    edges = [
        sorted({0, n, *(end for parts in groups for ranges in parts for end in ranges[axis])})
        for axis, n in enumerate(meta.shape)
    ]
    cells = [len(along) - 1 for along in edges]
    places = [{edge: place for place, edge in enumerate(along)} for along in edges]
    found = [np.zeros(cells, dtype=np.int64) for _ in groups]
    for counted, parts in zip(found, groups):
        for ranges in parts:
            counted[tuple(slice(of[a], of[b]) for (a, b), of in zip(ranges, places))] += 1
    return found


def not_covered(manifest: Manifest, needs: Iterable[Needs]) -> str:
    """Which tensor no worker of an engine takes as a whole, empty if all are taken; needs: of its workers."""
    for number, meta in enumerate(manifest):
        rectangles = {ranges for of in needs for ranges in of[number]}
        whole_tensor = tuple((0, size) for size in meta.shape)
        if rectangles != {whole_tensor} and not np.all(_counted(meta, tuple(rectangles))[0]):
            found = f"{len(rectangles)} parts that leave out some"
            return f"weights: {meta.name}: expected all of {meta.shape} to be the engine's, found {found}"
    return ""


def buckets(plan: WeightPlan, bucket_mib: int) -> tuple[Bucket, ...]:
    """All buckets in an order that all follow: the first of each sender for each shard, the second of each, ..."""
    own = [
        list(_of_pair(plan, sender, shard, numbers, bucket_mib << 20))
        for (sender, shard), numbers in sorted(plan.pairs.items())
    ]
    turns = max(map(len, own), default=0)
    return tuple(of[turn] for turn in range(turns) for of in own if turn < len(of))


def _of_pair(plan: WeightPlan, sender: int, shard: int, numbers: Iterable[int], limit: int) -> Iterator[Bucket]:
    slots: list[Slot] = []
    offset = 0
    for number in numbers:
        part = plan.parts[number]
        meta = plan.parameters[part.tensor]
        for ranges in split(part.ranges, max(limit // meta.item_bytes, 1)):
            nbytes = volume(ranges) * meta.item_bytes
            size = -(-nbytes // ALIGNMENT) * ALIGNMENT
            if slots and offset + size > limit:
                yield Bucket(sender=sender, shard=shard, slots=tuple(slots), nbytes=offset)
                slots, offset = [], 0
            slots.append(Slot(part=number, ranges=ranges, offset=offset, nbytes=nbytes))
            offset += size
    if slots:
        yield Bucket(sender=sender, shard=shard, slots=tuple(slots), nbytes=offset)


@record
class Connection:
    """The broadcast groups for weights. Produced by `WeightSync`; `msgspec.to_builtins` makes JSON of it."""

    backend: str
    """gloo, nccl or shm."""
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
    """Until all members of a group have come (seconds)."""
    deltas: Literal["off", "absolute"] = "off"
    """absolute: the new values of changed elements (`weights.changes`); off: all updates are whole."""


@record
class SendReport:
    """One finished broadcast of all weights, as the sending ranks measured it."""

    seconds: float = 0.0
    bytes: int = 0
    """Bytes sent by all ranks, padding included."""
    whole_bytes: int = 0
    """What they would have sent without deltas."""
    most_sent: int = 0
    """Bytes of the rank that sent most."""
    most_received: int = 0
    """Bytes of the worker that got most."""
    digests: tuple[str, ...] = ()
    """[shards] digest of the buckets that were sent to each (hex)."""
    values: tuple[str, ...] = ()
    """[shards] digest of the values that each got (hex), whatever buckets they were sent in."""
    failure: str = ""
    """Why the group failed, as when an engine ends during the broadcast; then nothing above counts."""
