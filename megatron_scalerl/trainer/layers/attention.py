"""Causal self-attention by PyTorch's scaled_dot_product_attention, on packed rows and on plain batches.

Also Llama 4's chunks and query scale around Transformer Engine's attention.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_scalerl.trainer.layers.context import Context, Span
from megatron_scalerl.trainer.layers.packing import Layout, PackedRow


def with_bias(linear: type) -> type:
    """The linear layer with a bias; Megatron's attention output has one only if every other layer has."""

    class WithBias(linear):  # type: ignore[misc]
        def __init__(self, *args: Any, bias: bool = False, **keywords: Any):
            super().__init__(*args, bias=True, **keywords)

    return WithBias


def with_chunks(core: type, *, chunked: bool, query_scale: Any) -> type:
    """A core attention for packed rows in Megatron's "thd" format, extended by the features of Llama-4 layers.

    `chunked`: the row's chunks are separate sequences for it (queries and keys are already rotated by their positions
    in the whole sequences). `query_scale` maps positions [N] to a factor on the queries [N, heads, d]. Written for
    Transformer Engine's class as Megatron-Core 0.16.1 wraps it, and not run with it.
    """

    class WithChunks(core):  # type: ignore[misc]
        def forward(
            self,
            query: Tensor,
            *others: Any,
            packed_seq_params: PackedRow | None = None,
            **keywords: Any,
        ) -> Tensor:
            """[N, heads, d] queries and the other arguments of `core`."""
            assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
            if query_scale is not None:
                scale = query_scale(packed_seq_params.position_ids)
                query = query * scale.to(query.dtype)[:, None, None]
            row = packed_seq_params.in_chunks if chunked else None
            return super().forward(query, *others, packed_seq_params=row or packed_seq_params, **keywords)

    return WithChunks


class SdpaCoreAttention(torch.nn.Module):
    """Core attention for Megatron's SelfAttention; grouped queries, no attention bias, no dropout.

    A packed row is one sequence [N, 1, heads, d] with a `PackedRow`: its sequences are gathered into a few padded
    buckets, attended causally, and scattered back, so tokens never see another sequence. Without a `PackedRow` the
    input is a plain batch [s, b, heads, d]. With context parallelism N are this rank's tokens (`layers.context`): it
    gathers the keys and values of all ranks, and attends with its own queries. `chunked` layers (Llama 4) attend
    inside chunks of the sequence; `query_scale` (Llama 4's layers without RoPE) maps positions [N] to a factor on the
    queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        chunked: bool = False,
        query_scale: Any = None,
        **_: Any,
    ):
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(
                f"megatron.model.attention_dropout: {dropout} is not possible with the plain layers; set it to 0"
            )
        self.layer_number = layer_number
        self.context_size = config.context_parallel_size
        self.softmax_scale = softmax_scale
        self.chunked = chunked
        self.query_scale = query_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:
        """[s, b, heads, d] queries, [s, b, groups, d] keys and values to [s, b, heads * d]."""
        assert attention_bias is None
        s, b, heads, d = query.shape
        split = packed_seq_params is not None and packed_seq_params.context is not None
        assert split == (self.context_size > 1), "context parallelism splits packed rows only"
        if packed_seq_params is None:
            out = self._attend(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3))
            return out.permute(2, 0, 1, 3).reshape(s, b, heads * d)
        assert b == 1
        if self.query_scale is not None:
            scale = self.query_scale(packed_seq_params.position_ids)
            query = query * scale.to(query.dtype)[:, None, None, None]
        q, k, v, context = query[:, 0], key[:, 0], value[:, 0], packed_seq_params.context
        if context is not None:
            return self._shared(q, k, v, context).reshape(s, 1, heads * d)
        layout = packed_seq_params.chunked if self.chunked else packed_seq_params.layout
        assert layout is not None, "this row has the layout of Transformer Engine"
        return self._packed(q, k, v, layout).reshape(s, 1, heads * d)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
        outputs = []
        for bucket in layout.buckets:
            shape = (bucket.sequences, bucket.length)
            q, k, v = (
                x.index_select(0, bucket.gather).view(*shape, *x.shape[1:]).transpose(1, 2)
                for x in (query, key, value)
            )
            out = self._attend(q, k, v).transpose(1, 2).reshape(-1, *query.shape[1:])
            outputs.append(out if bucket.valid.numel() == out.shape[0] else out.index_select(0, bucket.valid))
        return torch.cat(outputs).index_select(0, layout.restore)

    def _shared(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """[n, heads, d] of this rank's tokens; the gradients of keys and values are summed over the ranks."""
        gathered = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=context.group)
        keys, values = gathered.index_select(0, context.order).split([key.shape[-1], value.shape[-1]], dim=-1)
        spans = context.chunked if self.chunked else context.spans
        parts = query.split([span.queries for span in spans])
        return torch.cat([self._span(part, keys, values, span) for part, span in zip(parts, spans)])

    def _span(self, query: Tensor, keys: Tensor, values: Tensor, span: Span) -> Tensor:
        seen = slice(span.start, span.start + span.keys)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, keys[seen], values[seen]))
        mask = torch.ones((span.queries, span.keys), dtype=torch.bool, device=query.device)
        mask = mask.tril(span.keys - span.queries)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )
