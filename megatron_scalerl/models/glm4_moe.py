"""GLM-4.5, 4.6 and 4.7: partial rotary embeddings, biases of queries, keys and values, a sigmoid router.

Dense layers come first, and then layers with experts and a shared expert.
"""

from typing import Any

from megatron_scalerl.models.blocks import decoder_family, head_size
from megatron_scalerl.models.experts import dense_first, sigmoid_experts
from megatron_scalerl.models.family import Family, QkNorm, require, require_present


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of a Glm4MoeConfig.

    Raises ValueError as `decoder_family` and `sigmoid_experts` do.
    """
    require_present(config, "head_dim", head_size(config))
    # vLLM's class for GLM-4.5 never ties the head to the embedding.
    require(config, "tie_word_embeddings", False)
    qk_norm: QkNorm = "none"
    if config.use_qk_norm:
        qk_norm = "weighted"
    return decoder_family(
        config,
        layers=dense_first(config, qk_norm=qk_norm),
        experts=sigmoid_experts(config),
        qkv_bias=config.attention_bias,
        partial_rotary=True,
        prediction_layers=config.num_nextn_predict_layers or 0,
    )
