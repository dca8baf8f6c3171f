"""Packed attention equals attention on each sequence alone; buckets cover every token once."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_scalerl.trainer.layers.attention import SdpaCoreAttention
from megatron_scalerl.trainer.layers.packing import SAME_BUCKET, layout, packed_row, split_into_chunks

LENGTHS = [
    pytest.param([7, 1, 30, 29, 12, 3], id="mixed"),
    pytest.param([64], id="one"),
    pytest.param([1, 1, 1], id="single tokens"),
    pytest.param([5, 0, 9], id="an empty sequence"),
]


def starts_of(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def row_of(lengths, chunk=None):
    positions = torch.cat([torch.arange(n) for n in lengths])
    return packed_row(starts_of(lengths), positions, chunk=chunk)


def attention(**options):
    config = SimpleNamespace(attention_dropout=0.0, context_parallel_size=1)
    return SdpaCoreAttention(config, 1, None, "self", **options)


def qkv(tokens, heads=6, groups=2, d=8):
    generator = torch.Generator().manual_seed(5)
    shapes = ((tokens, 1, heads, d), (tokens, 1, groups, d), (tokens, 1, groups, d))
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def alone(q, k, v, starts):
    """Softmax attention written out, one sequence and one head at a time."""
    repeat = q.shape[2] // k.shape[2]
    parts = []
    for a, b in pairwise(starts):
        mask = torch.full((b - a, b - a), float("-inf"), dtype=q.dtype).triu(1)
        heads = []
        for head in range(q.shape[2]):
            scores = q[a:b, 0, head] @ k[a:b, 0, head // repeat].t() / q.shape[3] ** 0.5 + mask
            heads.append(F.softmax(scores, -1) @ v[a:b, 0, head // repeat])
        parts.append(torch.cat(heads, dim=1))
    return torch.cat(parts)[:, None]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("chunk", [None, 8])
def test_packed_attention_is_attention_on_each_sequence(lengths, chunk):
    tensors = qkv(sum(lengths))
    starts = starts_of(lengths)
    pieces = starts if chunk is None else split_into_chunks(starts, chunk)
    found = attention(chunked=chunk is not None)(*tensors, None, packed_seq_params=row_of(lengths, chunk))
    expected = alone(*tensors, pieces)
    assert found.shape == (sum(lengths), 1, 48)
    assert (found - expected).abs().max() < 1e-12
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    grads = torch.autograd.grad((found * weights).sum(), tensors)
    for grad, reference in zip(grads, torch.autograd.grad((expected * weights).sum(), tensors)):
        assert (grad - reference).abs().max() < 1e-12


def test_a_plain_batch_is_attention_on_each_row():
    """[s, b] without a packed row: two sequences side by side."""
    q, k, v = (torch.stack(x[:, 0].detach().split(10), dim=1) for x in qkv(20))
    found = attention()(q, k, v, None)
    for b in range(2):
        expected = alone(q[:, b : b + 1], k[:, b : b + 1], v[:, b : b + 1], [0, 10])
        assert (found[:, b : b + 1] - expected).abs().max() < 1e-12


def test_the_query_scale_of_a_position_multiplies_its_query():
    q, k, v = qkv(9)
    scaled = attention(query_scale=lambda positions: 1.0 + positions.double())
    found = scaled(q, k, v, None, packed_seq_params=row_of([4, 5]))
    factors = torch.tensor([1.0, 2, 3, 4, 1, 2, 3, 4, 5], dtype=torch.float64)[:, None, None, None]
    assert (found - alone(q * factors, k, v, [0, 4, 9])).abs().max() < 1e-12


@pytest.mark.parametrize("lengths", LENGTHS)
def test_buckets_hold_every_token_once_and_little_padding(lengths):
    found = layout(starts_of(lengths))
    tokens = torch.cat([bucket.gather[bucket.valid] for bucket in found.buckets])
    assert torch.equal(tokens[found.restore], torch.arange(sum(lengths)))
    slots = sum(bucket.sequences * bucket.length for bucket in found.buckets)
    assert slots <= sum(lengths) / SAME_BUCKET


def test_chunks_restart_in_every_sequence():
    assert split_into_chunks([0, 10, 14, 22], 4) == [0, 4, 8, 10, 14, 18, 22]
    whole = row_of([10, 4, 8], chunk=16)
    assert whole.chunked is whole.layout


def test_dropout_is_refused():
    config = SimpleNamespace(attention_dropout=0.1, context_parallel_size=1)
    with pytest.raises(ValueError, match="attention_dropout"):
        SdpaCoreAttention(config, 1, None, "self")


def test_rotation_keeps_the_boundaries_of_whole_sequences():
    row = packed_row([0, 5, 25], torch.cat([torch.arange(5), torch.arange(20)]), chunk=8, fused=True)
    assert row.cu_seqlens_q.tolist() == [0, 5, 25] and (row.longest, row.max_seqlen_q) == (20, 64)
    assert row.in_chunks.cu_seqlens_q.tolist() == row.in_chunks.cu_seqlens_kv.tolist() == [0, 5, 13, 21, 25]
    assert row.in_chunks.max_seqlen_q == row.in_chunks.max_seqlen_kv == 8
