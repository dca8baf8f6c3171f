"""Llama 2 and 3.x dense models, and the tiny dense policy."""

from typing import Any

from megatron_scalerl.models.blocks import build_family, dense_rules
from megatron_scalerl.models.family import Family, LayerStyle, require


def family(config: Any) -> Family:
    """The Family of a LlamaConfig. Raises ValueError for MLP biases and activations other than SiLU."""
    require(config, "mlp_bias", False)
    require(config, "hidden_act", "silu")
    layers = (LayerStyle(),) * config.num_hidden_layers
    return build_family(config, name="llama", layers=layers, rules=dense_rules(config))
