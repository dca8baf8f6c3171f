"""What the ranks of a distributed optimizer changed, in all of them.

Each data-parallel rank writes a shard of the parameters and gets those of the others whole. Here it learns what
changed in them, from 6 bytes for each element that did, so that it can send changes of any part that it holds.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_scalerl.weights.changes import Found
from megatron_scalerl.weights.written import Written, joined

WINDOW = 1 << 22
"""Changes that are gathered at once, of all ranks together."""
_DENSE = -1
"""Instead of a number of changes: more than one in `MOST_CHANGED`."""


class ChangesGather:
    """The shards of one optimizer in the ranks of its group. The constructor and the calls are collective."""

    def __init__(self, written: Written, parameters: Sequence[Tensor], own: Sequence[Tensor], group: Any):
        """parameters: what the group shards, in one order on all ranks. own: this rank's shards, views of them."""
        assert all(shard.numel() < 1 << 31 for shard in own), "positions are gathered as int32"
        self._written, self._group, self._own = written, group, list(own)
        self._device = parameters[0].device
        rows = torch.tensor(_places(own, parameters), dtype=torch.int64, device=self._device)
        every = self._gathered(rows.view(-1))
        self._others = [
            [] if rank == group.rank() else [parameters[n].view(-1)[a : a + size] for n, a, size in table.tolist()]
            for rank, table in enumerate(each.view(-1, 3) for each in every)
        ]
        for shard in (shard for shards in self._others for shard in shards):
            written.watch(shard, of_another=True)

    def __call__(self) -> None:
        """Tell the group what this rank's shards have, and add what the others have of those that are needed here."""
        found = self._written.of(self._own)
        counts = torch.tensor([_DENSE if each is None else each.positions.numel() for each in found])
        every_count = [each.tolist() for each in self._gathered(counts.to(self._device, torch.int64))]
        for shards, numbers in zip(self._others, every_count):
            for shard, number in zip(shards, numbers):
                if number == _DENSE:
                    self._written.add(shard, 0, None)
        longest = max(sum(number for number in numbers if number != _DENSE) for numbers in every_count)
        if not longest:
            return
        mine = joined([each for each in found if each is not None] or [_nothing(self._device)])
        columns = mine.positions.to(torch.int32), mine.bits
        window = max(WINDOW // self._group.size(), 1)
        for begin in range(0, longest, window):
            end = min(begin + window, longest)
            every = zip(*(self._window(column[begin:end], end - begin) for column in columns))
            for shards, numbers, (positions, bits) in zip(self._others, every_count, every):
                self._take(shards, numbers, begin, Found(positions=positions, bits=bits))

    def _take(self, shards: Sequence[Tensor], numbers: Sequence[int], begin: int, window: Found) -> None:
        """Add what a window has of a rank's changes, which begins with its change number `begin`."""
        at, end = 0, begin + window.positions.numel()
        for shard, number in zip(shards, numbers):
            first, last = max(at, begin) - begin, min(at + number, end) - begin
            at += max(number, 0)
            if first < last and self._written.needs(shard):
                positions = window.positions[first:last].to(torch.int64)
                self._written.add(shard, 0, Found(positions=positions, bits=window.bits[first:last].clone()))

    def _window(self, values: Tensor, size: int) -> list[Tensor]:
        """[ranks][size] of [at most size] values."""
        padded = values.new_zeros(size)
        padded[: values.numel()] = values
        of_bytes = padded.view(torch.uint8)
        found = [torch.empty_like(of_bytes) for _ in range(self._group.size())]
        dist.all_gather(found, of_bytes, group=self._group)
        return [each.view(values.dtype) for each in found]

    def _gathered(self, values: Tensor) -> list[Tensor]:
        """[ranks] 1-dimensional tensors of any lengths."""
        size = torch.tensor([values.numel()], dtype=torch.int64, device=values.device)
        sizes = [torch.zeros_like(size) for _ in range(self._group.size())]
        dist.all_gather(sizes, size, group=self._group)
        lengths = torch.cat(sizes).tolist()
        return [each[:length] for each, length in zip(self._window(values, max(*lengths, 1)), lengths)]


def _nothing(device: torch.device) -> Found:
    none = torch.empty(0, dtype=torch.int64, device=device)
    return Found(positions=none, bits=none.to(torch.int16))


def _places(shards: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """(number of the parameter, first element, elements) of each shard, a view of it."""
    order = sorted((parameter.data_ptr(), number) for number, parameter in enumerate(parameters))
    found = []
    for shard in shards:
        address, number = order[bisect_right(order, (shard.data_ptr(), len(order))) - 1]
        first = (shard.data_ptr() - address) // shard.element_size()
        assert first >= 0 and first + shard.numel() <= parameters[number].numel(), "not a view of a parameter"
        found.append((number, first, shard.numel()))
    return found
