"""EXAONE 4 models without sliding windows.

Norms come after attention and MLP, and queries and keys have a norm per head."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.family import Family, LayerStyle, require


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of an Exaone4Config.

    Raises ValueError as `decoder_family` does, and for a sliding window.
    """
    # If `sliding_window` is set, transformers applies no RoPE in layers of full attention.
    require(config, "sliding_window", None)
    return decoder_family(config, layers=LayerStyle(qk_norm="weighted", post_norm=True))
