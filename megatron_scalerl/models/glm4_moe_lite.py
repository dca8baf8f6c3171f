"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts."""

from typing import Any

from megatron_scalerl.models.deepseek import latent_family
from megatron_scalerl.models.family import Family, require, require_present


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of a Glm4MoeLiteConfig.

    Raises ValueError as `latent_family` does, and if engines and transformers would place the dense layers
    differently.
    """
    require(config, "scoring_func", "sigmoid")
    require(config, "topk_method", "noaux_tc")
    dense = config.mlp_layer_types.count("dense")
    require(config, "mlp_layer_types", ["dense"] * dense + ["sparse"] * (config.num_hidden_layers - dense))
    # vLLM reads first_k_dense_replace, while transformers reads mlp_layer_types: both must agree.
    require_present(config, "first_k_dense_replace", dense)
    return latent_family(config)
