"""A plain core attention for packed rows, for tests in the place of Transformer Engine's."""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_scalerl.trainer.layers.spec import PlainSpecProvider


class ReferenceVarlenAttention(torch.nn.Module):
    """Causal attention on each sequence between cu_seqlens, one after the other, in Megatron's "thd" format.

    Under context parallelism every rank computes the whole row, whose sequences are cut into 2 x size chunks of
    which rank r has chunks r and 2 x size - 1 - r, and keeps its tokens.
    """

    def __init__(self, config=None, pg_collection=None, **_):
        super().__init__()
        self.size = config.context_parallel_size if config else 1
        self.group = pg_collection.cp if self.size > 1 else None

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        """[n, heads, d] queries, [n, groups, d] keys and values to [n, heads * d]."""
        row = packed_seq_params
        sizes = row.cu_seqlens_q.diff().tolist()
        assert max(sizes) <= row.max_seqlen_q and torch.equal(row.cu_seqlens_q, row.cu_seqlens_kv)
        if self.size == 1:
            return _attend(query, key, value, sizes)
        mine = _tokens(sizes, self.size)
        places = torch.cat(mine)
        whole = []
        for x in (query, key, value):
            gathered = gather_from_sequence_parallel_region(x, group=self.group)
            whole.append(torch.zeros_like(gathered).index_copy(0, places, gathered))
        return _attend(*whole, sizes)[mine[self.group.rank()]]


def _attend(query, key, value, sizes):
    out = []
    for parts in zip(*(x.split(sizes) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.append(found[0].transpose(0, 1))
    return torch.cat(out).flatten(1)


def _tokens(sizes, ranks):
    """The places of each rank's tokens in the row."""
    found = [[] for _ in range(ranks)]
    for sequence in torch.arange(sum(sizes)).split(sizes):
        chunks = sequence.chunk(2 * ranks)
        for rank in range(ranks):
            found[rank] += [chunks[rank], chunks[-1 - rank]]
    return [torch.cat(parts) for parts in found]


class ReferenceVarlenProvider(PlainSpecProvider):
    """Our plain layers with the reference's attention."""

    def core_attention(self):
        """The reference."""
        return ReferenceVarlenAttention
