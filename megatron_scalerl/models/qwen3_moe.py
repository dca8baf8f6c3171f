"""Qwen3 mixtures of experts: a softmax top-k router, no shared expert, optional dense layers in between.

Checkpoints store every expert separately. In the in-memory layout of transformers 5 a layer has a tensor
[experts, 2 ffn, hidden] and a tensor [experts, hidden, ffn].
"""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.experts import Experts, softmax_router
from megatron_scalerl.models.family import Family, LayerStyle


def family(config: Any, *, fused: bool = False) -> Family:
    """Build the Family of a Qwen3MoeConfig.

    fused: whether the checkpoint has the layout of transformers 5, in which the experts of a layer are fused. Raises
    ValueError as `decoder_family` and `softmax_router` do.
    """
    experts = Experts(
        count=config.num_experts,
        ffn=config.moe_intermediate_size,
        router=softmax_router(config, normalized=config.norm_topk_prob),
        fused=fused,
    )
    sparse = [_sparse(config, layer) for layer in range(config.num_hidden_layers)]
    layers = tuple(LayerStyle(moe=moe, qk_norm="weighted") for moe in sparse)
    bias = config.attention_bias
    return decoder_family(config, layers=layers, experts=experts, qkv_bias=bias, output_bias=bias)


def _sparse(config: Any, layer: int) -> bool:
    """Whether a layer has experts, by the rule of transformers' Qwen3MoeDecoderLayer."""
    if layer in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    return config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
