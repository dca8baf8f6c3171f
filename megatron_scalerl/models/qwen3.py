"""Qwen3 dense models: Llama's layers with a weighted RMS norm of queries and keys per head."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.family import Family, LayerStyle


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of a Qwen3Config.

    Raises ValueError as `decoder_family` does.
    """
    bias = config.attention_bias
    return decoder_family(config, layers=LayerStyle(qk_norm="weighted"), qkv_bias=bias, output_bias=bias)
