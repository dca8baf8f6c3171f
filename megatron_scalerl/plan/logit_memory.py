"""Memory of the logit projection at its worst, the backward pass of one micro-batch."""

from __future__ import annotations

from megatron_scalerl.models.family import Family, padded_vocab_size
from megatron_scalerl.plan.activations import Kernels
from megatron_scalerl.plan.hardware import MIB
from megatron_scalerl.plan.layout import Layout
from megatron_scalerl.recipe import Recipe

BLOCK_BYTES = 64 * MIB
"""One block of logits, chunked over tokens (logits/torch_backend.py)."""
BLOCKS = 4
"""Blocks that live at once in the backward pass: logits, probabilities, gradient, its scaled copy."""


def logit_bytes(recipe: Recipe, family: Family, layout: Layout, tokens: int, *, kernels: Kernels) -> float:
    """Blocks of logits, fp32 gradients of hidden states and head, the head's fp32 copy under bf16 weights."""
    hidden = family.transformer["hidden_size"]
    rows = padded_vocab_size(family.vocab_size, layout.tp) // layout.tp
    blocks = BLOCKS * min(BLOCK_BYTES, 4 * rows * tokens)
    head_copy = 4 * rows * hidden if recipe.policy.dtype == "bfloat16" and recipe.policy.logits == "fp32" else 0
    return blocks + 4 * tokens * hidden + 4 * rows * hidden + head_copy
