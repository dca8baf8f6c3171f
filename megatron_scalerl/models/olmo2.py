"""OLMo 2 models: norms after attention and MLP, none before them, and norms of queries and keys over all heads."""

from typing import Any

from megatron_scalerl.models.blocks import build_family, dense_rules, require_full_attention
from megatron_scalerl.models.family import Family, LayerStyle, require


def family(config: Any) -> Family:
    """The Family of an Olmo2Config. Raises ValueError for biases, sliding windows and activations other than SiLU."""
    require_full_attention(config)
    require(config, "attention_bias", False)
    return build_family(
        config,
        name="olmo2",
        layers=(LayerStyle(qk_norm="all_heads", post_norm=True),) * config.num_hidden_layers,
        rules=dense_rules(config, qk_norm="all_heads", post_norm=True),
        transformer=dict(qk_layernorm=True),
    )
