"""The slots of a sender's bucket: their values, their memory in it, and what changed in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_scalerl.weights.changes import Changes, Found, bits_of, can_code, find
from megatron_scalerl.weights.plan import Bucket, Slot, WeightPlan
from megatron_scalerl.weights.rectangles import Ranges, within
from megatron_scalerl.weights.transport.gloo import Read
from megatron_scalerl.weights.value_digest import total
from megatron_scalerl.weights.written import Written


def read_slot(plan: WeightPlan, slot: Slot, read: Read) -> torch.Tensor:
    """The values of a slot. Raises ValueError if they are not those of the plan."""
    part = plan.parts[slot.part]
    meta, values = plan.parameters[part.tensor], read(slot.part)
    found, expected = (
        (str(values.dtype).removeprefix("torch."), tuple(values.shape)),
        (meta.dtype, shape_of(part.ranges)),
    )
    if found != expected:
        raise ValueError(f"weights: {meta.name}: expected a part of {expected}, found {found}")
    return values.detach()[within(part.ranges, slot.ranges)]


def place_of(packed: torch.Tensor, slot: Slot, dtype: torch.dtype) -> torch.Tensor:
    """[n] the slot's memory in a bucket."""
    return packed[slot.offset : slot.offset + slot.nbytes].view(dtype)


def shape_of(ranges: Ranges) -> tuple[int, ...]:
    """Of a rectangle."""
    return tuple(b - a for a, b in ranges)


def is_recorded(plan: WeightPlan, bucket: Bucket, read: Read, written: Written) -> bool:
    """Whether the optimizer records all changes of a bucket, so that no copy of it has to be kept."""
    values = (read_slot(plan, slot, read) for slot in bucket.slots)
    return all(can_code(each.dtype) and written.covers(each) for each in values)


def recorded(plan: WeightPlan, bucket: Bucket, read: Read, written: Written) -> list[tuple[int, Found]] | None:
    """(place of the slot, its changes) where there are any, as the optimizer recorded them; None where it did not."""
    every = [written.of(read_slot(plan, slot, read)) for slot in bucket.slots]
    if None in every:
        return None
    return [(place, found) for place, found in enumerate(every) if found is not None and found.positions.numel()]


def compared(plan: WeightPlan, bucket: Bucket, read: Read, held: torch.Tensor) -> list[tuple[int, Found]] | None:
    """The same, by comparing with the bucket as all receivers have it, which becomes the new one.

    None where the bucket is to be sent whole.
    """
    every = []
    for place, slot in enumerate(bucket.slots):
        values = read_slot(plan, slot, read)
        found = find(bits_of(place_of(held, slot, values.dtype)), values) if can_code(values.dtype) else None
        if found is None:
            return None
        if found.positions.numel():
            every.append((place, found))
    return every


def digest_change(plan: WeightPlan, bucket: Bucket, found: Sequence[tuple[int, Found]]) -> int:
    """What changes add to the digest of a bucket's values."""
    each = []
    for place, differ in found:
        slot = bucket.slots[place]
        part = Changes(
            tensor=plan.parts[slot.part].tensor,
            ranges=slot.ranges,
            positions=differ.positions,
            steps=None,
            values=differ.new,
        )
        each.append(part.digest(differ.old, differ.new))
    return total(each)
