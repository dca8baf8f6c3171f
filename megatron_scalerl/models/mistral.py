"""Mistral models without a sliding window, which is 4096 where the key is absent: Llama's layers, any head size."""

from typing import Any

from megatron_scalerl.models.blocks import build_family, dense_rules, require_full_attention
from megatron_scalerl.models.family import Family, LayerStyle, require


def family(config: Any) -> Family:
    """The Family of a MistralConfig. Raises ValueError for windows, biases, and activations other than SiLU."""
    require_full_attention(config)
    require(config, "attention_bias", False)  # transformers' Mistral ignores it, vLLM does not
    layers = (LayerStyle(),) * config.num_hidden_layers
    return build_family(config, name="mistral", layers=layers, rules=dense_rules(config))
