"""Mixtral models: Llama's layers with experts in every layer, and a softmax router."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.experts import Experts, softmax_router
from megatron_scalerl.models.family import Family, LayerStyle

NAMES: dict[str, Any] = dict(
    width_key="intermediate_size", module="block_sparse_moe.", projections=("w1", "w3", "w2")
)
"""Fields of Experts for the names in Mixtral's checkpoints, which MiniMax-M2 shares."""


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of a MixtralConfig.

    Raises ValueError as `decoder_family` and `softmax_router` do.
    """
    experts = Experts(
        count=config.num_local_experts,
        ffn=config.intermediate_size,
        router=softmax_router(config, normalized=True),
        **NAMES,
    )
    return decoder_family(config, layers=LayerStyle(moe=True), experts=experts)
