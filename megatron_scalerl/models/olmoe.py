"""OLMoE models: norms of queries and keys over all heads, and experts in every layer with a softmax router."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.experts import Experts, softmax_router
from megatron_scalerl.models.family import Family, LayerStyle, require


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of an OlmoeConfig.

    Raises ValueError as `decoder_family` does, and for a value that differs from the value fixed in vLLM's class.
    """
    require(config, "clip_qkv", None)
    require(config, "norm_topk_prob", False)
    require(config, "rms_norm_eps", 1e-5)
    require(config, "tie_word_embeddings", False)
    experts = Experts(
        count=config.num_experts,
        ffn=config.intermediate_size,
        width_key="intermediate_size",
        router=softmax_router(config, normalized=False),
    )
    return decoder_family(config, layers=LayerStyle(moe=True, qk_norm="all_heads"), experts=experts)
