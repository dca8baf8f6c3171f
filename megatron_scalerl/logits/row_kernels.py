"""Triton kernels over blocks of logits from a GEMM: statistics of rows, and gradients of logits.

Both kernels read a block once. One writes four statistics per row, the other writes the gradient. The kernels run on
a GPU, or on CPU tensors in Triton's interpreter, if TRITON_INTERPRET=1 is set before this module is imported.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_scalerl.logits.projection import TokenGradients

STATISTICS_BLOCK = 4096
"""Number of columns that one pass of the statistics kernel holds in registers: 16 for each thread of 8 warps."""

GRADIENT_BLOCK = 2048
"""Number of columns of one program of the gradient kernel."""


def compiled() -> bool:
    """True if kernels are compiled for a GPU; False in Triton's interpreter, which also accepts CPU tensors."""
    return isinstance(_row_statistics_kernel, triton.runtime.JITFunction)


def row_statistics(logits: Tensor, scale: Tensor, targets: Tensor, first: int, stats: Tensor) -> None:
    """Adds a block of columns to the statistics `stats` [4, T] of `projection.Backend`, in place.

    logits [T, columns] are fp32, not yet multiplied by `scale` (0-dimensional, fp32). `first` is the id of column 0.
    `targets` [T] are int64 ids. r leaves out the largest logit's own term, and counts 1 for each further equal
    maximum. So r is exact if one token is almost certain.
    """
    tokens, columns = logits.shape
    if tokens == 0 or columns == 0:
        return
    assert logits.stride(1) == 1 and stats.stride(1) == 1 and stats.dtype == torch.float32
    _row_statistics_kernel[(tokens,)](
        logits,
        logits.stride(0),
        scale,
        targets,
        stats,
        stats.stride(0),
        first,
        columns,
        BLOCK=min(STATISTICS_BLOCK, triton.next_power_of_2(columns)),
        num_warps=8,
    )


def logit_gradient(
    logits: Tensor,
    scale: Tensor,
    targets: Tensor,
    first: int,
    token_gradients: TokenGradients,
    at_target: Tensor,
    *,
    high_term: Tensor,
    low_term: Tensor | None,
) -> None:
    """Writes the gradient of a block of logits [T, columns], times scale, into `high_term`.

    `low_term`, if given, gets the rounding error. `high_term` is bf16 or fp32, and an fp32 `high_term` may be
    `logits` itself. bf16 high_term + low_term has 16 bits of the gradient's significand. at_target [T] is
    grad_logprob (1 - p) of the target, computed without cancellation.
    """
    tokens, columns = logits.shape
    if tokens == 0 or columns == 0:
        return
    # The kernels take no None: for a missing entropy gradient or low-order part, pass any tensor, which they ignore.
    grad_entropy = token_gradients.entropy
    if token_gradients.grad_entropy is not None:
        grad_entropy = token_gradients.grad_entropy
    split = low_term is not None
    if low_term is None:
        low_term = high_term
    assert logits.stride(1) == high_term.stride(1) == 1 and low_term.stride() == high_term.stride()
    block = min(GRADIENT_BLOCK, triton.next_power_of_2(columns))
    _logit_gradient_kernel[(tokens, triton.cdiv(columns, block))](
        logits,
        logits.stride(0),
        scale,
        targets,
        token_gradients.lse,
        token_gradients.grad_logprob,
        at_target,
        token_gradients.entropy,
        grad_entropy,
        high_term,
        low_term,
        high_term.stride(0),
        first,
        columns,
        ENTROPY=token_gradients.grad_entropy is not None,
        SPLIT=split,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def merged_pair(m0, r0, u0, m1, r1, u1):
    """Merge the statistics m, r and u (`projection.Backend`) of two sets of columns; only the first may be empty."""
    terms0 = 1.0 + r0
    terms1 = 1.0 + r1
    top = tl.maximum(m0, m1)
    gap0 = tl.where(terms0 > 0, m0 - top, 0.0)
    gap1 = m1 - top
    weight0 = tl.exp(gap0)
    weight1 = tl.exp(gap1)
    r = tl.where(m1 > m0, r1 + weight0 * terms0, r0 + weight1 * terms1)
    u = weight0 * (u0 + gap0 * terms0) + weight1 * (u1 + gap1 * terms1)
    return top, r, u


@triton.jit
def _row_statistics_kernel(
    logits, row_stride, scale, targets, stats, stats_stride, first, columns, BLOCK: tl.constexpr
):
    # `row` needs 64 bits, because the offset row * row_stride exceeds 2^31 for a large vocabulary.
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    factor = tl.load(scale)
    lane = tl.arange(0, BLOCK)
    filled = lane < columns
    # Every lane accumulates the statistics of its own columns. So there is one reduction, at the end, and one
    # exponential per logit.
    m = tl.load(start + lane, mask=filled, other=0.0) * factor
    m = tl.where(filled, m, float("-inf"))
    r = tl.zeros((BLOCK,), tl.float32)
    u = tl.zeros((BLOCK,), tl.float32)
    for begin in range(BLOCK, columns, BLOCK):
        inside = begin + lane < columns
        z = tl.load(start + begin + lane, mask=inside, other=0.0) * factor
        rising = z > m
        gap = -tl.abs(z - m)
        e = tl.exp(gap)
        terms = 1.0 + r
        r = tl.where(inside, tl.where(rising, terms * e, r + e), r)
        u = tl.where(inside, tl.where(rising, (u + gap * terms) * e, u + gap * e), u)
        m = tl.where(inside & rising, z, m)

    # r leaves out one maximum. If several logits equal the maximum, each further one counts 1.
    top = tl.max(m, 0)
    largest = m == top
    gap = tl.where(filled, m - top, 0.0)
    weight = tl.where(filled, tl.exp(gap), 0.0)
    terms = 1.0 + r
    equal = tl.sum(largest.to(tl.float32), 0) - 1.0
    r_block = tl.sum(tl.where(largest, r, weight * terms), 0) + equal
    centered = tl.sum(weight * (u + gap * terms), 0)

    out = stats + row
    m0 = tl.load(out)
    r0 = tl.load(out + stats_stride)
    u0 = tl.load(out + 2 * stats_stride)
    m1, r1, u1 = merged_pair(m0, r0, u0, top, r_block, centered)
    tl.store(out, m1)
    tl.store(out + stats_stride, r1)
    tl.store(out + 2 * stats_stride, u1)
    column = tl.load(targets + row) - first
    owned = (column >= 0) & (column < columns)
    picked = tl.load(start + column, mask=owned, other=0.0) * factor
    tl.store(out + 3 * stats_stride, picked, mask=owned)


@triton.jit
def _logit_gradient_kernel(
    logits,
    row_stride,
    scale,
    targets,
    lse,
    grad_logprob,
    at_target,
    entropy,
    grad_entropy,
    high_term,
    low_term,
    out_stride,
    first,
    columns,
    ENTROPY: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    factor = tl.load(scale)
    z = tl.load(logits + row * row_stride + column, mask=inside, other=0.0) * factor
    target = tl.load(targets + row) - first
    log_p = z - tl.load(lse + row)
    p = tl.exp(log_p)
    dz = tl.where(column == target, tl.load(at_target + row), -p * tl.load(grad_logprob + row))
    if ENTROPY:
        dz -= tl.load(grad_entropy + row) * p * (log_p + tl.load(entropy + row))
    dz *= factor
    # The rounding error of the bf16 term is rounded to bf16 as well, so both terms together have 16 significant bits.
    rounded = dz.to(high_term.dtype.element_ty)
    tl.store(high_term + row * out_stride + column, rounded, mask=inside)
    if SPLIT:
        rounding_error = dz - rounded.to(tl.float32)
        tl.store(low_term + row * out_stride + column, rounding_error.to(low_term.dtype.element_ty), mask=inside)
