"""Writes changed elements of Hugging Face tensors into an engine's live parameters.

The time grows with the number of changes, not with the tensors' size.

Life of a write:

    pair     each `Changes` is paired with the live views (`weights.live_map`) that the rectangle may meet
    group    pairs of one parameter form a group, such as a layer's experts; a view whose indices are a table instead
             of a range has a group alone
    row      the numbers of each pair are one row: sizes, first indices, bounds and strides along each axis
    write    positions become indices, and indices an element of the parameter's memory; elements outside of a view
             are dropped; one indexed store writes the group
"""

from collections.abc import Iterable, Sequence

import torch

from megatron_scalerl.weights.changes import Changes, slot_numbers
from megatron_scalerl.weights.live_map import LiveView
from megatron_scalerl.weights.plan import Ranges


def write_changes(arrived: Iterable[tuple[Sequence[LiveView], Changes]]) -> None:
    """Write changes into live parameters.

    arrived: for each changed rectangle, (all live views of the rectangle's tensor, the changes in the rectangle).
    """
    groups: dict[tuple[int, ...], list[tuple[LiveView, Changes]]] = {}
    for views, changes in arrived:
        for view in views:
            if not _meets(view, changes.ranges):
                continue
            # `_write` uses one index table for the whole group, so a view with a table forms a group of its own.
            table_owner = id(view) if _tables(view) else 0
            key = (view.live.untyped_storage().data_ptr(), len(changes.ranges), table_owner)
            groups.setdefault(key, []).append((view, changes))
    for pairs in groups.values():
        _write(pairs)


def _write(pairs: Sequence[tuple[LiveView, Changes]]) -> None:
    """Write the changes of all (view, changes) pairs into one parameter, to which all views belong.

    All rectangles have the same number of dimensions.
    """
    live = pairs[0][0].live
    tables = _tables(pairs[0][0])
    remainders = torch.cat([changes.positions for _, changes in pairs])
    values = torch.cat([changes.values for _, changes in pairs])
    rows = torch.tensor([_row(view, changes.ranges) for view, changes in pairs]).to(remainders.device).t()
    row_of_element = slot_numbers([len(changes.positions) for _, changes in pairs], remainders.device)
    target = rows[0][row_of_element]
    outside = torch.zeros_like(remainders, dtype=torch.bool)
    # Positions are row-major: the innermost index is the remainder of a division by the axis's size.
    for axis in reversed(range(len(pairs[0][1].ranges))):
        size, first, view_first, view_end, stride = (row[row_of_element] for row in rows[1 + 5 * axis : 6 + 5 * axis])
        quotients = remainders.div(size, rounding_mode="floor")
        index = remainders - quotients * size + first
        if axis in tables:
            end = max(changes.ranges[axis][1] for _, changes in pairs)
            index = _inverse(tables[axis], end).to(index.device)[index]
        target = target + index * stride
        outside |= (index < view_first) | (index >= view_end)
        remainders = quotients
    # Selecting elements makes the host wait for the mask's size, and is left out if all elements are in the views.
    if not all(_holds(view, changes.ranges) for view, changes in pairs):
        inside = outside.logical_not().nonzero().flatten()
        target = target[inside]
        values = values[inside]
    memory = live.as_strided((live.untyped_storage().nbytes() // live.element_size(),), (1,), 0)
    memory[target] = values.to(live)


def _tables(view: LiveView) -> dict[int, torch.Tensor]:
    """Axis of the tensor -> the view's indices along the axis. Axes whose indices are a range are absent."""
    return {axis: along for axis, along in zip(view.axes, view.indices) if isinstance(along, torch.Tensor)}


def _inverse(table: torch.Tensor, size: int) -> torch.Tensor:
    """[size] int64: the position in the table of each index of the tensor, -1 for an index that the table lacks."""
    positions = torch.full((max(size, int(table.max()) + 1),), -1, dtype=torch.int64)
    positions[table] = torch.arange(len(table))
    return positions


def _bounds(view: LiveView) -> list[tuple[int, int, int]]:
    """(first index, end, stride in memory) of the view along each axis of the tensor. For an axis with a table,
    positions in the table take the place of indices."""
    bounds = {axis: (index, index + 1, 0) for axis, index in view.fixed.items()}
    for axis, along, stride in zip(view.axes, view.indices, view.live.stride()):
        view_first = along.start if isinstance(along, range) else 0
        bounds[axis] = (view_first, view_first + len(along), stride)
    return [bounds[axis] for axis in sorted(bounds)]


def _row(view: LiveView, ranges: Ranges) -> list[int]:
    """The numbers of a view and a rectangle for `_write`: the element of memory at index 0; then along each axis the
    rectangle's size and first index, and the view's first index, end and stride."""
    base = int(view.live.storage_offset())
    row = []
    for (a, b), (view_first, view_end, stride) in zip(ranges, _bounds(view)):
        base -= view_first * stride
        row += [b - a, a, view_first, view_end, stride]
    return [base, *row]


def _meets(view: LiveView, ranges: Ranges) -> bool:
    """Whether a rectangle of the tensor may overlap the view."""
    tables = _tables(view)
    for axis, (view_first, view_end, _) in enumerate(_bounds(view)):
        a, b = ranges[axis]
        if axis not in tables and (b <= view_first or view_end <= a):
            return False
    return True


def _holds(view: LiveView, ranges: Ranges) -> bool:
    """Whether all elements of a rectangle are in the view."""
    bounds = zip(ranges, _bounds(view))
    return not _tables(view) and all(
        view_first <= a and b <= view_end for (a, b), (view_first, view_end, _) in bounds
    )
