"""Qwen2 and Qwen2.5 models: Llama's layers with biases of queries, keys and values, and no bias of the output."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.family import Family, LayerStyle, require


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of a Qwen2Config.

    Raises ValueError as `decoder_family` does, and for a bias of the output.
    """
    # In Llama's and Qwen3's configs `attention_bias` means a bias of the output as well, which Qwen2 does not have.
    require(config, "attention_bias", False)
    return decoder_family(config, layers=LayerStyle(), qkv_bias=True)
