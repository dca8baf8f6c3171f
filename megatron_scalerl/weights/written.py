"""What optimizer steps wrote into the weights: the changed elements of each shard, by their place in memory.

`trainer.weight_changes` finds them where Megatron rounds fp32 main weights into the policy's parameters. A weight
update asks for those of a part, which is a view of a parameter: nothing is compared again, and no copy of what the
engines have is kept.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_scalerl.weights.changes import SMALL, Found, bits_of, most_coded


@dataclass(slots=True)
class _Shard:
    """Contiguous memory that an optimizer writes."""

    elements: int
    dtype: torch.dtype
    device: torch.device
    of_another: bool
    """Another rank writes it, and tells what it changed; kept only where this rank's updates ask for it."""
    changed: int = 0
    found: list[tuple[int, Found]] = field(default_factory=list)
    """(step, changes), in order; empty where more than one in MOST_CHANGED changed."""

    def joined(self) -> Found | None:
        """The changes of all steps, None where more than one in MOST_CHANGED changed."""
        if self.changed > most_coded(self.elements):
            return None
        if not self.found:
            none = torch.empty(0, dtype=torch.int64, device=self.device)
            return Found(positions=none, bits=bits_of(none.to(self.dtype)))
        last, _ = self.found[-1]
        changes = joined([found for _, found in self.found])
        if any(step != last for step, _ in self.found):
            changes = _newest(changes)
        self.found = [(last, changes)]
        return changes


class Written:
    """The elements of this rank's parameters that changed since the last update."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether changes are recorded, because an update will ask for them; see `want`."""
        self._addresses: list[int] = []  # of shards, rising
        self._shards: list[_Shard] = []
        self._needed: set[int] = set()  # numbers of shards that this rank's updates read
        self._step = 0
        self._lost = False
        self.gathers: list[Callable[[], None]] = []
        """What all ranks call at once before an update: each adds what others wrote into parameters of this one."""

    def want(self, wanted: bool, views: Iterable[Tensor] = ()) -> None:
        """Begin to record, or end it. views: what this rank's updates will ask for; what other ranks change
        elsewhere is not kept."""
        if wanted and not self.wanted:
            self.lose()  # steps were made without a record
        self.wanted = wanted
        self._needed = {number for view in views for number in self._shards_of(view)}

    def needs(self, shard: Tensor) -> bool:
        """Whether an update of this rank will ask for elements of this shard."""
        return self._number_of(shard) in self._needed

    def watch(self, shard: Tensor, *, of_another: bool = False) -> None:
        """Every later change of this shard will be added. shard: contiguous. of_another: by `gather`."""
        if not shard.numel():
            return
        at = bisect_right(self._addresses, shard.data_ptr())
        self._addresses.insert(at, shard.data_ptr())
        self._shards.insert(at, _Shard(shard.numel(), shard.dtype, shard.device, of_another))

    def gather(self) -> None:
        """Add what other ranks wrote; before an update. Collective."""
        if self.wanted and self._step and not self._lost:
            for gather in self.gathers:
                gather()

    def begin_step(self) -> None:
        """An optimizer is about to write."""
        self._step += 1

    def add(self, shard: Tensor, first: int, found: Found | None) -> None:
        """What changed in a piece of a shard that begins at element `first`; pieces come in order.

        None: more than one in MOST_CHANGED of the shard.
        """
        held = self._shards[self._number_of(shard)]
        held.changed += held.elements + SMALL if found is None else found.positions.numel()
        if found is None or held.changed > most_coded(held.elements):
            held.found = []
        elif found.positions.numel():
            positions = found.positions + first if first else found.positions
            held.found.append((self._step, Found(positions=positions, bits=found.bits)))

    def lose(self) -> None:
        """Something else wrote the weights, such as a checkpoint: nothing is known until `forget`."""
        self._lost = True
        self._drop()

    def forget(self) -> None:
        """An update has sent all that there is."""
        self._step, self._lost = 0, False
        self._drop()

    def _drop(self) -> None:
        for shard in self._shards:
            shard.changed, shard.found = 0, []

    def covers(self, view: Tensor) -> bool:
        """Whether changes of all elements of a view are recorded."""
        return bool(self._shards_of(view)) and _nested(view)

    def of(self, views: Sequence[Tensor]) -> list[Found | None]:
        """The changes of views that are covered, by position in row-major order of each, since the last update.

        None where more than one in MOST_CHANGED of a shard changed, in all steps together, after `lose`, and where
        changes are not wanted, or not those of another rank's shard.
        """
        shards = [self._found_in(view) for view in views]
        each = [(view, *one) for view, of_view in zip(views, shards) if of_view for one in of_view]
        bounds: Iterator[list[int]] = iter(())
        if each:  # all in one read of a device
            ends = torch.tensor([[offset, offset + _extent(view)] for view, _, offset in each], dtype=torch.int64)
            places = ends.to(each[0][1].positions.device)
            at = [torch.searchsorted(found.positions, place) for (_, found, _), place in zip(each, places)]
            bounds = iter(torch.stack(at).tolist())
        parts: list[Found | None] = []
        for view, of_view in zip(views, shards):
            if of_view is None:
                parts.append(None)
                continue
            part = joined([_cut(found, next(bounds), offset) for found, offset in of_view])
            parts.append(part if view.is_contiguous() else _in_view(part, view))
        return parts

    def _found_in(self, view: Tensor) -> list[tuple[Found, int]] | None:
        """(changes of a shard, where the view begins in it) of the shards that make up a view."""
        numbers = self._shards_of(view)
        if not numbers or self._lost or not self.wanted:
            return None
        pieces = []
        for number in numbers:
            shard = self._shards[number]
            found = shard.joined()
            if found is None or (shard.of_another and number not in self._needed):
                return None
            pieces.append((found, (view.data_ptr() - self._addresses[number]) // view.element_size()))
        return pieces

    def _number_of(self, shard: Tensor) -> int:
        return bisect_right(self._addresses, shard.data_ptr()) - 1

    def _shards_of(self, view: Tensor) -> range:
        """Numbers of the shards that make up a view's memory, empty where others do, too."""
        first = number = self._number_of(view)
        if number < 0 or not view.numel():
            return range(0)
        end = view.data_ptr() + _extent(view) * view.element_size()
        reached = self._addresses[first]
        while number < len(self._shards) and self._addresses[number] == reached:
            shard = self._shards[number]
            if shard.dtype != view.dtype:
                break
            reached += shard.elements * view.element_size()
            number += 1
            if end <= reached:
                return range(first, number)
        return range(0)


def joined(pieces: Sequence[Found]) -> Found:
    """One after the other; at least one."""
    if len(pieces) == 1:
        return pieces[0]
    positions = torch.cat([piece.positions for piece in pieces])
    return Found(positions=positions, bits=torch.cat([piece.bits for piece in pieces]))


def _cut(found: Found, bounds: Sequence[int], offset: int) -> Found:
    first, end = bounds
    return Found(positions=found.positions[first:end] - offset, bits=found.bits[first:end])


def _newest(found: Found) -> Found:
    """The changes of several steps, one after the other, in order: the last bits of each element."""
    positions, order = found.positions.sort(stable=True)
    last = torch.cat((positions[1:] != positions[:-1], order.new_ones(1, dtype=torch.bool)))
    return Found(positions=positions[last], bits=found.bits[order][last])


def _axes(view: Tensor) -> list[tuple[int, int, int]]:
    """(stride in memory, size, stride in row-major order) of the axes with several elements, the widest first."""
    axes, inner = [], 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride())):
        if size > 1:
            axes.append((stride, size, inner))
        inner *= size
    return sorted(axes, reverse=True)


def _extent(view: Tensor) -> int:
    """Elements of memory from the first of a view to its last."""
    return 1 + sum((size - 1) * stride for stride, size, _ in _axes(view))


def _nested(view: Tensor) -> bool:
    """Whether each axis steps over all of those within it, so that a place in memory has one index."""
    reach = 1
    for stride, size, _ in reversed(_axes(view)):
        if stride < reach:
            return False
        reach = stride * size
    return True


def _in_view(found: Found, view: Tensor) -> Found:
    """Those of a range of memory that are in a view, by position in it."""
    rest, inside = found.positions, torch.ones_like(found.positions, dtype=torch.bool)
    places, rising, before = torch.zeros_like(rest), True, 1 << 62
    for stride, size, inner in _axes(view):
        index = rest.div(stride, rounding_mode="floor")
        inside &= index < size
        rest = rest - index * stride
        places += index * inner
        rising, before = rising and inner < before, inner
    inside &= rest == 0
    places, bits = places[inside], found.bits[inside]
    if not rising:  # transposed
        places, order = places.sort()
        bits = bits[order]
    return Found(positions=places, bits=bits)
