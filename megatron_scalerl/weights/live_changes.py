"""Writes changed elements of Hugging Face tensors into an engine's live parameters, in time that grows with their
number, not with the tensors' size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron_scalerl.weights.changes import Changes, Together, bits_of
from megatron_scalerl.weights.digest import total
from megatron_scalerl.weights.plan import Ranges

if TYPE_CHECKING:
    from megatron_scalerl.weights.live_map import LivePart

Chosen = slice | torch.Tensor
"""Some of n elements: a slice, or [m] int64."""


def write_changes(of: Sequence[tuple[Sequence[LivePart], Changes, torch.dtype]]) -> int:
    """Write changes into the parts of their tensors; returns what the digest of values changes by.

    of: (parts of the tensor, changes, the tensor's type) of each rectangle. Values that the elements have now are
    read where they lie. Rectangles of one parameter, as those of a layer's experts, are written together.
    """
    later: list[torch.Tensor] = []
    together: dict[tuple[int, int, torch.dtype], list[tuple[LivePart, Changes]]] = {}
    for every, changes, dtype in of:
        parts = [part for part in every if _meets(part, changes)]
        if len(parts) == 1 and _holds(parts[0], changes):
            key = parts[0].live.untyped_storage().data_ptr(), len(changes.ranges), dtype
            together.setdefault(key, []).append((parts[0], changes))
        else:
            later.append(_write_apart(parts, changes, dtype))
    later += [_write_together(pairs, dtype) for (_, _, dtype), pairs in together.items()]
    return total([int(torch.stack(later).sum())] if later else [0])


def _write_apart(parts: Sequence[LivePart], changes: Changes, dtype: torch.dtype) -> torch.Tensor:
    """One rectangle, into any parts."""
    every, count = Together([changes]), changes.positions.numel()
    places = [(part, *_places(part, changes.ranges, every.coordinates, count)) for part in parts]
    old = torch.zeros(count, dtype=changes.values.dtype, device=changes.positions.device)
    for part, chosen, where in places:
        old[chosen] = bits_of(_flat(part)[where].to(dtype))
    new = changes.bits(old)
    for part, chosen, where in places:
        _flat(part)[where] = new[chosen].view(dtype).to(part.live.dtype)
    return every.digest(old, new)


def _write_together(pairs: Sequence[tuple[LivePart, Changes]], dtype: torch.dtype) -> torch.Tensor:
    """Rectangles whose places in one parameter are sums over their indices."""
    strides = [_strides(part) for part, _ in pairs]
    firsts = [sum(step * first for step, first in each.values()) for each in strides]
    base = [int(part.live.storage_offset()) - first for (part, _), first in zip(pairs, firsts)]
    axes = range(len(pairs[0][1].ranges))
    every = Together(
        [changes for _, changes in pairs], [base, *([each[axis][0] for each in strides] for axis in axes)]
    )
    where = every.column(0)
    for axis in axes:
        where = where + every.coordinates[axis] * every.column(1 + axis)
    live = pairs[0][0].live
    memory = live.as_strided((live.untyped_storage().nbytes() // live.element_size(),), (1,), 0)
    old = bits_of(memory[where].to(dtype))
    values = [changes for _, changes in pairs]
    stepped = values[0].steps is not None
    joined = Changes(
        tensor=0,
        ranges=(),
        positions=every.positions,
        steps=torch.cat([each.steps for each in values if each.steps is not None]) if stepped else None,
        values=torch.cat([each.values for each in values]),
    )
    new = joined.bits(old)
    memory[where] = new.view(dtype).to(live.dtype)
    return every.digest(old, new)


def _strides(part: LivePart) -> dict[int, tuple[int, int]]:
    """Axis of the tensor -> (stride in memory, first index)."""
    found = {axis: (0, index) for axis, index in part.fixed.items()}
    for axis, along, stride in zip(part.axes, part.indices, part.live.stride()):
        assert isinstance(along, range)
        found[axis] = stride, along.start
    return found


def _holds(part: LivePart, changes: Changes) -> bool:
    """Whether the part has the whole rectangle, without tables of indices."""
    along = {axis: range(index, index + 1) for axis, index in part.fixed.items()}
    for axis, index in zip(part.axes, part.indices):
        if not isinstance(index, range):
            return False
        along[axis] = index
    return all(along[axis].start <= a and b <= along[axis].stop for axis, (a, b) in enumerate(changes.ranges))


def _meets(part: LivePart, changes: Changes) -> bool:
    """Whether some of the rectangle may be the part's."""
    fixed = [(axis, range(index, index + 1)) for axis, index in part.fixed.items()]
    along = [(axis, along) for axis, along in zip(part.axes, part.indices) if isinstance(along, range)]
    return all(
        changes.ranges[axis][0] < index.stop and index.start < changes.ranges[axis][1]
        for axis, index in (*fixed, *along)
    )


def _places(
    part: LivePart, ranges: Ranges, coordinates: Sequence[torch.Tensor], count: int
) -> tuple[Chosen, torch.Tensor]:
    """(which elements are the part's, their places in its memory). coordinates: in row-major order."""
    along = {axis: (index, stride) for axis, index, stride in zip(part.axes, part.indices, part.live.stride())}
    along |= {axis: (range(index, index + 1), 0) for axis, index in part.fixed.items()}
    chosen: Chosen = slice(0, count)
    where = torch.zeros(count, dtype=torch.int64, device=part.live.device)
    for axis, (index, stride) in sorted(along.items()):
        here = coordinates[axis][chosen]
        if isinstance(index, range):
            step, inside = here - index.start, index.start <= ranges[axis][0] and ranges[axis][1] <= index.stop
        else:
            step, inside = _inverse(index, ranges[axis][1]).to(here.device)[here], False
        where = where + step * stride
        if inside:
            continue
        if axis == 0 and isinstance(index, range):  # rising
            ends = torch.searchsorted(here, torch.tensor([index.start, index.stop], device=here.device)).tolist()
            chosen, where = slice(*ends), where[slice(*ends)]
        else:
            kept = ((step >= 0) & (step < len(index))).nonzero().flatten()
            where = where[kept]
            chosen = kept + chosen.start if isinstance(chosen, slice) else chosen[kept]
    return chosen, where


def _inverse(index: torch.Tensor, size: int) -> torch.Tensor:
    """[size] int64: the place of each of the tensor's indices, -1 for those that are not there."""
    found = torch.full((max(size, int(index.max()) + 1),), -1, dtype=torch.int64)
    found[index] = torch.arange(len(index))
    return found


def _flat(part: LivePart) -> torch.Tensor:
    """The memory that the part is a view of, from its first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(part.live.shape, part.live.stride()))
    return part.live.as_strided((last + 1,), (1,))
