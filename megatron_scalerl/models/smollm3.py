"""SmolLM3 models: Llama's layers, of which every fourth has no rotary embedding."""

from typing import Any

from megatron_scalerl.models.blocks import build_family, dense_rules, require_full_attention
from megatron_scalerl.models.family import Family, LayerStyle, require


def family(config: Any) -> Family:
    """The Family of a SmolLM3Config. Raises ValueError for sliding windows, MLP biases, activations besides SiLU."""
    require_full_attention(config)
    require(config, "mlp_bias", False)
    rotated = config.no_rope_layers[: config.num_hidden_layers]  # 1 for a layer with rotary embeddings
    return build_family(
        config,
        name="smollm3",
        layers=tuple(LayerStyle(rope=bool(rope)) for rope in rotated),
        rules=dense_rules(config),
        transformer=dict(no_rope_freq=[int(not rope) for rope in rotated]),
    )
