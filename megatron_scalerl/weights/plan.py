"""The plan of a weight update: which rank sends which rectangle of which tensor to which shard, and in which buckets.

Life of a plan, while engines connect:

    Manifest         the trainer lists names, types and shapes of the Hugging Face tensors, layer by layer
    Needs            each worker of an engine names the needed rectangles of each tensor; all workers with the same
                     needs are one shard, as the workers of one tensor-parallel rank in all engines
    WeightPlan       every trainer rank makes the same plan (`weights.owners`): holders of rectangles send without a
                     gather, and workers receive needed elements alone
    of_shard         the workers of a shard get the shard's part of the plan as JSON

and in every update:

    digests          the header has the digest of the shard's part of the plan, which both sides compare
    buckets          both sides pack a sender's rectangles for a shard in the plan's order; senders take turns
    SendReport       the senders report the update, and the controller compares this report with the workers' reports

Words: a rectangle is a range of indices along each dimension. A `Part` is a rectangle that one sender sends to one
shard. A `Slot` is a rectangle in a bucket: a part, or a slice of a part that is larger than a bucket.

An update sends bytes only. The controller imports this module, so the module does not import torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, zip_longest
from math import prod
from typing import Any, Literal

import msgspec
import numpy as np

from megatron_scalerl.distributed.rendezvous import Rendezvous
from megatron_scalerl.record import record

MOST_CHANNELS = 8
"""Channels of a broadcast group over NCCL. Each channel has buffers on every member's device. NCCL would take up to
32. That 8 are enough is an estimate."""
ALIGNMENT = 16
"""Every rectangle starts in a bucket at a multiple of this many bytes, as a view in the tensor's type requires."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1}
VLLM_BACKEND = "msrl"
"""Name under which this package registers a weight-transfer backend with vLLM."""
Ranges = tuple[tuple[int, int], ...]
"""A rectangle: (first, end) along each dimension of a tensor; () for a scalar."""
Needs = tuple[tuple[Ranges, ...], ...]
"""For each tensor of the manifest, in order: the disjoint rectangles that a worker needs."""


def overlap(first_ranges: Ranges, second_ranges: Ranges) -> Ranges | None:
    """The rectangle that two rectangles have in common, None for disjoint rectangles."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first_ranges, second_ranges))
    if any(a >= b for a, b in common):
        return None
    return common


def volume(ranges: Ranges) -> int:
    """Number of elements of a rectangle."""
    return prod(b - a for a, b in ranges)


def within(outer: Ranges, inner: Ranges) -> tuple[slice, ...]:
    """The slices that cut the inner rectangle out of the values of the outer rectangle."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(inner, outer))


def split(ranges: Ranges, most_elements: int) -> Iterable[Ranges]:
    """The rectangle in slices of at most `most_elements` elements.

    Slices are cut along the first dimension. Where one index of this dimension has too many elements, slices are also
    cut along the next dimension.
    """
    if volume(ranges) <= most_elements:
        return [ranges]
    first, end = ranges[0]
    inner_ranges = ranges[1:]
    rows = most_elements // volume(inner_ranges)
    if rows == 0:
        return [((row, row + 1), *tail) for row in range(first, end) for tail in split(inner_ranges, most_elements)]
    return [((row, min(row + rows, end)), *inner_ranges) for row in range(first, end, rows)]


def merged_rectangles(rectangles: Iterable[Ranges]) -> tuple[Ranges, ...]:
    """Disjoint rectangles that cover the elements of `rectangles`; neighbors along a dimension are merged."""
    current = sorted(disjoint(rectangles))
    dimensions = max(map(len, current), default=0)
    for axis in reversed(range(dimensions)):
        by_other_ranges: dict[Ranges, list[tuple[int, int]]] = {}
        for ranges in current:
            by_other_ranges.setdefault(ranges[:axis] + ranges[axis + 1 :], []).append(ranges[axis])
        current = []
        for other_ranges, intervals in by_other_ranges.items():
            current += [
                (*other_ranges[:axis], along, *other_ranges[axis:]) for along in _joined_intervals(sorted(intervals))
            ]
    return tuple(sorted(current))


def disjoint(rectangles: Iterable[Ranges]) -> list[Ranges]:
    """Disjoint rectangles that cover the elements of `rectangles`; overlapping rectangles are cut."""
    disjoint_ranges: list[Ranges] = []
    for ranges in sorted(rectangles):
        remainders = [ranges]
        for earlier in disjoint_ranges:
            remainders = list(chain.from_iterable(_without(part, earlier) for part in remainders))
        disjoint_ranges += remainders
    return disjoint_ranges


def _without(ranges: Ranges, removed: Ranges) -> Iterator[Ranges]:
    """The elements of `ranges` outside of `removed`, as disjoint rectangles."""
    if any(b <= c or d <= a for (a, b), (c, d) in zip(ranges, removed)):
        yield ranges
        return
    # Along each axis the parts below and above `removed` remain; the middle is cut along the next axes.
    head: Ranges = ()
    for axis, ((a, b), (c, d)) in enumerate(zip(ranges, removed)):
        tail = ranges[axis + 1 :]
        if a < c:
            yield (*head, (a, c), *tail)
        if d < b:
            yield (*head, (d, b), *tail)
        head = (*head, (max(a, c), min(b, d)))


def _joined_intervals(intervals: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Disjoint intervals in rising order; intervals that touch are joined."""
    first, end = intervals[0]
    for a, b in intervals[1:]:
        if a > end:
            yield first, end
            first = a
        end = b
    yield first, end


@record
class ParamMeta:
    """Name, type and shape of a tensor that engines receive."""

    name: str
    """Name of the tensor in the Hugging Face checkpoint."""
    dtype: str
    """Type of the elements: float32, bfloat16 ..."""
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self.dtype]


Manifest = tuple[ParamMeta, ...]


def manifest_of(items: Iterable[tuple[str, str, Iterable[int]]]) -> Manifest:
    """A manifest from (name, dtype, shape) in the order of sending.

    Raises ValueError for an empty manifest, a duplicate name, a type that cannot be sent, and a negative size.
    """
    manifest = tuple(ParamMeta(name=n, dtype=d, shape=tuple(s)) for n, d, s in items)
    if not manifest:
        raise ValueError("weights: the manifest names no tensor")
    names = set()
    for meta in manifest:
        if meta.name in names:
            raise ValueError(f"weights: {meta.name} is in the manifest twice")
        if meta.dtype not in _ITEM_BYTES:
            raise ValueError(f"weights: {meta.name}: the type is {meta.dtype}, not one of {sorted(_ITEM_BYTES)}")
        if any(size < 0 for size in meta.shape):
            raise ValueError(f"weights: {meta.name} has a negative size in its shape {meta.shape}")
        names.add(meta.name)
    return manifest


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of a tensor that one sender sends to the workers of one shard."""

    tensor: int
    """Index of the tensor in the plan's `parameters`."""
    sender: int
    """Index of the sending rank among the senders."""
    shard: int
    """Index of the shard whose workers receive the part."""
    ranges: Ranges


class WeightPlan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The parts that make up every shard's needs, exactly once. Produced by `weights.owners`."""

    parameters: Manifest
    senders: int
    """Number of sending ranks."""
    needs: tuple[Needs, ...]
    """For each shard, the needs of the shard's workers, which all have the same needs."""
    parts: tuple[Part, ...]
    """All parts, layer by layer."""

    @cached_property
    def pairs(self) -> dict[tuple[int, int], list[int]]:
        """(sender, shard) -> numbers of the parts that this sender sends to this shard over one broadcast group."""
        pairs: dict[tuple[int, int], list[int]] = {}
        for number, part in enumerate(self.parts):
            pairs.setdefault((part.sender, part.shard), []).append(number)
        return pairs

    def of_shard(self, shard: int) -> WeightPlan:
        """The part of the plan that sends to one shard, which gets number 0. The shard's buckets do not change."""
        parts = tuple(self._by_shard[shard])
        return WeightPlan(parameters=self.parameters, senders=self.senders, needs=(self.needs[shard],), parts=parts)

    @cached_property
    def _by_shard(self) -> list[list[Part]]:
        by_shard: list[list[Part]] = [[] for _ in self.needs]
        for part in self.parts:
            by_shard[part.shard].append(Part(part.tensor, part.sender, 0, part.ranges))
        return by_shard

    @cached_property
    def digests(self) -> tuple[int, ...]:
        """For each shard, 63 bits of a digest of the shard's plan, equal on the shard's senders and workers."""
        # Headers are signed int64, so a digest has 63 bits.
        texts = (to_json(self.of_shard(shard)) for shard in range(len(self.needs)))
        return tuple(int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) >> 1 for text in texts)


@record
class Slot:
    """A rectangle and the place of its bytes in a bucket."""

    part: int
    """Index of the rectangle's part in the plan's `parts`."""
    ranges: Ranges
    """The rectangle, in the whole tensor's indices: a part's, or a slice of a part that is larger than a bucket."""
    offset: int
    """Place of the rectangle's first byte in the bucket."""
    nbytes: int
    """Size of the rectangle's values (bytes), without padding."""


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


def manifest_to_json(manifest: Manifest) -> str:
    """A manifest as JSON: [[name, dtype, shape], ...]."""
    return msgspec.json.encode([[m.name, m.dtype, m.shape] for m in manifest]).decode()


def manifest_from_json(text: str) -> Manifest:
    """Inverse of `manifest_to_json`. Raises ValueError for JSON that is not a valid manifest."""
    return manifest_of(_decoded(text, list[tuple[str, str, list[int]]], "a list of name, dtype and shape"))


def needs_to_json(needs: Needs) -> str:
    """A worker's needs as JSON."""
    return msgspec.json.encode(needs).decode()


def needs_from_json(text: str, manifest: Manifest) -> Needs:
    """Inverse of `needs_to_json`. Raises ValueError unless all needs are disjoint rectangles inside the tensors."""
    needs: Needs = _decoded(text, Needs, "rectangles of every tensor")
    parts = tuple(Part(number, 0, 0, ranges) for number, rectangles in enumerate(needs) for ranges in rectangles)
    check(WeightPlan(parameters=manifest, senders=1, needs=(needs,), parts=parts))
    return needs


def to_json(plan: WeightPlan) -> str:
    """The plan as JSON."""
    return msgspec.json.encode(plan).decode()


def from_json(text: str) -> WeightPlan:
    """Inverse of `to_json`. Raises ValueError unless the plan sends every needed element exactly once."""
    plan: WeightPlan = _decoded(text, WeightPlan, "a plan")
    manifest_of((meta.name, meta.dtype, meta.shape) for meta in plan.parameters)
    check(plan)
    return plan


def _decoded(text: str, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"weights: the JSON is not {name}: {error}") from None


def check(plan: WeightPlan) -> None:
    """Raise ValueError unless every element that a shard needs is sent to the shard exactly once."""
    # A plan may come from another process: numbers are checked before their use as indices.
    tensors = len(plan.parameters)
    shards = len(plan.needs)
    sent_rectangles: list[list[list[Ranges]]] = [[[] for _ in plan.parameters] for _ in plan.needs]
    for part in plan.parts:
        inside = 0 <= part.tensor < tensors and 0 <= part.sender < plan.senders and 0 <= part.shard < shards
        if not inside:
            raise ValueError(
                f"weights: {part} is not in the plan of {tensors} tensors, {plan.senders} senders, {shards} shards"
            )
        sent_rectangles[part.shard][part.tensor].append(part.ranges)
    for shard, needs in enumerate(plan.needs):
        if len(needs) != tensors:
            raise ValueError(
                f"weights: shard {shard} has needs for {len(needs)} tensors, but the plan has {tensors} tensors"
            )
        for meta, rectangles, tensor_needs in zip(plan.parameters, sent_rectangles[shard], needs):
            _check_cover(meta, rectangles, tensor_needs)


def _check_cover(meta: ParamMeta, sent_rectangles: Sequence[Ranges], needed_rectangles: Sequence[Ranges]) -> None:
    for ranges in (*sent_rectangles, *needed_rectangles):
        inside = len(ranges) == len(meta.shape) and all(0 <= a < b <= n for (a, b), n in zip(ranges, meta.shape))
        if not inside:
            raise ValueError(f"weights: {meta.name}: the rectangle {ranges} is not inside the shape {meta.shape}")
    # In the common case the only needed rectangle is sent in one part, and no cells have to be counted.
    if len(needed_rectangles) <= 1 and list(sent_rectangles) == list(needed_rectangles):
        return
    sent_counts, needed_counts = _counted(meta, sent_rectangles, needed_rectangles)
    if np.any(needed_counts > 1):
        raise ValueError(f"weights: {meta.name}: some elements are needed twice")
    if not np.array_equal(sent_counts, needed_counts):
        problem = "sent and not needed"
        if np.any(sent_counts < needed_counts):
            problem = "needed and not sent"
        elif np.any(sent_counts > 1):
            problem = "sent twice"
        raise ValueError(f"weights: {meta.name}: some elements are {problem}")


def _counted(meta: ParamMeta, *groups: Sequence[Ranges]) -> list[np.ndarray]:
    """For each group of rectangles, an array: how many of the rectangles cover each cell of the tensor.

    The boundaries of all rectangles cut the tensor into cells. Counting cells takes less time than counting a
    tensor's billion elements, or than comparing pairs of rectangles.
    """
    rectangles = list(chain.from_iterable(groups))
    cell_of_edge = []
    for axis, size in enumerate(meta.shape):
        edges = {0, size, *chain.from_iterable(ranges[axis] for ranges in rectangles)}
        cell_of_edge.append({edge: cell for cell, edge in enumerate(sorted(edges))})
    counts = [np.zeros([len(cells) - 1 for cells in cell_of_edge], dtype=np.int64) for _ in groups]
    for count, group in zip(counts, groups):
        for ranges in group:
            count[tuple(slice(cells[a], cells[b]) for (a, b), cells in zip(ranges, cell_of_edge))] += 1
    return counts


def not_covered(manifest: Manifest, needs: Iterable[Needs]) -> str:
    """A message that names a tensor of which an engine needs only a part; empty if the engine needs all elements.

    needs: the needs of each of the engine's workers.
    """
    for number, meta in enumerate(manifest):
        rectangles = set(chain.from_iterable(worker_needs[number] for worker_needs in needs))
        whole_tensor = tuple((0, size) for size in meta.shape)
        if rectangles != {whole_tensor} and not np.all(_counted(meta, tuple(rectangles))[0]):
            parts = f"the {len(rectangles)} rectangles that the engine's workers need"
            return f"weights: {meta.name}: {parts} do not cover the shape {meta.shape}"
    return ""


def buckets(plan: WeightPlan, bucket_mib: int) -> tuple[Bucket, ...]:
    """All buckets in the order in which buckets are sent and received: the first bucket of each (sender, shard) pair,
    then each pair's second bucket, ..."""
    pairs = [
        list(_pair_buckets(plan, sender, shard, numbers, bucket_mib << 20))
        for (sender, shard), numbers in sorted(plan.pairs.items())
    ]
    # The pairs take turns, so that all senders are busy at the same time.
    turns = zip_longest(*pairs)
    return tuple(bucket for turn in turns for bucket in turn if bucket is not None)


def _pair_buckets(plan: WeightPlan, sender: int, shard: int, numbers: Iterable[int], limit: int) -> Iterator[Bucket]:
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
                slots = []
                offset = 0
            slots.append(Slot(part=number, ranges=ranges, offset=offset, nbytes=nbytes))
            offset += size
    if slots:
        yield Bucket(sender=sender, shard=shard, slots=tuple(slots), nbytes=offset)


@record
class Connection:
    """The broadcast groups of a weight update.

    Produced by `WeightSync`, and sent as JSON by `msgspec.to_builtins`.
    """

    backend: str
    """Transport over which the groups broadcast: gloo, nccl or shm."""
    rendezvous: Rendezvous
    """Where the members find the group's store."""
    group: str
    """Name of the connection, unique and not a secret. The store of sender n and shard s is called GROUP-n-s."""
    world_sizes: tuple[int, ...]
    """For each shard, the number of members of a group: 1 sender and the shard's workers in all engines."""
    bucket_mib: int
    """Size of the buckets in which parameters are sent (MiB)."""
    timeout_s: float
    """Time limit of every single broadcast (seconds)."""
    connect_timeout_s: float
    """Time limit until all members of a group have joined (seconds)."""
    deltas: Literal["off", "absolute"] = "off"
    """"absolute": updates send the new values of changed elements (`weights.changes`). "off": updates send all
    values."""


@record
class SendReport:
    """The sending ranks' measurements of a finished weight update."""

    seconds: float = 0.0
    bytes: int = 0
    """Bytes sent by all ranks, padding included."""
    whole_bytes: int = 0
    """Bytes that all ranks would have sent if all values were sent instead of changes."""
    most_sent: int = 0
    """Bytes of the rank that sent the most."""
    most_received: int = 0
    """Bytes of the worker that received the most."""
    digests: tuple[str, ...] = ()
    """For each shard, the digest of the buckets that were sent to the shard's workers (hex)."""
    values: tuple[str, ...] = ()
    """For each shard, the digest of the values that the shard's workers received (hex), whatever the buckets."""
    failure: str = ""
    """The reason why a group failed, such as the end of an engine during the broadcast. Empty after success.

    After a failure no other field is valid."""
