"""Ernie 4.5 dense models: Llama's layers, but RoPE rotates pairs of neighboring elements."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.family import Family, LayerStyle, require


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of an Ernie4_5Config.

    Raises ValueError as `decoder_family` does, and for biases.
    """
    require(config, "use_bias", False)
    return decoder_family(config, layers=LayerStyle(), transformer=dict(rotary_interleaved=True))
