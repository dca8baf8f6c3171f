"""Seed-OSS models: Llama's layers with biases of queries, keys and values.

The key `attention_out_bias` states whether the output has a bias."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.family import Family, LayerStyle


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of a SeedOssConfig.

    Raises ValueError as `decoder_family` does.
    """
    return decoder_family(
        config,
        layers=LayerStyle(),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_out_bias,
    )
