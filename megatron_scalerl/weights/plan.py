"""The plan of a weight update: which rank sends which part of which tensor, and in which buckets.

Trainer and engines agree on one plan when they connect; an update then sends bytes only. Tensors are those of the
Hugging Face checkpoint, layer by layer, because an engine buffers the parts of a layer until the layer is complete.
A tensor consists of rectangles, each sent by the one trainer rank that holds it: nothing is gathered. A sender's
rectangles are packed into its buckets in the plan's order; buckets of all senders take turns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import msgspec
import numpy as np

Ranges = tuple[tuple[int, int], ...]
"""A rectangle: (first, end) along each dimension of a tensor; () of a scalar."""
ALIGNMENT = 16
"""Every rectangle starts at a multiple of this many bytes in its bucket, so that it can be viewed in its type."""
MOST_CELLS = 1 << 22
"""Of the grid that the boundaries of a tensor's parts make; a plan beyond that is no plan of a model."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
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
    seen: set[str] = set()
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
    """A rectangle of one tensor, and who sends it."""

    tensor: int
    """Index into the plan's parameters."""
    sender: int
    """Index from 0 of the sending rank."""
    ranges: Ranges


class WeightPlan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The parts that make up every tensor exactly once. Produced by `weights.owners` or `whole`."""

    parameters: Manifest
    senders: int
    """Number of sending ranks."""
    parts: tuple[Part, ...]
    """In the order of the parameters."""

    @cached_property
    def digest(self) -> int:
        """63 bits of a fingerprint of everything in the plan: equal on all ranks and engines of one update."""
        return int(hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16], 16) >> 1


@dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Rectangles that one sender sends as one buffer."""

    sender: int
    slots: tuple[Slot, ...]
    nbytes: int
    """Size of the buffer, padding included; a multiple of the alignment."""


def whole(manifest: Manifest) -> WeightPlan:
    """The plan of one sender that has all tensors as a whole."""
    parts = (Part(n, 0, tuple((0, size) for size in meta.shape)) for n, meta in enumerate(manifest))
    return WeightPlan(parameters=manifest, senders=1, parts=tuple(parts))


def to_json(plan: WeightPlan) -> str:
    """The plan as JSON."""
    return msgspec.json.encode(plan).decode()


def from_json(text: str) -> WeightPlan:
    """Inverse of `to_json`. Raises ValueError for anything but a plan that sends every tensor exactly once."""
    try:
        plan = msgspec.json.decode(text, type=WeightPlan)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"weights: expected a plan, found {error}") from None
    manifest_of((meta.name, meta.dtype, meta.shape) for meta in plan.parameters)
    check(plan)
    return plan


def check(plan: WeightPlan) -> None:
    """Raise ValueError unless every element of every tensor is sent exactly once, each by a sender of the plan."""
    of_tensor: list[list[Ranges]] = [[] for _ in plan.parameters]
    for part in plan.parts:
        if not (0 <= part.tensor < len(plan.parameters) and 0 <= part.sender < plan.senders):
            raise ValueError(
                f"weights: expected one of {len(plan.parameters)} tensors and {plan.senders} senders, found {part}"
            )
        of_tensor[part.tensor].append(part.ranges)
    for meta, rectangles in zip(plan.parameters, of_tensor):
        _check_cover(meta, rectangles)


def _check_cover(meta: ParamMeta, rectangles: Sequence[Ranges]) -> None:
    for ranges in rectangles:
        inside = len(ranges) == len(meta.shape) and all(0 <= a < b <= n for (a, b), n in zip(ranges, meta.shape))
        if not inside:
            raise ValueError(f"weights: {meta.name}: expected rectangles inside {meta.shape}, found {ranges}")
    # the boundaries of all rectangles cut the tensor into cells; each has to be in one rectangle
    edges = [sorted({0, n, *(end for r in rectangles for end in r[axis])}) for axis, n in enumerate(meta.shape)]
    places = [{edge: place for place, edge in enumerate(along)} for along in edges]
    cells = [len(along) - 1 for along in edges]
    if prod(cells) > MOST_CELLS:
        raise ValueError(f"weights: {meta.name}: expected at most {MOST_CELLS} cells of parts, found {prod(cells)}")
    count = np.zeros(cells, dtype=np.int64)
    for ranges in rectangles:
        count[tuple(slice(of[a], of[b]) for (a, b), of in zip(ranges, places))] += 1
    if not np.all(count == 1):
        found = "missing" if np.any(count == 0) else "sent twice"
        raise ValueError(f"weights: {meta.name}: expected every element once, found some {found}")


def buckets(plan: WeightPlan, bucket_mib: int) -> tuple[Bucket, ...]:
    """All buckets in the order in which engines receive them: the first of each sender, the second of each, ..."""
    own: list[list[Bucket]] = [list(_of_sender(plan, sender, bucket_mib << 20)) for sender in range(plan.senders)]
    turns = max(map(len, own))
    return tuple(of[turn] for turn in range(turns) for of in own if turn < len(of))


def _of_sender(plan: WeightPlan, sender: int, limit: int) -> Iterator[Bucket]:
    slots: list[Slot] = []
    offset = 0
    for number, part in enumerate(plan.parts):
        if part.sender != sender:
            continue
        meta = plan.parameters[part.tensor]
        for ranges in _split(part.ranges, max(limit // meta.item_bytes, 1)):
            nbytes = volume(ranges) * meta.item_bytes
            size = -(-nbytes // ALIGNMENT) * ALIGNMENT
            if slots and offset + size > limit:
                yield Bucket(sender=sender, slots=tuple(slots), nbytes=offset)
                slots, offset = [], 0
            slots.append(Slot(part=number, ranges=ranges, offset=offset, nbytes=nbytes))
            offset += size
    if slots:
        yield Bucket(sender=sender, slots=tuple(slots), nbytes=offset)


def _split(ranges: Ranges, most: int) -> Iterable[Ranges]:
    """Pieces of at most `most` elements: cut along the first dimension, and where one index is too many, the next."""
    if volume(ranges) <= most:
        return [ranges]
    (first, end), rest = ranges[0], ranges[1:]
    rows = most // volume(rest)
    if rows == 0:
        return [((row, row + 1), *tail) for row in range(first, end) for tail in _split(rest, most)]
    return [((row, min(row + rows, end)), *rest) for row in range(first, end, rows)]


def volume(ranges: Ranges) -> int:
    """Elements of a rectangle."""
    return prod(b - a for a, b in ranges)


def within(outer: Ranges, inner: Ranges) -> tuple[slice, ...]:
    """Where a rectangle lies in a larger one's own coordinates."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(inner, outer))
