"""AdamW through Megatron's optimisers: fp32 main weights under bf16, sharded over data-parallel ranks.

Megatron takes Transformer Engine's FusedAdam, else apex's, else PyTorch's AdamW, and has no option that makes the
last a fused one; `use_fused_adamw` does.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides

from megatron_scalerl.distributed.device import HAVE_GPU
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.trainer.options import optimizer_config


def build_optimizer(chunks: list[torch.nn.Module], recipe: Recipe) -> MegatronOptimizer:
    """The optimiser of this rank's model chunks, as the recipe's optimizer section says.

    Weight decay acts on matrices only. The learning rate is constant here; the caller warms it up by setting
    `lr` in every group of `param_groups`.
    """
    config = optimizer_config(recipe)
    optimizer = get_megatron_optimizer(config, chunks, config_overrides=get_standard_config_overrides(config))
    if HAVE_GPU:
        use_fused_adamw(optimizer)
    return optimizer


def use_fused_adamw(optimizer: MegatronOptimizer) -> None:
    """Has PyTorch's AdamW, where it is the one in use, work in one kernel; before its first step.

    Without it AdamW keeps temporary copies of several fp32 tensors of the size of all weights of this rank. Results
    differ by rounding. Optimizers of other kinds stay as they are.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if isinstance(inner, torch.optim.AdamW):
            assert not inner.state, "AdamW has counted its steps in host memory already"
            for group in inner.param_groups:
                group["fused"], group["foreach"] = True, False
