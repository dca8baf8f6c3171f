"""SmolLM3 models: Llama's layers, but every fourth layer has no rotary embedding."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.family import Family, LayerStyle


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of a SmolLM3Config.

    Raises ValueError as `decoder_family` does.
    """
    # Despite the name, no_rope_layers has 1 for a layer with rotary embeddings.
    rotated = config.no_rope_layers[: config.num_hidden_layers]
    if len(rotated) < config.num_hidden_layers:
        raise ValueError(f"config.json: no_rope_layers has {len(rotated)} entries; give one for every layer")
    bias = config.attention_bias
    return decoder_family(
        config,
        layers=tuple(LayerStyle(rope=bool(rope)) for rope in rotated),
        qkv_bias=bias,
        output_bias=bias,
        transformer=dict(no_rope_freq=[int(not rope) for rope in rotated]),
    )
