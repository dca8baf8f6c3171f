"""Mistral models without a sliding window, which is 4096 where the key is absent: Llama's layers, any head size."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family
from megatron_scalerl.models.family import Family, LayerStyle


def family(config: Any) -> Family:
    """The Family of a MistralConfig. Raises ValueError as `decoder_family` does."""
    # attention_bias, which is refused: transformers' Mistral ignores it, vLLM does not
    return decoder_family(config, layers=(LayerStyle(),) * config.num_hidden_layers)
