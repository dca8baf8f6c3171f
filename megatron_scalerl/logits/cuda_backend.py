"""The logit projection on a GPU: cuBLAS GEMMs with fp32 output, and Triton kernels over the rows.

The life of a block of logits, in a buffer that all blocks share:

1. A GEMM writes the logits, and `row_kernels.row_statistics` adds the block to the rows' statistics.
2. In the backward pass a GEMM writes the logits again, unless the workspace still holds them.
3. `row_kernels.logit_gradient` turns the logits into their gradient.
4. Two GEMMs add the products to the gradients of the head and of the hidden states.

Statistics use chunks of tokens with whole rows. Gradients use blocks of the vocabulary with all tokens. A block's
share of the head's gradient is then one GEMM over the tokens, directly into Megatron's main_grad. A product of two
bf16 numbers is exact in fp32 and tensor cores add in fp32, so bf16 operands run at tensor-core speed.

The Triton kernels also run on CPU tensors in Triton's interpreter; the GEMMs then cast blocks to fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_scalerl.logits.exact import add_product, fp32_products, set_product
from megatron_scalerl.logits.projection import Projection, TokenGradients, block_of, no_columns, slices
from megatron_scalerl.logits.row_kernels import logit_gradient, row_statistics
from megatron_scalerl.record import record

TOKEN_STEP = 128
COLUMN_STEP = 256
"""Tile of a Hopper GEMM: a block's tokens and columns are multiples of these two steps."""

FEWEST_TOKENS = 512
FEWEST_COLUMNS = 1024
"""Fewest tokens and columns with which a block's GEMM is not bound by memory bandwidth.

Rather than make smaller blocks, the backend splits tokens as well as columns."""

FEWEST_CHUNK_TOKENS = 1024
"""Fewest tokens of a chunk of whole rows.

Each chunk reads and writes the fp32 gradient of the head. With fewer tokens on an H100 this traffic takes longer than
the chunk's GEMM, and soon longer than the GEMM that computes the logits a second time."""

CHUNK_COLUMNS = 8192
"""Number of columns whose gradient is computed at a time, in a chunk of whole rows."""


@record
class _Side:
    """One side of a projection, the tokens or the columns. A block is a range of tokens by a range of columns."""

    size: int
    """Number of all tokens or columns."""
    min_size: int
    step: int
    cost: int = 0
    """Bytes of workspace per token or column, in addition to the block's elements."""

    def fitting(self, other_side: _Side, count: int, element: int, budget: int) -> int:
        """Most tokens or columns of this side in a block of `budget` bytes that has `count` columns or tokens of
        `other_side`. element: bytes for each element of the block."""
        return max(0, budget - count * other_side.cost) // (count * element + self.cost)


def _block(whole_side: _Side, split_side: _Side, element: int, budget: int) -> tuple[int, int]:
    """Sizes of a block on `whole_side` and `split_side`.

    The block has all of `whole_side`, unless the block would then have less than `min_size` of `split_side`.
    """
    count = split_side.fitting(whole_side, whole_side.size, element, budget)
    if count >= min(split_side.size, split_side.min_size):
        return whole_side.size, min(split_side.size, _multiple(count, split_side.step))
    count = min(split_side.size, split_side.min_size)
    if whole_side.fitting(split_side, count, element, budget) < min(whole_side.size, whole_side.step):
        count = min(split_side.size, split_side.step)
    fitting_count = whole_side.fitting(split_side, count, element, budget)
    assert fitting_count, f"a workspace of {budget} bytes is too small for a block"
    return min(whole_side.size, _multiple(fitting_count, whole_side.step)), count


def statistics_block(p: Projection) -> tuple[int, int]:
    """Tokens and columns of a block of the forward pass. A block has whole rows if the workspace allows."""
    tokens = _Side(size=p.tokens, min_size=FEWEST_TOKENS, step=TOKEN_STEP)
    columns = _Side(size=p.count, min_size=FEWEST_COLUMNS, step=COLUMN_STEP)
    count, rows = _block(columns, tokens, _logit_bytes(p), p.workspace_bytes)
    return rows, count


def gradient_block(p: Projection) -> tuple[int, int]:
    """Tokens and columns of a block of the backward pass. A block has all tokens if the workspace allows."""
    tokens, columns = _gradient_sides(p)
    return _block(tokens, columns, _logit_bytes(p) + _gradient_bytes(p), p.workspace_bytes)


def _gradient_sides(p: Projection) -> tuple[_Side, _Side]:
    cast = 0
    if _gradient_dtype(p) != p.hidden.dtype:
        cast = 4 * p.hidden.shape[1]
    tokens = _Side(size=p.tokens, min_size=FEWEST_TOKENS, step=TOKEN_STEP, cost=cast + 16)
    columns = _Side(size=p.count, min_size=FEWEST_COLUMNS, step=COLUMN_STEP, cost=cast)
    return tokens, columns


class CudaBackend:
    """The `projection.Backend` of cuBLAS and Triton."""

    name = "cuda"

    def workspace(self, p: Projection) -> int:
        """Bytes of the smallest block, TOKEN_STEP by COLUMN_STEP."""
        tokens, columns = _gradient_sides(p)
        rows = min(p.tokens, TOKEN_STEP)
        cols = min(p.count, COLUMN_STEP)
        elements = rows * cols * (_logit_bytes(p) + _gradient_bytes(p))
        return elements + rows * tokens.cost + cols * columns.cost

    def statistics(self, p: Projection) -> Tensor:
        """The statistics [4, T]: a GEMM and a row kernel for every chunk of tokens."""
        stats = no_columns(p.tokens, p.hidden, torch.float32)
        tokens, columns = statistics_block(p)
        # All blocks use the start of one buffer in turn.
        buffer = p.hidden.new_empty(tokens * columns, dtype=torch.float32)
        for rows in slices(p.tokens, tokens):
            part = p.of_tokens(rows)
            for cols in slices(p.count, columns):
                z = block_of(buffer, part.tokens, cols.stop - cols.start)
                _logits(part, part.hidden, p.weight[cols], z)
                row_statistics(z, part.scale, part.targets, p.first + cols.start, stats[:, rows])
        return stats

    def gradients(
        self, p: Projection, token_gradients: TokenGradients, grad_hidden: Tensor, grad_weight: Tensor | None
    ) -> None:
        """Recomputes the logits block by block, and adds each block's share to `grad_hidden` and `grad_weight`."""
        tokens, columns = gradient_block(p)
        logits = p.hidden.new_empty(tokens * columns, dtype=torch.float32)
        maker = _GradientMaker(p, token_gradients, tokens * columns)
        for cols in slices(p.count, columns):
            head = p.weight[cols]
            for rows in slices(p.tokens, tokens):
                hidden = p.hidden[rows]
                z = block_of(logits, hidden.shape[0], head.shape[0])
                _logits(p, hidden, head, z)
                maker.add(z, rows, cols, grad_hidden, grad_weight)

    def chunk_tokens(self, p: Projection) -> int:
        """Most tokens whose whole rows of logits fit the workspace, beside the gradient of CHUNK_COLUMNS columns."""
        columns = min(p.count, CHUNK_COLUMNS)
        token, column = _gradient_sides(p)
        per_token = _logit_bytes(p) * p.count + columns * _gradient_bytes(p) + token.cost
        room = max(0, p.workspace_bytes - columns * column.cost)
        fit = min(p.tokens, _multiple(room // per_token, TOKEN_STEP))
        if fit < min(p.tokens, FEWEST_CHUNK_TOKENS):
            return 0
        return fit

    def chunk_statistics(self, p: Projection, logits: Tensor) -> Tensor:
        """The statistics of a chunk. Afterwards `logits` holds the unscaled product hidden @ weight.T."""
        stats = no_columns(p.tokens, p.hidden, torch.float32)
        _logits(p, p.hidden, p.weight, logits)
        row_statistics(logits, p.scale, p.targets, p.first, stats)
        return stats

    def chunk_gradients(
        self,
        p: Projection,
        logits: Tensor,
        stats: Tensor,
        token_gradients: TokenGradients,
        grad_hidden: Tensor,
        grad_weight: Tensor | None,
        extra_gradient: Tensor | None = None,
    ) -> None:
        """Adds the chunk's share to `grad_hidden` and `grad_weight`, CHUNK_COLUMNS columns at a time."""
        assert extra_gradient is None
        maker = _GradientMaker(p, token_gradients, p.tokens * min(p.count, CHUNK_COLUMNS))
        for cols in slices(p.count, CHUNK_COLUMNS):
            maker.add(logits[:, cols], slice(0, p.tokens), cols, grad_hidden, grad_weight)


class _GradientMaker:
    """Computes the gradients of blocks of logits in buffers that all blocks share, and adds the products with
    `hidden` and `weight` to the gradients of the projection's inputs."""

    def __init__(self, p: Projection, token_gradients: TokenGradients, elements: int):
        self._p = p
        self._token_gradients = token_gradients.contiguous()
        # The target's gradient has the factor 1 - p. -expm1(log p) keeps the digits that 1 - exp(log p) would cancel.
        self._at_target = -torch.expm1(token_gradients.logprob) * token_gradients.grad_logprob
        dtype = _gradient_dtype(p)
        self._high_buffer: Tensor | None = None
        self._low_buffer: Tensor | None = None
        # An fp32 gradient overwrites the logits, and needs no buffer.
        if dtype != torch.float32:
            self._high_buffer = p.hidden.new_empty(elements, dtype=dtype)
        if p.grad_logits == "bf16x2":
            self._low_buffer = p.hidden.new_empty(elements, dtype=dtype)

    def add(self, z: Tensor, rows: slice, cols: slice, grad_hidden: Tensor, grad_weight: Tensor | None) -> None:
        """Computes the gradient of the block z [rows, cols] of logits, and adds the gradient's product with the head
        to `grad_hidden` and with the hidden states to `grad_weight`.

        `z` may be overwritten. The gradient's rounding error (bf16x2) enters the weight's gradient only.
        """
        part = self._p.of_tokens(rows)
        high_term = z
        low_term = None
        if self._high_buffer is not None:
            high_term = block_of(self._high_buffer, *z.shape)
        if self._low_buffer is not None:
            low_term = block_of(self._low_buffer, *z.shape)
        token_gradients = self._token_gradients.of_tokens(rows)
        first = part.first + cols.start
        logit_gradient(
            z,
            part.scale,
            part.targets,
            first,
            token_gradients,
            self._at_target[rows],
            high_term=high_term,
            low_term=low_term,
        )
        hidden = part.hidden.to(high_term.dtype)
        head = part.weight[cols].to(high_term.dtype)
        with fp32_products(hidden.device):
            if grad_weight is not None:
                if low_term is not None:
                    add_product(grad_weight[cols], low_term.t(), hidden)
                add_product(grad_weight[cols], high_term.t(), hidden)
            add_product(grad_hidden[rows], high_term, head)


def _logits(p: Projection, hidden: Tensor, head: Tensor, z: Tensor) -> None:
    """Writes the unscaled product hidden @ head.T into z [T, n], fp32."""
    with fp32_products(hidden.device):
        if p.round_logits:
            z.copy_(hidden @ head.t())
        else:
            set_product(z, hidden, head.t())


def _logit_bytes(p: Projection) -> int:
    """Bytes per logit: those of the fp32 value and, with `round_logits`, of the rounded product."""
    if p.round_logits:
        return 4 + p.hidden.itemsize
    return 4


def _gradient_dtype(p: Projection) -> torch.dtype:
    if p.grad_logits == "fp32":
        return torch.float32
    return p.hidden.dtype


def _gradient_bytes(p: Projection) -> int:
    """Bytes per logit that the gradient needs in addition. An fp32 gradient overwrites the logit, and needs none."""
    return {"bf16": 2, "bf16x2": 4, "fp32": 0}[p.grad_logits]


def _multiple(size: int, step: int) -> int:
    """The largest multiple of `step` that is at most `size`; `size` itself if it is below `step`."""
    if size < step:
        return size
    return size - size % step
