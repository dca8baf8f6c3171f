"""The record of the elements that optimizer steps changed, by position in the parameters' memory.

Life of the record, from one update to the next:

    watch         once: the regions of memory that this rank's optimizer or another rank writes
    want          when engines connect: whether updates send changes, and which views this rank's updates will read
    add           in every step, `trainer.weight_changes` finds the changes where Megatron rounds fp32 main weights
                  into the policy's parameters, and adds the changes to the region
    gather        before an update, each rank adds the changes that other ranks made in regions which this rank reads
    changes_of    the update asks for the changes in a view of a parameter: the changes of the regions that make up
                  the view's memory, cut at the view's bounds, at positions in the view
    forget        the update has sent the changes

No update compares values again, and no rank keeps a copy of the engines' values. A region is contiguous memory that
one optimizer writes: a parameter, or this rank's shard of a parameter. A view is a part of a parameter, of any
strides.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from megatron_scalerl.weights.changes import SMALL, ChangedElements, bits_of, most_coded


@dataclass(slots=True)
class _Region:
    """The changes, since the last update, in a region of memory that an optimizer writes."""

    elements: int
    dtype: torch.dtype
    device: torch.device
    of_another: bool
    """Whether another rank writes the region and shares the changes. This rank then keeps the changes that its
    updates need."""
    changed: int = 0
    """Number of changes in all steps since the last update."""
    by_step: list[tuple[int, ChangedElements]] = field(default_factory=list)
    """(step, changes) pairs in the order of the steps; empty where there are more changes than `most_coded`
    allows."""

    def all_changes(self) -> ChangedElements | None:
        """The changes of all steps; None where there are more changes than `most_coded` allows."""
        if self.changed > most_coded(self.elements):
            return None
        if not self.by_step:
            empty = torch.empty(0, dtype=torch.int64, device=self.device)
            return ChangedElements(positions=empty, bits=bits_of(empty.to(self.dtype)))
        last, _ = self.by_step[-1]
        changes = joined_changes([step_changes for _, step_changes in self.by_step])
        # The chunks of one step are in rising order and change no element twice. The changes of several steps are
        # sorted here.
        if any(step != last for step, _ in self.by_step):
            changes = _newest(changes)
        self.by_step = [(last, changes)]
        return changes


class ChangeRecord:
    """The elements of this rank's parameters that changed since the last update."""

    def __init__(self) -> None:
        self.is_recording = False
        """Whether changes are recorded, because an update will ask for changes; see `want`."""
        self._addresses: list[int] = []
        """Address of each region's first element, in rising order."""
        self._regions: list[_Region] = []
        self._needed_regions: set[int] = set()
        """Numbers of the regions that this rank's updates read. A region's number is the index in `_addresses`."""
        self._step = 0
        self._lost = False
        self.gathers: list[Callable[[], None]] = []
        """Collective functions, called before an update: each adds the changes that other ranks made."""

    def want(self, is_recording: bool, views: Iterable[Tensor] = ()) -> None:
        """Start or stop the recording.

        views: the views that this rank's updates will read. The record drops changes that other ranks make outside of
        the views.
        """
        if is_recording and not self.is_recording:
            # Earlier steps were made without a record, so their changes are unknown.
            self.lose()
        self.is_recording = is_recording
        self._needed_regions = set(chain.from_iterable(self._regions_of(view) for view in views))

    def needs(self, region: Tensor) -> bool:
        """Whether an update of this rank will read elements of this region."""
        return self._number_of(region) in self._needed_regions

    def watch(self, region: Tensor, *, of_another: bool = False) -> None:
        """Register a region. From now on, the caller has to `add` every change of the region.

        region: contiguous. of_another: another rank writes the region, and `gather` adds that rank's changes.
        """
        if not region.numel():
            return
        number = bisect_right(self._addresses, region.data_ptr())
        self._addresses.insert(number, region.data_ptr())
        self._regions.insert(number, _Region(region.numel(), region.dtype, region.device, of_another))

    def gather(self) -> None:
        """Add the changes that other ranks made. Collective; called before an update."""
        if self.is_recording and self._step and not self._lost:
            for gather in self.gathers:
                gather()

    def begin_step(self) -> None:
        """Note the start of a step, in which the optimizer will write."""
        self._step += 1

    def add(self, memory: Tensor, first: int, changes: ChangedElements | None) -> None:
        """Add the changes that one step made in a chunk of a region. The caller adds a step's chunks in rising order.

        first: the region's element at which the chunk starts. changes: None for more changes than `most_coded` allows
        for the region.
        """
        region = self._regions[self._number_of(memory)]
        if changes is None:
            region.changed += region.elements + SMALL
        else:
            region.changed += changes.positions.numel()
        if changes is None or region.changed > most_coded(region.elements):
            region.by_step = []
        elif changes.positions.numel():
            positions = changes.positions
            if first:
                positions = positions + first
            region.by_step.append((self._step, ChangedElements(positions=positions, bits=changes.bits)))

    def lose(self) -> None:
        """Mark the record as incomplete, after a write that no optimizer made, such as the load of a checkpoint.

        The record knows no changes until `forget`.
        """
        self._lost = True
        self._drop()

    def forget(self) -> None:
        """Start an empty record, after an update has sent the changes."""
        self._step = 0
        self._lost = False
        self._drop()

    def _drop(self) -> None:
        for region in self._regions:
            region.changed = 0
            region.by_step = []

    def covers(self, view: Tensor) -> bool:
        """Whether changes of all elements of a view are recorded."""
        return bool(self._regions_of(view)) and _nested(view)

    def changes_of(self, views: Sequence[Tensor]) -> list[ChangedElements | None]:
        """The changes since the last update in each view, at positions in the view's row-major order.

        views: each passes `covers`. The result is None in these cases:

            a view       a region of the view has, in all steps together, more changes than `most_coded` allows
            a view       this rank has dropped the changes of a region of the view, which another rank writes
            all views    the record is incomplete (`lose`), or no changes are recorded
        """
        by_view = [self._changes_in(view) for view in views]
        pairs = [(view, *pair) for view, changes in zip(views, by_view) for pair in changes or ()]
        bounds: Iterator[list[int]] = iter(())
        if pairs:
            # `_cut` needs bounds on the host. The device searches the bounds of all views, so that the host waits
            # only once.
            ends = torch.tensor([[offset, offset + _extent(view)] for view, _, offset in pairs], dtype=torch.int64)
            ends = ends.to(pairs[0][1].positions.device)
            searched = [torch.searchsorted(changes.positions, end) for (_, changes, _), end in zip(pairs, ends)]
            bounds = iter(torch.stack(searched).tolist())
        view_changes: list[ChangedElements | None] = []
        for view, by_region in zip(views, by_view):
            if by_region is None:
                view_changes.append(None)
                continue
            changes = joined_changes([_cut(changes, next(bounds), offset) for changes, offset in by_region])
            if not view.is_contiguous():
                changes = _in_view(changes, view)
            view_changes.append(changes)
        return view_changes

    def _changes_in(self, view: Tensor) -> list[tuple[ChangedElements, int]] | None:
        """The regions of a view as (changes of the region, index in the region of the view's first element).

        The result is None if the changes of the view are unknown.
        """
        numbers = self._regions_of(view)
        if not numbers or self._lost or not self.is_recording:
            return None
        by_region = []
        for number in numbers:
            region = self._regions[number]
            changes = region.all_changes()
            if changes is None or (region.of_another and number not in self._needed_regions):
                return None
            by_region.append((changes, (view.data_ptr() - self._addresses[number]) // view.element_size()))
        return by_region

    def _number_of(self, memory: Tensor) -> int:
        return bisect_right(self._addresses, memory.data_ptr()) - 1

    def _regions_of(self, view: Tensor) -> range:
        """Numbers of the regions that make up a view's memory. The range is empty where a part of the memory is in no
        region."""
        first = number = self._number_of(view)
        if number < 0 or not view.numel():
            return range(0)
        end = view.data_ptr() + _extent(view) * view.element_size()
        reached = self._addresses[first]
        # A distributed optimizer's shards of one parameter follow each other in memory without a gap.
        while number < len(self._regions) and self._addresses[number] == reached:
            region = self._regions[number]
            if region.dtype != view.dtype:
                break
            reached += region.elements * view.element_size()
            number += 1
            if end <= reached:
                return range(first, number)
        return range(0)


def joined_changes(chunks: Sequence[ChangedElements]) -> ChangedElements:
    """The changes of several chunks in the chunks' order; needs at least one chunk."""
    if len(chunks) == 1:
        return chunks[0]
    positions = torch.cat([changes.positions for changes in chunks])
    return ChangedElements(positions=positions, bits=torch.cat([changes.bits for changes in chunks]))


def _cut(changes: ChangedElements, bounds: Sequence[int], offset: int) -> ChangedElements:
    first, end = bounds
    return ChangedElements(positions=changes.positions[first:end] - offset, bits=changes.bits[first:end])


def _newest(changes: ChangedElements) -> ChangedElements:
    """The newest bits of each changed element, in rising order of position.

    changes: the changes of several steps, in the order of the steps.
    """
    positions, order = changes.positions.sort(stable=True)
    last = torch.cat((positions[1:] != positions[:-1], order.new_ones(1, dtype=torch.bool)))
    return ChangedElements(positions=positions[last], bits=changes.bits[order][last])


def _axes(view: Tensor) -> list[tuple[int, int, int]]:
    """For each axis with more than one element, (stride in memory, size, stride in row-major order).

    The axis with the widest stride in memory comes first.
    """
    axes = []
    inner = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride())):
        if size > 1:
            axes.append((stride, size, inner))
        inner *= size
    return sorted(axes, reverse=True)


def _extent(view: Tensor) -> int:
    """Number of elements of memory that a view spans, from the first element to the last."""
    return 1 + sum((size - 1) * stride for stride, size, _ in _axes(view))


def _nested(view: Tensor) -> bool:
    """Whether each axis steps over all inner axes. Each element of memory then has at most one index in the view."""
    reach = 1
    for stride, size, _ in reversed(_axes(view)):
        if stride < reach:
            return False
        reach = stride * size
    return True


def _in_view(changes: ChangedElements, view: Tensor) -> ChangedElements:
    """The changes inside a view, at positions in the view, out of the changes in the memory that the view spans."""
    remainders = changes.positions
    inside = torch.ones_like(remainders, dtype=torch.bool)
    positions = torch.zeros_like(remainders)
    axes = _axes(view)
    for stride, size, inner in axes:
        index = remainders.div(stride, rounding_mode="floor")
        inside &= index < size
        remainders = remainders - index * stride
        positions += index * inner
    inside &= remainders == 0
    positions = positions[inside]
    bits = changes.bits[inside]
    # In a transposed view, positions do not rise with addresses, so the changes are sorted by position.
    inner_strides = [inner for _, _, inner in axes]
    if inner_strides != sorted(inner_strides, reverse=True):
        positions, order = positions.sort()
        bits = bits[order]
    return ChangedElements(positions=positions, bits=bits)
