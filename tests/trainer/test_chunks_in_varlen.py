"""Llama 4's chunks and query scale around an attention that knows neither: equal to ours, alone and in the model."""

from functools import partial

import pytest
import torch
from packed_rows import attention, qkv, row_of, starts_of
from varlen_reference import ReferenceVarlenAttention

from megatron_scalerl.models.llama4 import attention_temperature
from megatron_scalerl.trainer.layers.attention import with_chunks
from megatron_scalerl.trainer.layers.packing import packed_row

LENGTHS = [7, 1, 30, 16, 12, 33]
TEMPERATURE = partial(attention_temperature, floor_scale=8.0, attn_scale=0.1)


@pytest.mark.parametrize(
    ("chunked", "query_scale"), [(True, None), (False, TEMPERATURE), (False, None)], ids=["chunks", "scale", "plain"]
)
def test_it_is_our_attention_on_the_same_row(chunked, query_scale):
    tensors = qkv(sum(LENGTHS))
    ours = attention(chunked=chunked, query_scale=query_scale)
    expected = ours(*tensors, None, packed_seq_params=row_of(LENGTHS, 16))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    row = packed_row(starts_of(LENGTHS), positions, chunk=16, fused=True)
    wrapped = with_chunks(ReferenceVarlenAttention, chunked=chunked, query_scale=query_scale)()
    found = wrapped(*(x[:, 0] for x in tensors), None, packed_seq_params=row)[:, None]
    assert (found - expected).abs().max() < 1e-12
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    grads = torch.autograd.grad((found * weights).sum(), tensors)
    for grad, reference in zip(grads, torch.autograd.grad((expected * weights).sum(), tensors)):
        assert (grad - reference).abs().max() < 1e-12


def test_rotation_keeps_the_boundaries_of_whole_sequences():
    row = packed_row([0, 5, 25], torch.cat([torch.arange(5), torch.arange(20)]), chunk=8, fused=True)
    assert row.cu_seqlens_q.tolist() == [0, 5, 25] and (row.longest, row.max_seqlen_q) == (20, 64)
    assert row.in_chunks.cu_seqlens_q.tolist() == row.in_chunks.cu_seqlens_kv.tolist() == [0, 5, 13, 21, 25]
    assert row.in_chunks.max_seqlen_q == row.in_chunks.max_seqlen_kv == 8
