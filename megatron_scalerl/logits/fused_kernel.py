"""Statistics of a projection in one Triton kernel: a GEMM whose tiles of logits never leave the registers.

A program owns a tile of tokens and a contiguous range of the vocabulary (a run). It multiplies one tile after another
and merges each into the tokens' statistics. Memory: four numbers per token and run. Concurrent programs cover a few
tiles of tokens (`GROUP`) times all runs, so that both operands' tiles stay in the L2 cache.

The logit projection on a GPU with a fused forward pass: its logits never reach memory.

For passes that need log-probabilities only, and for workspaces too small for an efficient cuBLAS block. Gradients are
those of `cuda_backend`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_scalerl.logits.cuda_backend import CudaBackend
from megatron_scalerl.logits.projection import Projection, merged, no_columns
from megatron_scalerl.logits.row_kernels import merged_pair


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tile of one GEMM step, and the number of programs that share the vocabulary."""

    tokens: int
    columns: int
    width: int
    """Elements of the hidden dimension."""
    warps: int
    stages: int
    runs: int
    """Parts of the vocabulary; 8 keep a GPU of 132 processors busy from 2,048 tokens on."""


BF16_TILES = Tiles(tokens=128, columns=256, width=64, warps=8, stages=3, runs=8)
"""An fp32 accumulator of 128 registers per thread, three stages of 48 KiB of shared memory (Hopper)."""

FP32_TILES = Tiles(tokens=64, columns=64, width=32, warps=4, stages=3, runs=8)
"""fp32 operands use scalar units: TF32 would round them."""

GROUP = 16
"""Tiles of tokens that share the vocabulary's tiles in the L2 cache."""

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Logit of a target outside this rank's columns."""

FEWEST_PROGRAMS = 528
"""With few tokens there are more runs of the vocabulary, up to four waves over 132 processors."""


def fused_statistics(projection: Projection, tiles: Tiles | None = None) -> Tensor:
    """Statistics [4, T] fp32 of `projection.Backend`; operands bf16 or fp32, at least one token and one column."""
    tokens, width = projection.hidden.shape
    assert tokens > 0 and projection.count > 0
    if tiles is None:
        tiles = FP32_TILES if projection.hidden.dtype == torch.float32 else BF16_TILES
    token_tiles = triton.cdiv(tokens, tiles.tokens)
    # The statistics of all runs and their merge fit the workspace.
    affordable = max(1, projection.workspace_bytes // (8 * 4 * tokens))
    runs = min(max(tiles.runs, FEWEST_PROGRAMS // token_tiles), affordable)
    columns_per_run = triton.cdiv(triton.cdiv(projection.count, runs), tiles.columns) * tiles.columns
    runs = triton.cdiv(projection.count, columns_per_run)
    hidden, weight = rows_contiguous(projection.hidden), rows_contiguous(projection.weight)
    out = torch.empty((runs, 4, tokens), dtype=torch.float32, device=hidden.device)
    _fused_statistics_kernel[(token_tiles * runs,)](
        hidden,
        hidden.stride(0),
        weight,
        weight.stride(0),
        projection.scale,
        projection.scale.dim(),
        projection.targets,
        out,
        tokens,
        projection.count,
        width,
        projection.first,
        columns_per_run,
        runs,
        ROUND=projection.round_logits,
        ENTROPY=projection.entropy,
        WHOLE=width % tiles.width == 0,
        GROUP=GROUP,
        BLOCK_T=tiles.tokens,
        BLOCK_V=tiles.columns,
        BLOCK_H=tiles.width,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return merged(out) if runs > 1 else out[0]


def rows_contiguous(matrix: Tensor) -> Tensor:
    """The matrix with contiguous rows."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


@triton.jit
def _tile(
    rows,
    words,
    known,
    inside,
    width,
    WHOLE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """[BLOCK_T, BLOCK_V] of hidden @ weight.T in fp32; 0 where not `known` [BLOCK_T, 1] or `inside` [1, BLOCK_V].

    rows, words: pointers [BLOCK_T, 1] and [1, BLOCK_V] to the first column of hidden's and weight's rows.
    """
    acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for begin in range(0, width, BLOCK_H):
        k = begin + tl.arange(0, BLOCK_H)
        in_a = known
        in_b = inside
        if not WHOLE:
            in_a = in_a & (k < width)[None, :]
            in_b = in_b & (k < width)[:, None]
        a = tl.load(rows + k[None, :], mask=in_a, other=0.0)
        b = tl.load(words + k[:, None], mask=in_b, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _tile_statistics(z, inside, ENTROPY: tl.constexpr):
    """m, r, u of each row of a tile; r excludes the maximum's own term, further equal maxima count 1 each."""
    z = tl.where(inside, z, float("-inf"))
    top = tl.max(z, 1)
    gap = z - top[:, None]
    e = tl.exp(gap)
    largest = gap == 0.0
    others = tl.sum(tl.where(largest, 0.0, e), 1) + (tl.sum(largest.to(tl.float32), 1) - 1.0)
    centered = tl.zeros_like(top)
    if ENTROPY:
        centered = tl.sum(tl.where(inside, e * gap, 0.0), 1)
    return top, others, centered


@triton.jit
def _fused_statistics_kernel(
    hidden,
    hidden_stride,
    weight,
    weight_stride,
    scale,
    scale_stride,
    targets,
    out,
    tokens,
    columns,
    width,
    first,
    columns_per_run,
    runs,
    ROUND: tl.constexpr,
    ENTROPY: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    program = tl.program_id(0)
    group = program // (GROUP * runs)
    in_group = program % (GROUP * runs)
    size = tl.minimum(GROUP, (tokens + BLOCK_T - 1) // BLOCK_T - group * GROUP)
    token = (group * GROUP + in_group % size) * BLOCK_T + tl.arange(0, BLOCK_T)
    run = in_group // size

    known = token < tokens
    rows = hidden + token.to(tl.int64)[:, None] * hidden_stride
    factor = tl.load(scale + token * scale_stride, mask=known, other=1.0)
    target = tl.load(targets + token, mask=known, other=-1) - first
    m = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    r = tl.full((BLOCK_T,), -1.0, tl.float32)
    u = tl.zeros((BLOCK_T,), tl.float32)
    picked = tl.full((BLOCK_T,), LOWEST, tl.float32)
    for begin in range(run * columns_per_run, tl.minimum(columns, (run + 1) * columns_per_run), BLOCK_V):
        column = begin + tl.arange(0, BLOCK_V)
        inside = (column < columns)[None, :]
        words = weight + column.to(tl.int64)[None, :] * weight_stride
        z = _tile(rows, words, known[:, None], inside, width, WHOLE, BLOCK_T, BLOCK_V, BLOCK_H)
        if ROUND:
            z = z.to(hidden.dtype.element_ty).to(tl.float32)
        z *= factor[:, None]
        hit = (column[None, :] == target[:, None]) & inside
        picked = tl.maximum(picked, tl.max(tl.where(hit, z, LOWEST), 1))
        top, others, centered = _tile_statistics(z, inside, ENTROPY)
        m, r, u = merged_pair(m, r, u, top, others, centered)

    base = out + run.to(tl.int64) * 4 * tokens + token
    tl.store(base, m, mask=known)
    tl.store(base + tokens, r, mask=known)
    tl.store(base + 2 * tokens, u, mask=known)
    tl.store(base + 3 * tokens, picked, mask=known)


class TritonBackend(CudaBackend):
    """See `projection.Backend`."""

    name = "triton"

    def statistics(self, projection: Projection) -> Tensor:
        """The statistics [4, T], in one kernel."""
        p = projection
        if not p.tokens or not p.count:
            return no_columns(p.tokens, p.hidden, p.accumulator)
        return fused_statistics(p)
