"""OLMo 2 models: norms after attention and MLP, and none before.

Norms of queries and keys extend over all heads."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.family import Family, LayerStyle


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of an Olmo2Config.

    Raises ValueError as `decoder_family` does.
    """
    return decoder_family(config, layers=LayerStyle(qk_norm="all_heads", post_norm=True))
