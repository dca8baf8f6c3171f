"""A plain core attention for packed rows, for tests in the place of Transformer Engine's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class ReferenceVarlenAttention(torch.nn.Module):
    """Causal attention on each sequence between cu_seqlens, one after the other, in Megatron's "thd" format."""

    def __init__(self, **_: Any):
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[N, heads, d] queries, [N, groups, d] keys and values to [N, heads * d]."""
        row = packed_seq_params
        sizes = row.cu_seqlens_q.diff().tolist()
        assert max(sizes) <= row.max_seqlen_q and torch.equal(row.cu_seqlens_q, row.cu_seqlens_kv)
        out = []
        for parts in zip(*(x.split(sizes) for x in (query, key, value)), strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in parts)
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out.append(found[0].transpose(0, 1))
        return torch.cat(out).flatten(1)
