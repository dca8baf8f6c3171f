"""Packed rows of random queries, keys and values, and an attention for them."""

from types import SimpleNamespace

import torch

from megatron_scalerl.trainer.layers.attention import SdpaCoreAttention
from megatron_scalerl.trainer.layers.packing import packed_row


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
