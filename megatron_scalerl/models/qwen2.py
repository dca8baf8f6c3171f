"""Qwen2 and Qwen2.5 models: Llama's layers with biases of queries, keys and values, and none of the output."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.family import Family, LayerStyle, require


def family(config: Any) -> Family:
    """The Family of a Qwen2Config. Raises ValueError as `decoder_family` does, and for a bias of the output."""
    require(config, "attention_bias", False)  # the key of Llama and Qwen3, which means the output's bias as well
    return decoder_family(config, layers=(LayerStyle(),) * config.num_hidden_layers, qkv_bias=True)
