"""Memory of the logit projection of one micro-batch (`megatron_scalerl.logits`)."""

from __future__ import annotations

from megatron_scalerl.logits.torch_backend import LARGEST, LARGEST_CHUNK, TILE
from megatron_scalerl.models.family import Family, padded_vocab_size
from megatron_scalerl.plan.hardware import MIB
from megatron_scalerl.plan.kernels import Kernels
from megatron_scalerl.plan.layout import Layout
from megatron_scalerl.recipe import Recipe

_CAST_COLUMNS = 4096
"""Columns of the head that a CPU casts to fp32 together."""
SUMS_OVER_TOKENS = ("cispo", "dapo", "grpo")
"""Losses that can be taken inside a chunk."""


def in_chunk(recipe: Recipe) -> bool:
    """True where the loss is taken where the logits are, which are then computed once."""
    return recipe.trainer.loss_in_chunk and recipe.loss.name in SUMS_OVER_TOKENS


def logit_bytes(
    recipe: Recipe, family: Family, layout: Layout, tokens: int, *, kernels: Kernels
) -> tuple[float, float]:
    """(gradients that stay until the backward pass, blocks of logits and what belongs to them), bytes.

    trainer.logit_workspace_mb bounds the blocks. A GPU uses it up, a CPU takes blocks of at most 2^25 numbers.
    """
    hidden = family.transformer["hidden_size"]
    rows = padded_vocab_size(family.vocab_size, layout.tp) // layout.tp
    narrow = recipe.policy.dtype == "bfloat16"
    stays = 4 * tokens * hidden + (4 * rows * hidden if in_chunk(recipe) else 0)
    kept = (2 if narrow else 4) * tokens * hidden  # the tokens with loss, picked out
    limit = recipe.trainer.logit_workspace_mb * MIB
    if kernels.device == "gpu":
        return stays, kept + limit
    numbers = min(LARGEST_CHUNK if in_chunk(recipe) else LARGEST, rows * tokens)
    block = numbers * 4 + 8 * TILE
    if narrow:
        chunk = numbers / rows
        block += 4 * chunk * hidden + 8 * min(rows, _CAST_COLUMNS) * hidden
        block += 2 * numbers * (recipe.trainer.logit_gradient == "bf16x2")
    return stays, kept + min(limit, block)
