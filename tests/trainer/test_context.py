"""The share of a context-parallel rank: whole chunks of every sequence, in the order of Megatron's RoPE."""

from itertools import accumulate, pairwise

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

from megatron_scalerl.trainer.layers.context import PADDING, Span, share_of, spans
from megatron_scalerl.trainer.layers.packing import packed_row


def share(lengths, rank, size, divisor=1):
    starts = [0, *accumulate(lengths)]
    return share_of(starts, rank=rank, size=size, group=None, divisor=divisor)


def test_two_ranks_share_five_and_eight_tokens():
    """5 tokens are padded to 8; chunks of 2: rank 0 has the first and the last, rank 1 the middle."""
    first, second = (share([5, 8], rank, 2) for rank in range(2))
    assert first.starts == second.starts == [0, 8, 16]
    assert first.places.tolist() == [0, 1, -1, -1, 5, 6, 11, 12]
    assert second.places.tolist() == [2, 3, 4, -1, 7, 8, 9, 10]
    assert first.position_ids.tolist() == [0, 1, 6, 7, 0, 1, 6, 7]
    assert second.position_ids.tolist() == [2, 3, 4, 5, 2, 3, 4, 5]
    assert first.of_row(torch.arange(100, 113), fill=9).tolist() == [100, 101, 9, 9, 105, 106, 111, 112]


def test_without_context_parallelism_a_share_is_the_row():
    row = torch.arange(13)
    assert share([5, 8], 0, 1).of_row(row) is row
    filled = share([5, 8], 0, 1, divisor=4)
    assert filled.starts == [0, 5, 13, 16]
    assert filled.of_row(row).tolist() == [*range(13), 0, 0, 0]
    assert filled.position_ids.tolist() == [*range(5), *range(8), 0, 1, 2]


@pytest.mark.parametrize("size, divisor", [(2, 1), (2, 2), (4, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("lengths", [[7, 1, 30, 29, 12, 3], [64], [5, 0, 9]])
def test_ranks_hold_every_token_once_and_the_way_back(lengths, size, divisor):
    shares = [share(lengths, rank, size, divisor) for rank in range(size)]
    taken = torch.cat([s.places for s in shares])
    assert len({len(s.places) for s in shares}) == 1 and len(shares[0].places) % divisor == 0
    assert sorted(taken[taken != PADDING].tolist()) == list(range(sum(lengths)))
    assert torch.equal(taken[shares[0].back], torch.arange(sum(lengths)))
    assert all(b % (2 * size) == 0 for b in shares[0].starts)
    assert shares[0].starts[-1] < sum(lengths) + 2 * size * (len(lengths) + divisor)


@pytest.mark.parametrize("size", [2, 3])
def test_positions_are_those_that_megatron_rotates_by(size):
    angles = torch.arange(64)
    for rank in range(size):
        mine = share([7, 30, 12], rank, size)
        found = []
        for a, b in pairwise(mine.starts):
            local = torch.empty((b - a) // size)
            found.append(_get_thd_freqs_on_this_cp_rank(rank, size, local, angles))
        assert torch.cat(found).tolist() == mine.position_ids.tolist()


def test_queries_see_their_sequence_or_their_chunk_up_to_themselves():
    starts = [0, 8, 20]
    assert spans(starts, rank=0, size=2) == (
        Span(queries=2, start=0, keys=2),
        Span(queries=2, start=0, keys=8),
        Span(queries=3, start=8, keys=3),
        Span(queries=3, start=8, keys=12),
    )
    assert spans(starts, rank=1, size=2, chunk=5) == (
        Span(queries=2, start=0, keys=4),
        Span(queries=1, start=0, keys=5),  # the chunk's boundary lies inside the rank's tokens 4 and 5
        Span(queries=1, start=5, keys=1),
        Span(queries=2, start=8, keys=5),
        Span(queries=1, start=13, keys=1),
        Span(queries=3, start=13, keys=4),
    )


def test_transformer_engines_context_parallelism_refuses_chunks():
    mine = share([8, 20], 0, 2)
    with pytest.raises(ValueError, match=r"attention_chunk_size: 16 .* \(20 tokens\)"):
        packed_row(mine.starts, mine.position_ids, chunk=16, fused=True, share=mine)
    row = packed_row(mine.starts, mine.position_ids, chunk=32, fused=True, share=mine)
    assert row.cu_seqlens_q.tolist() == [0, 8, 28]
    assert (row.longest, row.max_seqlen_q, row.in_chunks) == (20, 64, None)
