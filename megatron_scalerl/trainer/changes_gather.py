"""Changed elements of the weights, shared between the ranks of a distributed optimizer.

Each data-parallel rank writes one shard of the parameters, and gets all elements of the other shards from its peers.
This module also tells the rank which elements of the other shards changed, at 6 bytes a change. The rank can then
send the changes of any parameters it holds.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_scalerl.weights.change_record import ChangeRecord, joined_changes
from megatron_scalerl.weights.changes import ChangedElements

WINDOW = 1 << 22
"""Largest number of changes, of all ranks together, that are gathered at once."""
_DENSE = -1
"""Sent as a shard's number of changes if there are more than `most_coded` allows; the changes are then not sent."""


class ChangesGather:
    """Exchanges the changed elements of one optimizer's shards among the ranks of the optimizer's group.

    The constructor and each call are collective.
    """

    def __init__(self, record: ChangeRecord, parameters: Sequence[Tensor], shards: Sequence[Tensor], group: Any):
        """Exchange which shards the ranks write.

        parameters: all parameters that the group shards, in the same order on all ranks. shards: this rank's parts,
        as views of the parameters.
        """
        assert all(shard.numel() < 1 << 31 for shard in shards), "a shard is too large for positions in int32"
        self._record = record
        self._group = group
        self._shards = list(shards)
        self._device = parameters[0].device
        rows = torch.tensor(_places(shards, parameters), dtype=torch.int64, device=self._device)
        self._shards_of_peers: list[list[Tensor]] = []
        for rank, table in enumerate(self._gathered(rows.view(-1))):
            rank_shards = []
            if rank != group.rank():
                rank_shards = [parameters[n].view(-1)[a : a + size] for n, a, size in table.view(-1, 3).tolist()]
            for shard in rank_shards:
                record.watch(shard, of_another=True)
            self._shards_of_peers.append(rank_shards)

    def __call__(self) -> None:
        """Send this rank's changes to the group, and record the peers' changes that this rank sends to engines."""
        sparse = []
        counts = []
        for change in self._record.changes_of(self._shards):
            if change is None:
                counts.append(_DENSE)
            else:
                counts.append(change.positions.numel())
                sparse.append(change)
        gathered = self._gathered(torch.tensor(counts, dtype=torch.int64, device=self._device))
        rank_counts = [counts_of_rank.tolist() for counts_of_rank in gathered]
        for shards, numbers in zip(self._shards_of_peers, rank_counts):
            for shard, number in zip(shards, numbers):
                if number == _DENSE:
                    self._record.add(shard, 0, None)
        longest = max(sum(number for number in numbers if number != _DENSE) for numbers in rank_counts)
        if not longest:
            return
        no_positions = torch.empty(0, dtype=torch.int64, device=self._device)
        own_changes = joined_changes(
            sparse or [ChangedElements(positions=no_positions, bits=no_positions.to(torch.int16))]
        )
        positions = own_changes.positions.to(torch.int32)
        # Changes are sent in windows, to bound the memory. The rank with the most changes sets how many windows.
        window = max(WINDOW // self._group.size(), 1)
        for begin in range(0, longest, window):
            end = min(begin + window, longest)
            rank_positions = self._window(positions[begin:end], end - begin)
            rank_bits = self._window(own_changes.bits[begin:end], end - begin)
            for rank, shards in enumerate(self._shards_of_peers):
                changes_of_rank = ChangedElements(positions=rank_positions[rank], bits=rank_bits[rank])
                self._take(shards, rank_counts[rank], begin, changes_of_rank)

    def _take(self, shards: Sequence[Tensor], numbers: Sequence[int], begin: int, window: ChangedElements) -> None:
        """Record the changes that this rank has to send, out of a window of one peer's changes.

        shards, numbers: the peer's shards, and the number of changes in each shard. begin: number of the window's
        first change among the changes of all shards of the peer.
        """
        end = begin + window.positions.numel()
        start = 0
        for shard, number in zip(shards, numbers):
            first = max(start, begin) - begin
            last = min(start + number, end) - begin
            start += max(number, 0)
            if first < last and self._record.needs(shard):
                positions = window.positions[first:last].to(torch.int64)
                self._record.add(shard, 0, ChangedElements(positions=positions, bits=window.bits[first:last].clone()))

    def _window(self, values: Tensor, size: int) -> list[Tensor]:
        """Gather the values of each rank, padded with zeros to `size`: one tensor for each rank of the group."""
        padded = values.new_zeros(size)
        padded[: values.numel()] = values
        # The values travel as bytes, because gloo and NCCL have no 16-bit integers.
        return [part.view(values.dtype) for part in self._of_all(padded.view(torch.uint8))]

    def _of_all(self, values: Tensor) -> list[Tensor]:
        received = [torch.empty_like(values) for _ in range(self._group.size())]
        dist.all_gather(received, values, group=self._group)
        return received

    def _gathered(self, values: Tensor) -> list[Tensor]:
        """Gather a 1-dimensional tensor from each rank of the group, in rank order. The lengths may differ."""
        size = torch.tensor([values.numel()], dtype=torch.int64, device=values.device)
        lengths = torch.cat(self._of_all(size)).tolist()
        padded = self._window(values, max(*lengths, 1))
        return [part[:length] for part, length in zip(padded, lengths)]


def _places(shards: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """For each shard: the number of its parameter, the shard's first element, and its number of elements."""
    order = sorted((parameter.data_ptr(), number) for number, parameter in enumerate(parameters))
    places = []
    for shard in shards:
        address, number = order[bisect_right(order, (shard.data_ptr(), len(order))) - 1]
        first = (shard.data_ptr() - address) // shard.element_size()
        assert first >= 0 and first + shard.numel() <= parameters[number].numel(), "a shard lies in no parameter"
        places.append((number, first, shard.numel()))
    return places
