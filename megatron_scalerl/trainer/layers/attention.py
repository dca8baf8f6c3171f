"""Causal self-attention by PyTorch's scaled_dot_product_attention, on packed rows and on plain batches.

The life of a packed row in a layer: Megatron's SelfAttention projects and rotates queries and keys, and then calls
the core attention with the row's `PackedRow`. Without Transformer Engine the core attention is `SdpaCoreAttention`.
It gathers the sequences of each bucket into a padded block, attends causally, and puts the results back in row order.
Under context parallelism it gathers the keys of all ranks instead. Transformer Engine's own attention reads
cu_seqlens, and `with_chunks` adds the chunks and the query scale of Llama 4.
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
    """The linear layer class `linear`, but always with a bias.

    Megatron's own option would give every linear layer a bias, not the attention's output projection alone.
    """

    class WithBias(linear):  # type: ignore[misc]
        def __init__(self, *args: Any, bias: bool = False, **keywords: Any):
            super().__init__(*args, bias=True, **keywords)

    return WithBias


def with_chunks(core: type, *, chunked: bool, query_scale: Any) -> type:
    """A core attention for packed rows in Megatron's "thd" format, extended by the features of Llama-4 layers.

    `chunked`: the core attends to the row's chunks as separate sequences (queries and keys are already rotated by the
    positions in the whole sequences). `query_scale` maps positions [N] to a factor on the queries [N, heads, d].
    Written for Megatron-Core's wrapper of Transformer Engine's attention, and not run with Transformer Engine.
    """

    class WithChunks(core):  # type: ignore[misc]
        def forward(
            self,
            query: Tensor,
            *arguments: Any,
            packed_seq_params: PackedRow | None = None,
            **keywords: Any,
        ) -> Tensor:
            """The result of `core` for queries [N, heads, d].

            The queries are first multiplied by `query_scale` of the positions. If `chunked`, `core` gets the row with
            sequences split into chunks.
            """
            assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
            if query_scale is not None:
                scale = query_scale(packed_seq_params.position_ids)
                query = query * scale.to(query.dtype)[:, None, None]
            row = packed_seq_params
            if chunked and row.in_chunks is not None:
                row = row.in_chunks
            return super().forward(query, *arguments, packed_seq_params=row, **keywords)

    return WithChunks


class SdpaCoreAttention(torch.nn.Module):
    """Core attention for Megatron's SelfAttention; grouped queries, no attention bias, no dropout.

    A packed row is one sequence [N, 1, heads, d] with a `PackedRow`: the row's sequences are gathered into a few
    padded buckets, attended causally, and scattered back, so tokens never see another sequence. Without a `PackedRow`
    the input is a plain batch [s, b, heads, d]. With context parallelism N are this rank's tokens (`layers.context`):
    the rank gathers the keys and values of all ranks, and attends with the rank's own queries. `chunked` layers
    (Llama 4) attend inside chunks of the sequence; `query_scale` (Llama 4's layers without RoPE) maps positions [N]
    to a factor on the queries.
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
        if attention_dropout is None:
            attention_dropout = config.attention_dropout
        if attention_dropout:
            raise ValueError(
                f"megatron.model.attention_dropout: {attention_dropout} is not supported without Transformer Engine; "
                "set it to 0"
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
        """The result [s, b, heads * d] for queries [s, b, heads, d], and keys and values [s, b, groups, d].

        Values may have another d than keys; latent attention leaves out the b of a packed row.
        """
        assert attention_bias is None
        if query.dim() == 3:
            query, key, value = (x[:, None] for x in (query, key, value))
        s, b = query.shape[:2]
        split = packed_seq_params is not None and packed_seq_params.context is not None
        assert split == (self.context_size > 1), "context parallelism needs a packed row that is split over the ranks"
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v).permute(2, 0, 1, 3).reshape(s, b, -1)
        # For Megatron the row is one sequence, with rotary angles for every token (`PackedRow`).
        assert b == 1
        if self.query_scale is not None:
            scale = self.query_scale(packed_seq_params.position_ids)
            query = query * scale.to(query.dtype)[:, None, None, None]
        q, k, v = (x[:, 0] for x in (query, key, value))
        if packed_seq_params.context is not None:
            return self._shared(q, k, v, packed_seq_params.context).reshape(s, 1, -1)
        layout = packed_seq_params.layout
        if self.chunked:
            layout = packed_seq_params.chunked
        assert layout is not None, "a row made for Transformer Engine's attention has no layout for this class"
        return self._packed(q, k, v, layout).reshape(s, 1, -1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
        """The attention [N, heads, d] of a whole row, computed bucket by bucket."""
        outputs = []
        for bucket in layout.buckets:
            shape = (bucket.sequences, bucket.length)
            q, k, v = (
                x.index_select(0, bucket.gather).view(*shape, *x.shape[1:]).transpose(1, 2)
                for x in (query, key, value)
            )
            out = self._attend(q, k, v).transpose(1, 2).reshape(-1, query.shape[1], value.shape[-1])
            # Sequences of equal length have no padding, and need no copy.
            if bucket.valid.numel() < out.shape[0]:
                out = out.index_select(0, bucket.valid)
            outputs.append(out)
        return torch.cat(outputs).index_select(0, layout.restore)

    def _shared(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """The attention [n, heads, d] of this rank's tokens under context parallelism.

        The gradients of keys and values are summed over the ranks.
        """
        # One gather takes keys and values. Megatron's function reduces in the backward pass, because the queries of
        # each rank add to the gradients of all keys.
        gathered = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=context.group)
        keys, values = gathered.index_select(0, context.order).split([key.shape[-1], value.shape[-1]], dim=-1)
        spans = context.spans
        if self.chunked:
            spans = context.chunked
        parts = query.split([span.queries for span in spans])
        return torch.cat([self._span(part, keys, values, span) for part, span in zip(parts, spans)])

    def _span(self, query: Tensor, keys: Tensor, values: Tensor, span: Span) -> Tensor:
        """The attention [queries, heads, d] of the consecutive queries of a span to the span's keys."""
        reach = slice(span.start, span.start + span.keys)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, keys[reach], values[reach]))
        # `is_causal` would align the first query with the first key; here the last query belongs to the last key.
        mask = torch.ones((span.queries, span.keys), dtype=torch.bool, device=query.device)
        mask = mask.tril(span.keys - span.queries)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, heads, s, d] causal attention of a padded block. Padding comes after every valid query."""
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )
