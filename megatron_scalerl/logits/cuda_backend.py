"""The logit projection on a GPU: cuBLAS GEMMs with fp32 output into one reused block, Triton kernels over its rows.

Statistics use chunks of tokens with whole rows. Gradients use blocks of the vocabulary with all tokens: a block's
share of the head's gradient is then one GEMM over the tokens, directly into Megatron's main_grad. A product of two
bf16 numbers is exact in fp32 and tensor cores add in fp32, so bf16 operands run at tensor-core speed.

The Triton kernels also run on CPU tensors in Triton's interpreter; the GEMMs then cast their blocks to fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_scalerl.logits.exact import fp32_products
from megatron_scalerl.logits.projection import Projection, TokenGradients, block_of, no_columns, slices
from megatron_scalerl.logits.row_kernels import compiled, logit_gradient, row_statistics

TOKEN_STEP, COLUMN_STEP = 128, 256
"""Blocks are multiples of these: tiles of a Hopper GEMM."""

FEWEST_TOKENS, FEWEST_COLUMNS = 512, 1024
"""With a thinner block the GEMM is bound by memory: then the other side is split as well."""

FEWEST_CHUNK_TOKENS = 1024
"""Each chunk of whole rows reads and writes the fp32 gradient of the head. With fewer tokens on an H100 that takes
longer than the product itself, and soon than the product that two passes add (tools/estimate_logits.py)."""

CHUNK_COLUMNS = 8192
"""Columns whose gradient is computed at a time with whole rows of logits."""


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """Bytes of workspace per element, token and column of a block."""

    element: int
    token: int
    column: int

    @classmethod
    def of_statistics(cls, p: Projection) -> _Costs:
        return cls(element=_logits_dtype(p).itemsize, token=0, column=0)

    @classmethod
    def of_gradients(cls, p: Projection, *, summed_apart: bool) -> _Costs:
        """`summed_apart`: the head's gradient is narrower than fp32 and its sums have a buffer of their own."""
        cast = 4 * p.hidden.shape[1] if _gradient_dtype(p) != p.hidden.dtype else 0
        return cls(
            element=_logits_dtype(p).itemsize + _gradient_bytes(p),
            token=cast + 16,
            column=cast + (4 * p.hidden.shape[1] if summed_apart else 0),
        )

    def bytes(self, tokens: int, columns: int) -> int:
        return tokens * columns * self.element + tokens * self.token + columns * self.column

    def tokens_beside(self, columns: int, budget: int) -> int:
        return max(0, budget - columns * self.column) // (columns * self.element + self.token)

    def columns_beside(self, tokens: int, budget: int) -> int:
        return max(0, budget - tokens * self.token) // (tokens * self.element + self.column)


def statistics_block(p: Projection) -> tuple[int, int]:
    """Tokens and columns of a block of logits of the forward pass: whole rows if the workspace allows."""
    costs, budget = _Costs.of_statistics(p), p.workspace_bytes
    tokens = costs.tokens_beside(p.count, budget)
    if tokens >= min(p.tokens, FEWEST_TOKENS):
        return min(p.tokens, _multiple(tokens, TOKEN_STEP)), p.count
    tokens = min(p.tokens, FEWEST_TOKENS)
    if costs.columns_beside(tokens, budget) < min(p.count, COLUMN_STEP):
        tokens = min(p.tokens, TOKEN_STEP)
    columns = costs.columns_beside(tokens, budget)
    assert columns, f"a workspace of {budget} bytes"
    return tokens, min(p.count, _multiple(columns, COLUMN_STEP))


def gradient_block(p: Projection, *, summed_apart: bool) -> tuple[int, int]:
    """Tokens and columns of a block of the backward pass: all tokens if the workspace allows."""
    costs, budget = _Costs.of_gradients(p, summed_apart=summed_apart), p.workspace_bytes
    columns = costs.columns_beside(p.tokens, budget)
    if columns >= min(p.count, FEWEST_COLUMNS):
        return p.tokens, min(p.count, _multiple(columns, COLUMN_STEP))
    columns = min(p.count, FEWEST_COLUMNS)
    if costs.tokens_beside(columns, budget) < min(p.tokens, TOKEN_STEP):
        columns = min(p.count, COLUMN_STEP)
    tokens = costs.tokens_beside(columns, budget)
    assert tokens, f"a workspace of {budget} bytes"
    return min(p.tokens, _multiple(tokens, TOKEN_STEP)), columns


class CudaBackend:
    """See `projection.Backend`."""

    name = "cuda"

    def needs(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """A GPU (or Triton's interpreter) and operands that its kernels support."""
        if device.type != "cuda" and compiled():
            return "a CUDA GPU"
        if dtype not in (torch.bfloat16, torch.float32):
            return "operands in bfloat16 or float32"
        return None

    def workspace(self, projection: Projection) -> int:
        """Bytes of the smallest block, TOKEN_STEP by COLUMN_STEP."""
        p = projection
        costs = _Costs.of_gradients(p, summed_apart=p.hidden.dtype != torch.float32)
        return costs.bytes(min(p.tokens, TOKEN_STEP), min(p.count, COLUMN_STEP))

    def statistics(self, projection: Projection) -> Tensor:
        """The statistics [4, T]: a GEMM and a row kernel for every chunk of tokens."""
        p = projection
        stats = no_columns(p.tokens, p.hidden, torch.float32)
        if not p.tokens or not p.count:
            return stats
        tokens, columns = statistics_block(p)
        buffer = p.hidden.new_empty(tokens * columns, dtype=_logits_dtype(p))
        scale = _scale(p)
        with fp32_products(p.hidden.device):
            for rows in slices(p.tokens, tokens):
                part = p.of_tokens(rows)
                for cols in slices(p.count, columns):
                    z = block_of(buffer, part.tokens, cols.stop - cols.start)
                    _matmul(part.hidden, p.weight[cols].t(), z)
                    factor = scale[rows] if scale.dim() else scale
                    row_statistics(z, factor, part.targets, p.first + cols.start, stats[:, rows])
        return stats

    def gradients(
        self, projection: Projection, given: TokenGradients, grad_hidden: Tensor, grad_weight: Tensor | None
    ) -> None:
        """Recomputes the logits and adds to both gradients, one block of the vocabulary after the other."""
        p = projection
        if not p.tokens or not p.count:
            return
        narrow = grad_weight is not None and grad_weight.dtype != torch.float32
        tokens, columns = gradient_block(p, summed_apart=narrow)
        logits = p.hidden.new_empty(tokens * columns, dtype=_logits_dtype(p))
        maker = GradientMaker(p, given, tokens * columns)
        with fp32_products(p.hidden.device):
            for cols in slices(p.count, columns):
                head = p.weight[cols]
                total = _Total(p, grad_weight, cols, products=-(-p.tokens // tokens))
                for rows in slices(p.tokens, tokens):
                    hidden = p.hidden[rows]
                    z = block_of(logits, hidden.shape[0], head.shape[0])
                    _matmul(hidden, head.t(), z)
                    high, low = maker.make(z, rows, p.first + cols.start)
                    add_gradients(high, low, hidden, head, grad_hidden[rows], total.into)
                total.close()

    def chunk_tokens(self, projection: Projection) -> int:
        """Tokens whose whole rows of logits fit, with the gradient of CHUNK_COLUMNS columns."""
        columns = min(projection.count, CHUNK_COLUMNS)
        return self._chunk_tokens(projection, columns, columns * _gradient_bytes(projection, torch.float32))

    def _chunk_tokens(self, p: Projection, columns: int, beside: int) -> int:
        """The same with the gradient of `columns` columns at a time, in `beside` bytes per token."""
        costs = _Costs.of_gradients(p, summed_apart=p.hidden.dtype != torch.float32 and not _rounded_once(p))
        rounded = p.count * p.hidden.itemsize if _logits_dtype(p) != torch.float32 else 0
        per_token = 4 * p.count + beside + rounded + costs.token
        fit = min(p.tokens, _multiple(max(0, p.workspace_bytes - columns * costs.column) // per_token, TOKEN_STEP))
        return fit if fit >= min(p.tokens, FEWEST_CHUNK_TOKENS) else 0

    def chunk_statistics(self, projection: Projection, logits: Tensor) -> Tensor:
        """The statistics of a chunk; `logits` then holds hidden @ weight.T, not scaled."""
        p = projection
        stats = no_columns(p.tokens, p.hidden, torch.float32)
        if not p.tokens or not p.count:
            return stats
        with fp32_products(p.hidden.device):
            if _logits_dtype(p) == torch.float32:
                _matmul(p.hidden, p.weight.t(), logits)
            else:
                logits.copy_(p.hidden @ p.weight.t())
        row_statistics(logits, _scale(p), p.targets, p.first, stats)
        return stats

    def chunk_gradients(
        self,
        projection: Projection,
        logits: Tensor,
        stats: Tensor,
        given: TokenGradients,
        grad_hidden: Tensor,
        grad_weight: Tensor | None,
    ) -> None:
        """Adds to both gradients, CHUNK_COLUMNS at a time."""
        p = projection
        if not p.tokens or not p.count:
            return
        maker = GradientMaker(p, given, p.tokens * min(p.count, CHUNK_COLUMNS), logits_dtype=torch.float32)
        with fp32_products(p.hidden.device):
            for cols in slices(p.count, CHUNK_COLUMNS):
                total = _Total(p, grad_weight, cols, products=1)
                high, low = maker.make(logits[:, cols], slice(0, p.tokens), p.first + cols.start)
                add_gradients(high, low, p.hidden, p.weight[cols], grad_hidden, total.into)
                total.close()


class GradientMaker:
    """Gradients of blocks of logits, in buffers that all blocks share."""

    def __init__(self, p: Projection, given: TokenGradients, elements: int, logits_dtype: torch.dtype | None = None):
        self._p = p
        self._scale = _scale(p)
        self._lse, self._entropy = given.lse.contiguous(), given.entropy.contiguous()
        self._grad_logprob = given.grad_logprob.contiguous()
        self._grad_entropy = None if given.grad_entropy is None else given.grad_entropy.contiguous()
        # 1 - p of the target, without cancellation.
        self._at_target = -torch.expm1(given.logprob) * given.grad_logprob
        dtype = _gradient_dtype(p)
        in_place = dtype == (_logits_dtype(p) if logits_dtype is None else logits_dtype) == torch.float32
        self._high = None if in_place else p.hidden.new_empty(elements, dtype=dtype)
        self._low = p.hidden.new_empty(elements, dtype=dtype) if _halves(p) == 2 else None

    def make(self, z: Tensor, rows: slice, first: int) -> tuple[Tensor, Tensor | None]:
        """The gradient of block z [rows, columns] and, for bf16x2, its rounding error; may overwrite z."""
        high = z if self._high is None else block_of(self._high, *z.shape)
        low = None if self._low is None else block_of(self._low, *z.shape)
        logit_gradient(z, first=first, **self.of_tokens(rows), high=high, low=low)
        return high, low

    def of_tokens(self, rows: slice) -> dict[str, Any]:
        """The kernels' inputs per token."""
        return dict(
            scale=self._scale[rows] if self._scale.dim() else self._scale,
            targets=self._p.targets[rows],
            lse=self._lse[rows],
            grad_logprob=self._grad_logprob[rows],
            at_target=self._at_target[rows],
            entropy=self._entropy[rows],
            grad_entropy=None if self._grad_entropy is None else self._grad_entropy[rows],
        )


class _Total:
    """Accumulates one block of the head's gradient: in the gradient itself, or in fp32 if that is narrower."""

    def __init__(self, p: Projection, grad: Tensor | None, cols: slice, *, products: int):
        self._grad = None if grad is None else grad[cols]
        self.into = self._grad
        once = products == 1 and _rounded_once(p)
        if self._grad is not None and self._grad.dtype != torch.float32 and not once:
            self.into = torch.zeros_like(self._grad, dtype=torch.float32)

    def close(self) -> None:
        """Adds the fp32 sum, rounded once."""
        if self._grad is not None and self.into is not None and self.into is not self._grad:
            self._grad += self.into


def add_gradients(
    high: Tensor, low: Tensor | None, hidden: Tensor, head: Tensor, grad_hidden: Tensor, grad_weight: Tensor | None
) -> None:
    """The GEMMs of a block; the rounding error `low` enters the weight's gradient only."""
    hidden, head = hidden.to(high.dtype), head.to(high.dtype)
    if grad_weight is not None:
        if low is not None:
            _add_matmul(low.t(), hidden, grad_weight)
        _add_matmul(high.t(), hidden, grad_weight)
    _add_matmul(high, head, grad_hidden)


def _matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, summed in fp32 and rounded to out's dtype."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # the interpreter's CPU has no such product
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b, within the GEMM."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


def _logits_dtype(p: Projection) -> torch.dtype:
    return p.hidden.dtype if p.round_logits else torch.float32


def _gradient_dtype(p: Projection) -> torch.dtype:
    return torch.float32 if p.grad_logits == "fp32" else p.hidden.dtype


def _halves(p: Projection) -> int:
    return 2 if p.grad_logits == "bf16x2" and p.hidden.dtype != torch.float32 else 1


def _rounded_once(p: Projection) -> bool:
    """A block's gradient of the head is one product in the operands' type: the GEMM itself rounds its sum."""
    return _halves(p) == 1 and _gradient_dtype(p) == p.hidden.dtype


def _gradient_bytes(p: Projection, logits_dtype: torch.dtype | None = None) -> int:
    """Bytes of the gradient per logit, beside the logit itself."""
    dtype = _gradient_dtype(p)
    in_place = dtype == (_logits_dtype(p) if logits_dtype is None else logits_dtype) == torch.float32
    return 0 if in_place else dtype.itemsize * _halves(p)


def _scale(p: Projection) -> Tensor:
    return p.scale.to(p.hidden.device, torch.float32).contiguous()


def _multiple(size: int, step: int) -> int:
    return size - size % step if size > step else size
