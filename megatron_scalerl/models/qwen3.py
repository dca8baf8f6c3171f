"""Qwen3 dense models: Llama's layers with a weighted RMS norm of queries and keys per head."""

from typing import Any

from megatron_scalerl.models.blocks import build_family, dense_rules, require_full_attention
from megatron_scalerl.models.family import Family, LayerStyle


def family(config: Any) -> Family:
    """The Family of a Qwen3Config. Raises ValueError for sliding windows and activations other than SiLU."""
    require_full_attention(config)
    return build_family(
        config,
        name="qwen3",
        layers=(LayerStyle(qk_norm="weighted"),) * config.num_hidden_layers,
        rules=dense_rules(config, qk_norm="weighted"),
        transformer=dict(qk_layernorm=True),
    )
