"""Writes changed elements of Hugging Face tensors into an engine's live parameters, in time that grows with their
number, not with the tensors' size.

Each pair of a rectangle and a part that it meets becomes a row of numbers; the place of an element in the
parameter's memory is then a sum over its indices. Rectangles of one parameter, as those of a layer's experts, are
written together.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from megatron_scalerl.weights.changes import Changes, counted
from megatron_scalerl.weights.live_map import LivePart
from megatron_scalerl.weights.plan import Ranges


def write_changes(arrived: Iterable[tuple[Sequence[LivePart], Changes]]) -> None:
    """Write changes into the parts of their tensors."""
    groups: dict[tuple[int, ...], list[tuple[LivePart, Changes]]] = {}
    for parts, changes in arrived:
        for part in parts:
            if not _meets(part, changes.ranges):
                continue
            alone = id(part) if _orders(part) else 0  # its indices have to be looked up
            key = (part.live.untyped_storage().data_ptr(), len(changes.ranges), alone)
            groups.setdefault(key, []).append((part, changes))
    for pairs in groups.values():
        _write(pairs)


def _write(pairs: Sequence[tuple[LivePart, Changes]]) -> None:
    """Write into one parameter; rectangles of one number of dimensions."""
    live, orders = pairs[0][0].live, _orders(pairs[0][0])
    positions = torch.cat([changes.positions for _, changes in pairs])
    values = torch.cat([changes.values for _, changes in pairs])
    rows = torch.tensor([_row(part, changes.ranges) for part, changes in pairs]).to(positions.device).t()
    which = counted([len(changes.positions) for _, changes in pairs], positions.device)
    where, rest = rows[0][which], positions
    outside = torch.zeros_like(rest, dtype=torch.bool)
    for axis in reversed(range(len(pairs[0][1].ranges))):
        size, first, low, high, stride = (row[which] for row in rows[1 + 5 * axis : 6 + 5 * axis])
        outer = rest.div(size, rounding_mode="floor")
        index = rest - outer * size + first
        if axis in orders:
            end = max(changes.ranges[axis][1] for _, changes in pairs)
            index = _places(orders[axis], end).to(index.device)[index]
        where = where + index * stride
        outside |= (index < low) | (index >= high)
        rest = outer
    if not all(_holds(part, changes.ranges) for part, changes in pairs):  # else the host need not wait for the mask
        inside = outside.logical_not().nonzero().flatten()
        where, values = where[inside], values[inside]
    memory = live.as_strided((live.untyped_storage().nbytes() // live.element_size(),), (1,), 0)
    memory[where] = values.to(live)


def _orders(part: LivePart) -> dict[int, torch.Tensor]:
    """Axis of the tensor -> its indices, where they are in no plain order."""
    return {axis: along for axis, along in zip(part.axes, part.indices) if isinstance(along, torch.Tensor)}


def _places(index: torch.Tensor, size: int) -> torch.Tensor:
    """[size] int64: the place of each of the tensor's indices, -1 for those that are not there."""
    places = torch.full((max(size, int(index.max()) + 1),), -1, dtype=torch.int64)
    places[index] = torch.arange(len(index))
    return places


def _bounds(part: LivePart) -> list[tuple[int, int, int]]:
    """(first index, end, stride in memory) along each axis of the tensor; of places where it has an order."""
    bounds = {axis: (index, index + 1, 0) for axis, index in part.fixed.items()}
    for axis, along, stride in zip(part.axes, part.indices, part.live.stride()):
        low = along.start if isinstance(along, range) else 0
        bounds[axis] = (low, low + len(along), stride)
    return [bounds[axis] for axis in sorted(bounds)]


def _row(part: LivePart, ranges: Ranges) -> list[int]:
    """The memory's element of index 0, then for each axis: the rectangle's size and first index, the bounds."""
    bounds = _bounds(part)
    base = int(part.live.storage_offset()) - sum(low * stride for low, _, stride in bounds)
    return [base, *chain(*((b - a, a, *bound) for (a, b), bound in zip(ranges, bounds)))]


def _meets(part: LivePart, ranges: Ranges) -> bool:
    """Whether a rectangle may have elements of the part."""
    orders, bounds = _orders(part), enumerate(zip(ranges, _bounds(part)))
    return all(axis in orders or (low < b and a < high) for axis, ((a, b), (low, high, _)) in bounds)


def _holds(part: LivePart, ranges: Ranges) -> bool:
    """Whether all elements of a rectangle are the part's."""
    return not _orders(part) and all(low <= a and b <= high for (a, b), (low, high, _) in zip(ranges, _bounds(part)))
