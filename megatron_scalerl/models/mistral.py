"""Mistral models without a sliding window: Llama's layers with any head size.

The config has to state `sliding_window`: the default of an absent key is 4096."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.family import Family, LayerStyle


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of a MistralConfig.

    Raises ValueError as `decoder_family` does.
    """
    # `decoder_family` refuses `attention_bias`, which transformers' Mistral ignores and vLLM applies.
    return decoder_family(config, layers=LayerStyle())
