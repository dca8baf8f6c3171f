"""Context parallelism: which tokens of a packed row a rank computes, and which keys its queries see.

The life of a row: `share_of` pads the row and divides the tokens among the ranks; `Share.of_row` takes a rank's
tokens; in every layer attention gathers keys by `Context.order` and computes the rank's `Span`s; `Share.whole_row`
gathers the results.

Every sequence is padded to a multiple of 2 x size tokens and split into 2 x size chunks; rank r computes chunks r and
2 x size - 1 - r, which balances causal attention. Megatron's RoPE for packed rows
(megatron/core/models/common/embeddings/rope_utils.py:140) and Transformer Engine's attention
(thd_get_partitioned_indices; read, not run) expect that order, and cu_seqlens of whole padded sequences.
"""

from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_scalerl.record import record

PADDING = -1
"""Stands in `Share.places` for a padding token, which has no index in the row."""


@record
class Span:
    """Consecutive queries of a rank's share, and the consecutive keys that the last of the queries sees."""

    queries: int
    start: int
    """Index of the first key in the padded row."""
    keys: int


@record
class Context:
    """The inputs of context-parallel attention besides the queries, keys and values of a rank."""

    group: Any
    """The context-parallel process group."""
    order: Tensor
    """[M] index of each token of the padded row in the concatenated shares of all ranks."""
    spans: tuple[Span, ...]
    """Spans that together have all queries of this rank, in the order of the share."""
    chunked: tuple[Span, ...]
    """The spans for layers with chunked attention, where a query sees only keys of the query's chunk."""


@record
class Share:
    """The n tokens of a packed row that one context-parallel rank computes.

    The row has N tokens, and M tokens after its sequences are padded.
    """

    starts: list[int]
    """[S+1] starts of the padded sequences, including a sequence of padding at the end; the last start is M."""
    rank: int
    size: int
    group: Any
    length: int
    """N, the number of tokens of the row before padding."""
    places: Tensor | None = None
    """[n] index of each token in the row before padding, or PADDING. None: the share is the whole row, unpadded."""
    position_ids: Tensor | None = None
    """[n] position of each token in its sequence. None if `places` is None."""
    order: Tensor | None = None
    """[M] index of each token of the padded row in the concatenated shares of all ranks. None if `places` is None."""
    back: Tensor | None = None
    """[N] index of each token, in row order, in the concatenated shares of all ranks. None if `places` is None."""

    def of_row(self, values: Tensor, fill: int = 0) -> Tensor:
        """Select this rank's values [n, ...] from the row's values [N, ...]; padding tokens get `fill`."""
        if self.places is None:
            return values
        share_values = values.index_select(0, self.places.clamp(min=0))
        padding = (self.places == PADDING).view(-1, *[1] * (values.dim() - 1))
        return share_values.masked_fill(padding, fill)

    def whole_row(self, values: Tensor) -> Tensor:
        """Gather the values [N, ...] of the whole row on every rank, from the values [n, ...] of each rank's share.

        The gradient of a rank's part comes from the rank's own result, not from a sum over ranks: every rank computes
        the same results from the whole row.
        """
        if self.back is None:
            return values
        gathered = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self.group)
        return gathered.index_select(0, self.back)

    def context(self, chunk: int | None) -> Context:
        """The `Context` of this rank, with chunks of `chunk` tokens for layers with chunked attention."""
        assert self.order is not None
        row_spans = spans(self.starts, rank=self.rank, size=self.size)
        chunk_spans = spans(self.starts, rank=self.rank, size=self.size, chunk=chunk)
        return Context(group=self.group, order=self.order, spans=row_spans, chunked=chunk_spans)


def share_of(starts: list[int], *, rank: int, size: int, group: Any, divisor: int) -> Share:
    """The share of context-parallel rank `rank` of `size` in a row with sequence starts `starts` ([S+1]).

    The share's tensors are in host memory. Every rank's share has the same number of tokens, a multiple of `divisor`:
    the tensor-parallel size under sequence parallelism. The row grows by less than 2 x size tokens per sequence, and
    by a sequence of padding at the end, which is the only padding without context parallelism.
    """
    lengths = [b - a for a, b in pairwise(starts)]
    padded, filler = _padded(lengths, size=size, divisor=divisor)
    if padded == lengths and not filler and size == 1:
        return Share(starts=starts, rank=rank, size=size, group=group, length=starts[-1])
    # `filler` is the length of an additional sequence, of padding alone, at the end of the row.
    if filler:
        lengths.append(0)
        padded.append(filler)
    ends = [0, *accumulate(padded)]
    places = torch.full((ends[-1],), PADDING)
    positions = torch.cat([torch.arange(length) for length in padded])
    row_places = torch.cat([torch.arange(a, a + n) for a, n in zip(ends, lengths)])
    places[row_places] = torch.arange(starts[-1])
    rank_places = [_tokens(ends, rank=r, size=size) for r in range(size)]
    order = torch.empty_like(places)
    order[torch.cat(rank_places)] = torch.arange(ends[-1])
    return Share(
        starts=ends,
        rank=rank,
        size=size,
        group=group,
        length=starts[-1],
        places=places[rank_places[rank]],
        position_ids=positions[rank_places[rank]],
        order=order,
        back=order[row_places],
    )


def share_length(starts: list[int], *, size: int, divisor: int) -> int:
    """Number of tokens in each rank's share: the n of `Share`."""
    padded, filler = _padded([b - a for a, b in pairwise(starts)], size=size, divisor=divisor)
    return (sum(padded) + filler) // size


def _padded(lengths: list[int], *, size: int, divisor: int) -> tuple[list[int], int]:
    """Returns (length of each sequence with padding, length of a further sequence, of padding alone, at the end)."""
    # A sequence is split into two chunks for each rank. Without context parallelism only the sum is padded.
    multiple = 1
    if size > 1:
        multiple = 2 * size
    padded = [-(-length // multiple) * multiple for length in lengths]
    return padded, -sum(padded) % (multiple * divisor)


def _tokens(starts: list[int], *, rank: int, size: int) -> Tensor:
    """[n] index of each of a rank's tokens in the padded row."""
    if size == 1:
        return torch.arange(starts[-1])
    parts = []
    for a, b in pairwise(starts):
        chunk = (b - a) // (2 * size)
        parts += [torch.arange(a + j * chunk, a + (j + 1) * chunk) for j in (rank, 2 * size - 1 - rank)]
    return torch.cat(parts)


def spans(starts: list[int], *, rank: int, size: int, chunk: int | None = None) -> tuple[Span, ...]:
    """Spans of a rank's queries: a query sees the keys of its sequence, or chunk, up to the query's own position."""
    pieces = []
    for a, b in pairwise(starts):
        part = (b - a) // (2 * size)
        reach = chunk or max(b - a, 1)
        # A rank has one early and one late chunk, which together cost the same attention on all ranks.
        for j in (rank, 2 * size - 1 - rank):
            query = j * part
            end = query + part
            # A rank's chunk may cross boundaries of chunked attention (`chunk`), and is cut there.
            while query < end:
                first = query // reach * reach
                stop = min(end, first + reach)
                pieces.append(Span(queries=stop - query, start=a + first, keys=stop - first))
                query = stop
    return tuple(pieces)
