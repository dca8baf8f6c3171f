"""Megatron's multi-head latent attention on packed rows, with rotary angles by token and unsharded down-projections.

The life of a row in a layer: `PolicyModel` puts the rotary angles of the row's tokens into the row; Megatron's
attention projects down and up, and asks for a table of angles; `RowAngles` answers with the row's angles; the core
attention of `layers.attention` takes values that are narrower than the keys.

Without Transformer Engine Megatron shards the down-projections, and then gathers the results. The backward pass
of that gather gives each rank its part of the gradient and does not sum over ranks, though each rank has only its own
heads' gradient of the keys' rotated part (tensor_parallel/mappings.py, _GatherFromModelParallelRegion).
Here every rank has these projections whole, as with Transformer Engine.
"""

import copy
from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megatron_scalerl.distributed.device import HAVE_TE, capability
from megatron_scalerl.trainer.layers.packing import PackedRow


class RowAngles(torch.nn.Module):
    """Gives Megatron's latent attention the angles of the row's tokens, in place of a table from position 0."""

    def __init__(self, factor: float):
        """factor: YaRN's factor on cosine and sine."""
        super().__init__()
        self.factor = factor

    def get_rotary_seq_len(self, *arguments: Any) -> Tensor:
        """The rotary angles of the row, which Megatron passes as the last argument.

        Megatron takes the result for a length, and passes it to `forward`.
        """
        row: PackedRow = arguments[-1]
        assert row.angles is not None
        # Megatron expects angles without the second dimension, in which a row's angles have size 1.
        return row.angles[:, 0]

    def forward(self, angles: Tensor, packed_seq: bool = False) -> tuple[Tensor, float]:
        """Return the angles of the tokens, and the factor."""
        return angles, self.factor


class WholeLinear(torch.nn.Linear):
    """An unsharded projection: every tensor-parallel rank has the whole weight.

    Under sequence parallelism each rank projects only the rank's own tokens.
    """

    def __init__(self, inner: int, out: int, config: TransformerConfig):
        super().__init__(inner, out, bias=False, dtype=config.params_dtype)
        weight: Any = self.weight
        assert config.init_method is not None
        config.init_method(weight)
        # If `sequence_parallel` is True, Megatron sums the weight's gradient over the tensor-parallel ranks.
        weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Any:
        """Return the projection and None for the bias, as Megatron's linear layers do."""
        return super().forward(x), None


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention with `RowAngles` and, without Transformer Engine, `WholeLinear`."""

    def __init__(self, config: Any, *args: Any, **keywords: Any):
        # With "yarn" Megatron would make a table, unused here, which under context parallelism needs a GPU.
        config.rope_type = "rope"
        super().__init__(config, *args, **keywords)
        # With "yarn" Megatron's attention takes a factor along with the angles, as `RowAngles` returns.
        config.rope_type = "yarn"
        factor = _yarn_get_concentration_factor(config.rotary_scaling_factor, config.mscale, config.mscale_all_dim)
        self.rotary_pos_emb = RowAngles(factor)
        if HAVE_TE:
            return
        hidden = config.hidden_size
        if config.q_lora_rank:
            self.linear_q_down_proj = WholeLinear(hidden, config.q_lora_rank, config)
        self.linear_kv_down_proj = WholeLinear(hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim, config)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Any, position_ids: Any, row: PackedRow, **keywords: Any
    ) -> Any:
        """Queries, keys and values, rotated by the angles of each token.

        The row is passed as "sbhd", because for "thd" Megatron would wait for the device at each sequence.
        """
        row = copy.copy(row)
        row.qkv_format = "sbhd"
        return super().get_query_key_value_tensors(hidden_states, key_value_states, position_ids, row, **keywords)

    def _run_core_attention(self, *tensors: Any, attn_mask_type: Any = None, **keywords: Any) -> Any:
        """Run the core attention. On Blackwell GPUs, values are not padded to the width of the keys.

        cuDNN trains keys of width 192 with values of width 128 there, but Megatron would pad the values to 192.
        """
        run = super()._run_core_attention
        if capability() >= (10, 0):
            run = self.core_attention
        return run(*tensors, attn_mask_type=attn_mask_type or self.attn_mask_type, **keywords)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the layers of `submodules` unchanged.

        Megatron would add a norm before queries that have no down-projection.
        """
        return vars(submodules)
