"""MiniMax-M2: partial rotary embeddings, norms of queries and keys over all heads, a sigmoid router with a bias."""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family, head_size
from megatron_scalerl.models.experts import Experts, sigmoid_router
from megatron_scalerl.models.family import Family, LayerStyle, require, require_present
from megatron_scalerl.models.mixtral import NAMES


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of a MiniMaxM2Config.

    Raises ValueError as `decoder_family` and `sigmoid_router` do. Raises ValueError for a config without a key from
    which engines take the router or the rotated part of a head.
    """
    # vLLM reads the next three keys, for which transformers' class has fixed values.
    require_present(config, "scoring_func", "sigmoid")
    require_present(config, "use_routing_bias", True)
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    require_present(config, "rotary_dim", int(head_size(config) * share))
    require(config, "routed_scaling_factor", 1.0)
    require(config, "n_group", 1)
    # vLLM's class for MiniMax-M2 never ties the head to the embedding.
    require(config, "tie_word_embeddings", False)
    experts = Experts(
        count=config.num_local_experts,
        ffn=config.intermediate_size,
        router=sigmoid_router(config),
        router_bias="e_score_correction_bias",
        **NAMES,
    )
    layers = (LayerStyle(moe=True, qk_norm="all_heads"),) * config.num_hidden_layers
    predicting = range(len(layers), len(layers) + (getattr(config, "num_mtp_modules", 0) or 0))
    # Layers of multi-token prediction, which have one of two names, are not loaded by transformers and vLLM.
    passthrough = ("model.mtp.", *(f"model.layers.{layer}." for layer in predicting))
    return decoder_family(config, layers=layers, experts=experts, partial_rotary=True, passthrough=passthrough)
