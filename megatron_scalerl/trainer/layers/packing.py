"""The layout of a packed row's sequences for attention; computed once per micro-batch, on the host.

The life of a layout: `PolicyModel.plan` asks for `packed_row` with the starts of the row's sequences;
`trainer.staging` copies its host tensors to the device; Megatron hands the row to every layer as packed_seq_params;
`layers.attention` reads the layout. Nothing here looks at a device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_scalerl.record import record
from megatron_scalerl.trainer.layers.context import Context, Share

SAME_BUCKET = 0.75
"""A sequence joins a bucket if the sequence has at least this share of the tokens of the bucket's longest sequence.

Measured on 48 sequences of 20 to 80 tokens: buckets are 1.35 times as fast as one padded block and 2.6 times as fast
as a loop over sequences; more than four buckets gain nothing."""

LONGEST_STEP = 64
"""Multiple (tokens) to which a row's longest length is rounded up for Transformer Engine, which chooses and plans
kernels anew for each longest length. Without a given length Transformer Engine computes and rounds one
(attention/dot_product_attention/dot_product_attention.py:2470 of 2.20.2)."""


@record
class Bucket:
    """Sequences of similar length, each padded to the length of the bucket's longest sequence."""

    sequences: int
    """Number of sequences."""
    length: int
    """Tokens of the longest sequence."""
    gather: Tensor
    """[sequences * length] index in the row of each slot's token; a padding slot has the sequence's last token."""
    valid: Tensor
    """[tokens] index of each slot that is not padding."""


@record
class Layout:
    """The padded buckets of one row's sequences, and the permutation that puts results back in row order."""

    buckets: tuple[Bucket, ...]
    restore: Tensor
    """[N] index of each token of the row in the concatenated valid slots of all buckets."""


@dataclass
class PackedRow(PackedSeqParams):
    """A packed row [1, N] for attention, which Megatron passes on as packed_seq_params.

    `qkv_format` is "thd" for Transformer Engine's attention, and "sbhd" for this package's attention. With "sbhd"
    Megatron treats the row as one sequence with rotary angles for each token.
    """

    position_ids: Tensor | None = None
    """[N] position of each token of this rank in the token's sequence."""
    longest: int = 0
    """Number of tokens of the longest sequence, and length of the table of rotary angles.

    `max_seqlen_q` may be larger. A table as long as the row would be read by Megatron's unfused RoPE as a table with
    one entry per token."""
    layout: Layout | None = None
    """The layout of whole sequences; None with Transformer Engine or `context`."""
    chunked: Layout | None = None
    """The layout of sequences that are split into chunks, for layers with chunked attention."""
    context: Context | None = None
    """This rank's attention under context parallelism; None with Transformer Engine, and where `layout` is set."""
    in_chunks: PackedRow | None = None
    """The row with sequences split into chunks, for chunked layers with Transformer Engine; None if none is split."""
    angles: Tensor | None = None
    """[n, 1, 1, d] rotary angles for latent attention. All other attention gets the angles from Megatron."""
    expert_choices: Tensor | None = None
    """[tokens of this rank, L, K] the K experts of each token in each of L layers, as the engine chose them."""


@record
class Plan:
    """How this rank computes one row. Produced by `trainer.model.PolicyModel.plan`."""

    share: Share
    """This rank's tokens of the row."""
    packed: PackedRow
    """The layout of the share for attention."""
    places: Tensor | None
    """[c] int64 positions of the tokens with loss in this rank's share, ascending; None: all positions."""


def layout(starts: list[int]) -> Layout:
    """Group the sequences of a row into buckets of similar length; empty sequences are left out.

    starts: [S+1] start of each sequence, from 0 to N.
    """
    spans = [(b - a, a) for a, b in pairwise(starts) if b > a]
    # The longest sequence comes first, so the first sequence of a bucket sets the bucket's width.
    spans.sort(key=lambda span: (-span[0], span[1]))
    groups: list[list[tuple[int, int]]] = []
    for span in spans:
        if groups and span[0] >= SAME_BUCKET * groups[-1][0][0]:
            groups[-1].append(span)
        else:
            groups.append([span])
    buckets = tuple(_bucket(group) for group in groups)
    order = torch.cat([bucket.gather[bucket.valid] for bucket in buckets])
    restore = torch.empty_like(order)
    restore[order] = torch.arange(order.numel())
    return Layout(buckets=buckets, restore=restore)


def _bucket(spans: list[tuple[int, int]]) -> Bucket:
    """Make the bucket of the sequences in `spans`: (length, start in the row) of each, the longest first."""
    length = spans[0][0]
    lengths = torch.tensor([span[0] for span in spans])[:, None]
    starts = torch.tensor([span[1] for span in spans])[:, None]
    offsets = torch.arange(length)[None, :]
    gather = starts + torch.minimum(offsets, lengths - 1)
    valid = (offsets < lengths).flatten().nonzero()[:, 0]
    return Bucket(sequences=len(spans), length=length, gather=gather.flatten(), valid=valid)


def split_into_chunks(starts: list[int], chunk: int) -> list[int]:
    """`starts` with each sequence split every `chunk` tokens, the boundaries of chunked attention."""
    out = [0]
    for a, b in pairwise(starts):
        out.extend(range(a + chunk, b, chunk))
        out.append(b)
    return out


def packed_row(
    starts: list[int],
    position_ids: Tensor,
    *,
    chunk: int | None = None,
    fused: bool = False,
    share: Share | None = None,
) -> PackedRow:
    """Lay out one row for attention.

    starts: S+1 starts of whole sequences. position_ids: [N] in host memory. chunk: tokens of a chunk of chunked
    attention. fused: True for Transformer Engine's attention. With context parallelism `share` is this rank's share
    of N tokens, and `starts` belong to the padded sequences. Raises ValueError for chunks with Transformer Engine's
    context parallelism.
    """
    longest = max((b - a for a, b in pairwise(starts)), default=0)
    ranks = 1
    if share is not None:
        ranks = share.size
    assert starts[0] == 0 and starts[-1] == position_ids.numel() * ranks, "`starts` has to run from 0 to the row end"
    # Chunks as long as the longest sequence, or longer, split nothing.
    inner = None
    if chunk is not None and chunk < longest:
        inner = chunk
    if fused and inner and ranks > 1:
        raise ValueError(
            f"attention_chunk_size: {chunk} is less than the longest sequence ({longest} tokens), which Transformer "
            "Engine does not support with context parallelism; leave out megatron.parallel.context_parallel_size"
        )
    if fused:
        # Transformer Engine splits each sequence into 2 x ranks chunks, so the longest length has to be divisible.
        step = math.lcm(LONGEST_STEP, 2 * ranks)
        row = _plain_row(starts, position_ids, -(-longest // step) * step, "thd")
        if inner:
            row.in_chunks = _plain_row(split_into_chunks(starts, inner), position_ids, inner, "thd")
    else:
        row = _plain_row(starts, position_ids, longest, "sbhd")
        if share is not None and ranks > 1:
            row.context = share.context(inner)
        else:
            row.layout = layout(starts)
            row.chunked = row.layout
            if inner:
                row.chunked = layout(split_into_chunks(starts, inner))
    row.longest = longest
    return row


def _plain_row(starts: list[int], position_ids: Tensor, longest: int, qkv_format: str) -> PackedRow:
    """A PackedRow with only the fields of Megatron's PackedSeqParams and `position_ids`."""
    # Transformer Engine and Megatron's RoPE read int32.
    boundaries = torch.tensor(starts, dtype=torch.int32)
    return PackedRow(
        qkv_format=qkv_format,
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        position_ids=position_ids,
    )
