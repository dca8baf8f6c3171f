"""Qwen2 and Qwen2.5 models: Llama's layers with biases of queries, keys and values, and none of the output."""

from typing import Any

from megatron_scalerl.models.blocks import build_family, dense_rules, require_full_attention
from megatron_scalerl.models.family import Family, LayerStyle, require


def family(config: Any) -> Family:
    """The Family of a Qwen2Config.

    Raises ValueError for sliding windows, a bias of the output projection, and activations other than SiLU.
    """
    require_full_attention(config)
    require(config, "attention_bias", False)  # the key of Llama and Qwen3, which means the output's bias as well
    return build_family(
        config,
        name="qwen2",
        layers=(LayerStyle(),) * config.num_hidden_layers,
        rules=dense_rules(config, qkv_bias=True),
        transformer=dict(add_qkv_bias=True),
    )
