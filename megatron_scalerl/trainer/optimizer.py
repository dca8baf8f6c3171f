"""Builds AdamW from Megatron's optimizers: fp32 main weights for bf16 parameters, sharded over data-parallel ranks.

Megatron uses Transformer Engine's FusedAdam, else apex's, else PyTorch's AdamW, and has no option for PyTorch's fused
kernel; `use_fused_adamw` turns that kernel on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides

from megatron_scalerl.distributed.device import HAVE_GPU
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.trainer.options import optimizer_config


def build_optimizer(chunks: list[torch.nn.Module], recipe: Recipe) -> MegatronOptimizer:
    """The optimizer of this rank's model chunks, with the settings of the recipe's optimizer section.

    Weight decay acts on matrices only. The learning rate is constant; the caller schedules it by setting `lr` in
    every group of `param_groups`.
    """
    config = optimizer_config(recipe)
    optimizer = get_megatron_optimizer(config, chunks, config_overrides=get_standard_config_overrides(config))
    if HAVE_GPU:
        use_fused_adamw(optimizer)
    return optimizer


def use_fused_adamw(optimizer: MegatronOptimizer) -> None:
    """Turn on the fused kernel of every PyTorch AdamW in `optimizer`; call before the first step.

    The unfused AdamW allocates several temporary fp32 tensors of the size of this rank's weights. Results of the two
    kernels differ by rounding. Optimizers of other types are not changed.
    """
    for part in parts_of(optimizer):
        inner = getattr(part, "optimizer", None)
        if isinstance(inner, torch.optim.AdamW):
            assert not inner.state, "AdamW has made a step; call use_fused_adamw before the first step"
            for group in inner.param_groups:
                # PyTorch reads both keys from each group, and allows only one of the two to be True.
                group["fused"] = True
                group["foreach"] = False


def parts_of(optimizer: Any) -> Sequence[Any]:
    """The optimizers that a chained optimizer consists of; [optimizer] for any other optimizer."""
    return getattr(optimizer, "chained_optimizers", [optimizer])
