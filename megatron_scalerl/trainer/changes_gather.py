"""What the ranks of a distributed optimizer changed, in all of them.

Each data-parallel rank writes a shard of the parameters and gets those of the others whole. Here it learns what
changed in them, 12 bytes for each element that did, so that every rank can send changes of any part that it holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_scalerl.weights.changes import Found
from megatron_scalerl.weights.written import Written

_DENSE = -1
"""Instead of a number of changes: more than one in `MOST_CHANGED`."""


class ChangesGather:
    """The shards of one optimizer in the ranks of its group. The constructor and the calls are collective."""

    def __init__(self, written: Written, parameters: Sequence[Tensor], own: Sequence[Tensor], group: Any) -> None:
        """parameters: what the group shards, in one order on all ranks. own: this rank's shards, views of them."""
        self._written, self._group, self._own = written, group, list(own)
        self._device = parameters[0].device
        rows = torch.tensor(_places(own, parameters), dtype=torch.int64, device=self._device)
        every = self._gathered(rows.view(-1))
        self._others = [
            [] if rank == group.rank() else [parameters[n].view(-1)[a : a + size] for n, a, size in table.tolist()]
            for rank, table in enumerate(each.view(-1, 3) for each in every)
        ]
        for shard in (shard for shards in self._others for shard in shards):
            written.watch(shard)

    def __call__(self) -> None:
        """Tell the group what this rank's shards have, and add what the others have."""
        found = [self._written.of(shard) for shard in self._own]
        counts = [_DENSE if each is None else each.positions.numel() for each in found]
        known = [each for each in found if each is not None and each.positions.numel()]
        columns = [
            torch.cat([getattr(each, name) for each in known]) for name in ("positions", "old", "new") if known
        ]
        every_count = self._gathered(torch.tensor(counts, dtype=torch.int64, device=self._device))
        every = [self._gathered(column.view(torch.uint8)) for column in columns or [_nothing(self._device)] * 3]
        for rank, (shards, numbers) in enumerate(zip(self._others, every_count)):
            positions, old, new = (every[0][rank].view(torch.int64), *(each[rank] for each in every[1:]))
            at = 0
            for shard, number in zip(shards, numbers.tolist()):
                if number == _DENSE:
                    self._written.add(shard, 0, None)
                    continue
                bits = {2: torch.int16, 4: torch.int32}[shard.element_size()]
                here = slice(at, at + number)
                self._written.add(
                    shard,
                    0,
                    Found(positions=positions[here], old=old.view(bits)[here], new=new.view(bits)[here]),
                )
                at += number

    def _gathered(self, values: Tensor) -> list[Tensor]:
        """[ranks] 1-dimensional tensors of any lengths."""
        size = torch.tensor([values.numel()], dtype=torch.int64, device=values.device)
        sizes = [torch.zeros_like(size) for _ in range(self._group.size())]
        dist.all_gather(sizes, size, group=self._group)
        lengths = [int(each) for each in sizes]
        padded = values.new_zeros(max(*lengths, 1))
        padded[: values.numel()] = values
        found = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(found, padded, group=self._group)
        return [each[:length] for each, length in zip(found, lengths)]


def _nothing(device: torch.device) -> Tensor:
    return torch.zeros(0, dtype=torch.uint8, device=device)


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
