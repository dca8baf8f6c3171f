"""AdamW through Megatron's optimisers: fp32 main weights under bf16, sharded over data-parallel ranks."""

from __future__ import annotations

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.trainer.options import optimizer_config


def build_optimizer(chunks: list[torch.nn.Module], recipe: Recipe) -> MegatronOptimizer:
    """The optimiser of this rank's model chunks, as the recipe's optimizer section says.

    Weight decay acts on matrices only. The learning rate is constant here; the caller warms it up by setting
    `lr` in every group of `param_groups`.
    """
    config = optimizer_config(recipe)
    return get_megatron_optimizer(config, chunks, config_overrides=get_standard_config_overrides(config))
