"""The logit projection in plain PyTorch, for any device, in blocks of tokens by columns.

The life of a block:

1. `_logits` multiplies into the shared buffer, and `_row_statistics` computes the statistics.
2. In the backward pass `_logits` fills the buffer again, and `_to_gradient` turns the logits into their gradient.
3. `_add_gradients` adds the products to the gradients of the head and of the hidden states.

The vocabulary is the outer loop. So a block of the head is cast once, and the block's gradient is one GEMM over a
chunk of tokens. Each block's statistics are merged into the running statistics. Operations after a GEMM work in
place, on tiles of rows that stay in a CPU's cache.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from megatron_scalerl.logits.exact import add_product, bf16_may_be_faster, fp32_products, set_product
from megatron_scalerl.logits.projection import (
    Projection,
    TokenGradients,
    block_of,
    merged_statistics,
    no_columns,
    part_of,
    slices,
)
from megatron_scalerl.record import record

SMALLEST = (4, 4)
"""Tokens and columns of the smallest block."""
TILE = 2**18
"""Number of elements of a block that are processed together after a GEMM (1 MiB in fp32)."""
LARGEST = 2**23
"""Number of elements of the largest block of logits on a CPU. Larger blocks were not faster."""
LARGEST_CHUNK = 2**25
"""Number of elements of the largest chunk of whole rows on a CPU (`chunk_tokens`).

It is larger than a block, because each chunk adds once to the whole gradient of the head."""


@record
class _Costs:
    """Bytes of workspace that a block needs per element, per token and per column."""

    element: int
    """Bytes of a logit and, for bf16x2, of the first of the gradient's two bf16 terms."""
    token: int
    """Bytes of a token's running statistics, before and after a block, and of its cast hidden state."""
    column: int
    """Bytes, for each column, of the head's row in the accumulator's type and of the cast row."""
    scratch: int
    """Upper bound on the bytes of all temporary tensors of one tile."""

    def bytes(self, tokens: int, columns: int) -> int:
        scratch = min(self.scratch, 2 * self.element * tokens * columns)
        return tokens * columns * self.element + tokens * self.token + columns * self.column + scratch


def _costs(p: Projection) -> _Costs:
    """The bytes of workspace that blocks of the projection `p` need."""
    item = p.accumulator.itemsize
    row = item * p.hidden.shape[1]
    element = item
    column = 0
    if p.hidden.dtype != p.accumulator:
        column = row
    if p.round_logits or p.grad_logits == "bf16x2":
        element += 2
    token = 16 * item
    if _casts(p):
        token += row
        column += row
    return _Costs(element=element, token=token, column=column, scratch=2 * item * min(TILE, p.tokens * p.count))


def blocks(p: Projection) -> tuple[int, int]:
    """Tokens and columns of a block. Blocks are nearly square, and as large as the workspace and LARGEST allow."""
    costs = _costs(p)
    block = (min(p.tokens, SMALLEST[0]), min(p.count, SMALLEST[1]))
    limit = p.tokens * p.count
    if p.hidden.device.type == "cpu":
        limit = LARGEST
    while True:
        tokens, columns = block
        # The shorter side doubles first. Once a side is complete, only the other side grows.
        more_tokens = (min(2 * tokens, p.tokens), columns)
        more_columns = (tokens, min(2 * columns, p.count))
        for larger in sorted([more_tokens, more_columns], key=max):
            if larger != block and math.prod(larger) <= limit and costs.bytes(*larger) <= p.workspace_bytes:
                block = larger
                break
        else:
            return block


class TorchBackend:
    """The `projection.Backend` in plain PyTorch."""

    name = "torch"

    def workspace(self, p: Projection) -> int:
        """Bytes of the smallest block, SMALLEST."""
        return _costs(p).bytes(min(p.tokens, SMALLEST[0]), min(p.count, SMALLEST[1]))

    def statistics(self, p: Projection) -> Tensor:
        """The statistics [4, T], merged block by block."""
        stats = no_columns(p.tokens, p.hidden, p.accumulator)
        for rows, cols, _, _, part, z in _logit_blocks(p):
            stats[:, rows] = merged_statistics(torch.stack([stats[:, rows], _row_statistics(part, cols, z)]))
        return stats

    def gradients(
        self, p: Projection, token_gradients: TokenGradients, grad_hidden: Tensor, grad_weight: Tensor | None
    ) -> None:
        """Recomputes the logits block by block, and adds each block's share to `grad_hidden` and `grad_weight`."""
        for rows, cols, hidden, head, part, dz in _logit_blocks(p):
            _to_gradient(part, cols, dz, token_gradients.of_tokens(rows), token_gradients.lse[rows])
            _add_gradients(part, dz, hidden, head, grad_hidden[rows], part_of(grad_weight, cols))

    def chunk_tokens(self, p: Projection) -> int:
        """Most tokens of a chunk with whole rows. On a CPU a chunk has at most LARGEST_CHUNK elements."""
        costs = _costs(p)
        # The memory of the head's cast columns is subtracted, which is at most a quarter of the workspace.
        budget = p.workspace_bytes
        if _casts(p):
            budget -= _head_columns(p) * costs.column
        per_token = costs.token + costs.element * p.count
        # The scratch memory is that of one tile, or of the whole chunk if the chunk is smaller than a tile.
        fit = max((budget - costs.scratch) // per_token, budget // (per_token + 2 * p.accumulator.itemsize * p.count))
        if p.hidden.device.type == "cpu":
            fit = min(fit, max(1, LARGEST_CHUNK // max(1, p.count)))
        return max(0, min(p.tokens, fit))

    def chunk_statistics(self, p: Projection, logits: Tensor) -> Tensor:
        """The statistics of a chunk. Afterwards `logits` holds z - m (z: logit, m: the row's maximum)."""
        for _, cols, hidden, head in _operands(p, p.tokens, _head_columns(p)):
            _logits(p, hidden, head, logits[:, cols])
        return _row_statistics(p, slice(0, p.count), logits)

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
        """Overwrites `logits` with their gradient, and adds the chunk's share to `grad_hidden` and `grad_weight`."""
        _to_gradient(p, slice(0, p.count), logits, token_gradients, token_gradients.lse - stats[0])
        if extra_gradient is not None:
            logits += extra_gradient
        for _, cols, hidden, head in _operands(p, p.tokens, _head_columns(p)):
            _add_gradients(p, logits[:, cols], hidden, head, grad_hidden, part_of(grad_weight, cols))


class _Operands:
    """Gives blocks of rows of one GEMM operand: the hidden states, or the head.

    If GEMMs need cast operands (`_casts`), a buffer holds the latest cast block. size: most rows of a block.
    """

    def __init__(self, p: Projection, values: Tensor, size: int):
        self._values = values
        self._buffer: Tensor | None = None
        self._cast: slice | None = None
        if _casts(p):
            self._buffer = values.new_empty((size, values.shape[1]), dtype=p.accumulator)

    def block(self, rows: slice) -> Tensor:
        """The rows `rows` of the operand, cast if GEMMs need cast operands. The tensor is valid until the next
        call."""
        values = self._values[rows]
        if self._buffer is None:
            return values
        operand = self._buffer[: values.shape[0]]
        # Inner loops ask for the same block several times, and the last cast block is kept for them.
        if rows != self._cast:
            operand.copy_(values)
            self._cast = rows
        return operand


def _operands(p: Projection, tokens: int, columns: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """(token range, column range, hidden states of the tokens, head's rows for the columns) of every block of at most
    `tokens` by `columns` logits. The tensors are valid until the next block."""
    hiddens = _Operands(p, p.hidden, tokens)
    heads = _Operands(p, p.weight, columns)
    for cols in slices(p.count, columns):
        head = heads.block(cols)
        for rows in slices(p.tokens, tokens):
            yield rows, cols, hiddens.block(rows), head


def _logit_blocks(p: Projection) -> Iterator[tuple[slice, slice, Tensor, Tensor, Projection, Tensor]]:
    """The values of `_operands`, the projection of the tokens, and the logits, for every block of the size `blocks`.

    The tensors are valid until the next block, and the caller may overwrite the logits.
    """
    size = blocks(p)
    buffer = p.hidden.new_empty(math.prod(size), dtype=p.accumulator)
    for rows, cols, hidden, head in _operands(p, *size):
        part = p.of_tokens(rows)
        z = block_of(buffer, part.tokens, head.shape[0])
        _logits(part, hidden, head, z)
        yield rows, cols, hidden, head, part, z


def _casts(p: Projection) -> bool:
    """Whether GEMMs need bf16 operands cast to fp32: on CPUs, which have no GEMM of bf16 operands with fp32 output,
    and with grad_logits "fp32"."""
    return p.hidden.dtype != p.accumulator and (p.hidden.device.type == "cpu" or p.grad_logits == "fp32")


def _head_columns(p: Projection) -> int:
    """Number of the head's columns that a chunk of whole rows casts at a time.

    The cast columns take at most a quarter of the workspace.
    """
    if not _casts(p):
        return p.count
    return min(p.count, 4096, max(SMALLEST[1], p.workspace_bytes // (4 * _costs(p).column)))


def _products(p: Projection, *, of_bf16: bool = True) -> AbstractContextManager[None]:
    faster = of_bf16 and p.hidden.dtype == torch.bfloat16 and bf16_may_be_faster()
    return fp32_products(p.hidden.device, of_bf16=faster)


def _logits(p: Projection, hidden: Tensor, head: Tensor, z: Tensor) -> None:
    """Writes scale * hidden @ head.T into z."""
    with _products(p):
        if p.round_logits:
            z.copy_(p.hidden @ head.to(p.hidden.dtype).t())
        else:
            set_product(z, hidden, head.t())
    # On an accelerator the scale is always multiplied, because a comparison would make the host wait.
    if p.scale.device.type != "cpu" or p.scale != 1.0:
        z *= p.scale


def _tiles(z: Tensor) -> Iterator[slice]:
    return slices(z.shape[0], max(1, TILE // z.shape[1]))


def _scratch(z: Tensor) -> Tensor:
    """A buffer that all tiles share. Allocated for each tile, it could cost a page fault per 4 KiB every time."""
    return z.new_empty((min(z.shape[0], max(1, TILE // z.shape[1])), z.shape[1]))


def _row_statistics(p: Projection, cols: slice, z: Tensor) -> Tensor:
    """The statistics [4, T] of a block of logits z. The call leaves z - m in the block (m: the row's maximum)."""
    out = no_columns(p.tokens, z, p.accumulator)
    owned, column = p.owned(cols)
    out[3] = torch.where(owned, z.gather(1, column)[:, 0], out[3])
    scratch = _scratch(z)
    for tile in _tiles(z):
        zt = z[tile]
        m, largest = zt.max(dim=1)
        zt -= m[:, None]
        # The maximum's own 1 is left out, because a sum with it would round small terms away.
        e = torch.exp(zt, out=scratch[: zt.shape[0]]).scatter_(1, largest[:, None], 0.0)
        out[0, tile] = m
        out[1, tile] = e.sum(dim=1)
        if p.entropy:
            out[2, tile] = torch.linalg.vecdot(e, zt)
    return out


def _to_gradient(p: Projection, cols: slice, z: Tensor, token_gradients: TokenGradients, log_total: Tensor) -> None:
    """Overwrites z with the gradient dz.

    z holds logits, possibly minus the maximum m. `log_total` [T] is the number with which z - log_total is the
    log-probability.
    """
    g = token_gradients.grad_logprob * p.scale
    owned, column = p.owned(cols)
    g_entropy = None
    scratch = z[:0]
    if token_gradients.grad_entropy is not None:
        g_entropy = token_gradients.grad_entropy * p.scale
        scratch = _scratch(z)
    for tile in _tiles(z):
        log_p = z[tile].sub_(log_total[tile, None])
        if g_entropy is None:
            log_p.exp_().mul_(-g[tile, None])
            continue
        p_tile = torch.exp(log_p, out=scratch[: log_p.shape[0]])
        # These operations turn `log_p` into -p (g + g_entropy (log p + entropy)); g: gradient of the log-probability.
        log_p.add_(token_gradients.entropy[tile, None])
        log_p.mul_(g_entropy[tile, None])
        log_p.add_(g[tile, None])
        log_p.mul_(p_tile).neg_()
    # The target's gradient has the factor 1 - p. -expm1(log p) keeps the digits that 1 - exp(log p) would cancel.
    dz = -torch.expm1(token_gradients.logprob) * g
    if g_entropy is not None:
        dz -= g_entropy * token_gradients.logprob.exp() * (token_gradients.logprob + token_gradients.entropy)
    z.scatter_(1, column, torch.where(owned, dz, z.gather(1, column)[:, 0])[:, None])


def _add_gradients(
    p: Projection, dz: Tensor, hidden: Tensor, head: Tensor, grad_hidden: Tensor, grad_weight: Tensor | None
) -> None:
    """Adds dz @ head to grad_hidden and dz.T @ hidden to grad_weight, with dz in the precision
    `Projection.grad_logits`.

    The call overwrites dz.
    """
    exact = p.grad_logits == "fp32"
    with _products(p, of_bf16=not exact):
        if not exact and (p.grad_logits == "bf16x2" or not _casts(p)):
            first = dz.to(p.hidden.dtype)
            if p.grad_logits == "bf16x2" and grad_weight is not None:
                # With bf16x2 the rounding error of dz is the second term in the product for the head's gradient.
                dz -= first
                rounding_error = dz
                if not _casts(p):
                    rounding_error = dz.to(first.dtype)
                add_product(grad_weight, rounding_error.t(), hidden)
            if _casts(p):
                dz.copy_(first)
            else:
                dz = first
        add_product(grad_hidden, dz, head)
        if grad_weight is not None:
            add_product(grad_weight, dz.t(), hidden)
