"""Llama 2 and 3.x dense models, and the dense policy of `megatron_scalerl.tiny`."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.family import Family, LayerStyle


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of a LlamaConfig.

    Raises ValueError as `decoder_family` does.
    """
    bias = config.attention_bias
    return decoder_family(config, layers=LayerStyle(), qkv_bias=bias, output_bias=bias)
