"""dots.llm1: norms of queries and keys per head, dense first layers, and then experts with a sigmoid router."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.experts import dense_first, sigmoid_experts
from megatron_scalerl.models.family import Family


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of a Dots1Config.

    Raises ValueError as `decoder_family` and `sigmoid_experts` do.
    """
    bias = config.attention_bias
    return decoder_family(
        config,
        layers=dense_first(config, qk_norm="weighted"),
        experts=sigmoid_experts(config),
        qkv_bias=bias,
        output_bias=bias,
    )
