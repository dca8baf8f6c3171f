"""The logit projection in plain PyTorch: any device, chunked over tokens, vocabulary-parallel.

Each rank reduces its columns to four numbers per token (maximum m, r = sum of exp(z - m) over all columns but
that of the maximum, u = sum exp(z - m) (z - m), and the target's logit where it owns it); one all-gather
brings them together and every rank merges them in rank order, so that the results are bitwise equal on all
ranks. m starts from the row itself, not from 0: rows whose logits are all far below 0 stay finite. The maximum
is left out of r so that log1p(r) keeps the log-probability of a token that is almost certain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

CHUNK_ELEMENTS = 2**24
"""Default size of one block of logits (elements; 64 MiB in fp32)."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How `TokenLogprobs` computes; see `logits.api.token_logprobs`."""

    group: dist.ProcessGroup | None
    round_logits: bool
    entropy: bool
    entropy_grad: bool
    vocab_size: int | None
    chunk_tokens: int


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """This rank's part of the vocabulary."""

    first: int
    count: int
    """Columns that are not padding."""


def _columns(weight: torch.Tensor, options: Options) -> _Columns:
    rows = weight.shape[0]
    rank, size = (0, 1) if options.group is None else (options.group.rank(), options.group.size())
    true_size = rows * size if options.vocab_size is None else options.vocab_size
    assert 0 < true_size <= rows * size, f"vocabulary of {true_size} in {rows * size} rows"
    return _Columns(first=rank * rows, count=max(0, min(rows, true_size - rank * rows)))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Projection:
    """Blocks of logits of this rank's columns."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, options: Options):
        self.columns = _columns(weight, options)
        self.accumulator = _accumulator(hidden.dtype)
        self.gemm_dtype = hidden.dtype if options.round_logits else self.accumulator
        self.hidden = hidden
        self.weight = weight[: self.columns.count].to(self.gemm_dtype)
        self.scale = scale.to(self.accumulator)
        self.chunks = [
            slice(start, min(start + options.chunk_tokens, hidden.shape[0]))
            for start in range(0, hidden.shape[0], options.chunk_tokens)
        ]

    def scale_of(self, chunk: slice) -> torch.Tensor:
        """1 / temperature, to multiply [chunk, columns] by."""
        return self.scale if self.scale.dim() == 0 else self.scale[chunk, None]

    def logits(self, chunk: slice) -> torch.Tensor:
        """[chunk, columns] logits over temperature, in the accumulator's dtype."""
        z = self.hidden[chunk].to(self.gemm_dtype) @ self.weight.t()
        return z.to(self.accumulator) * self.scale_of(chunk)

    def owned(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column, in a chunk, of the targets that lie on this rank."""
        local = targets - self.columns.first
        rows = ((local >= 0) & (local < self.columns.count)).nonzero()[:, 0]
        return rows, local[rows]


def _statistics(projection: _Projection, targets: torch.Tensor) -> torch.Tensor:
    """[4, T]: m, r, u and the target's logit, of this rank's columns."""
    lowest = torch.finfo(projection.accumulator).min
    tokens = projection.hidden.shape[0]
    out = projection.hidden.new_zeros((4, tokens), dtype=projection.accumulator)
    out[0] = lowest
    out[1] = -1.0  # no column at all: 1 + r = 0
    out[3] = lowest
    if projection.columns.count == 0:
        return out
    for chunk in projection.chunks:
        z = projection.logits(chunk)
        rows, columns = projection.owned(targets[chunk])
        m, largest = z.max(dim=1)
        out[3, chunk.start + rows] = z[rows, columns]
        z -= m[:, None]
        e = z.exp().scatter_(1, largest[:, None], 0.0)
        out[0, chunk], out[1, chunk] = m, e.sum(dim=1)
        out[2, chunk] = e.mul_(z).sum(dim=1)
    return out


def _merge(stats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-sum-exp, target log-probability and entropy [T] from the ranks' [p, 4, T], summed in rank order."""
    m, rest, u, target = stats.unbind(1)
    top, owner = m.max(dim=0)
    others, centred = torch.zeros_like(top), torch.zeros_like(top)
    for rank in range(m.shape[0]):
        terms = 1.0 + rest[rank]
        gap = torch.where(terms > 0, m[rank] - top, torch.zeros_like(top))
        weight = gap.exp()
        others = others + torch.where(owner == rank, rest[rank], weight * terms)
        centred = centred + weight * (u[rank] + gap * terms)
    log_total = others.log1p()
    return top + log_total, (target.amax(dim=0) - top) - log_total, log_total - centred / (1.0 + others)


class TokenLogprobs(torch.autograd.Function):
    """See `logits.api.token_logprobs`; saves only the inputs, the log-sum-exp and the entropy."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: torch.Tensor,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stats = _statistics(_Projection(hidden, weight, scale, options), targets)
        if options.group is None:
            gathered = stats[None]
        else:
            parts = [torch.empty_like(stats) for _ in range(options.group.size())]
            dist.all_gather(parts, stats, group=options.group)
            gathered = torch.stack(parts)
        lse, logprob, entropy = _merge(gathered)
        ctx.save_for_backward(hidden, weight, targets, scale, lse, logprob, entropy)
        ctx.options = options
        if not options.entropy:
            entropy = torch.zeros_like(logprob)
        if not options.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, scale, lse, logprob, entropy = ctx.saved_tensors
        options: Options = ctx.options
        projection = _Projection(hidden, weight, scale, options)
        grad_hidden = hidden.new_zeros(hidden.shape, dtype=projection.accumulator)
        grad_weight = weight.new_zeros(weight.shape, dtype=projection.accumulator)
        rows_of_weight = grad_weight[: projection.columns.count]
        for chunk in projection.chunks if projection.columns.count else ():
            log_p = projection.logits(chunk).sub_(lse[chunk, None])
            grad_entropy = grads[1][chunk, None] if options.entropy_grad else None
            dz = _grad_logits(
                projection, log_p, targets[chunk], logprob[chunk], entropy[chunk], grads[0][chunk], grad_entropy
            )
            dz = (dz * projection.scale_of(chunk)).to(projection.gemm_dtype)
            grad_hidden[chunk] = (dz @ projection.weight).to(projection.accumulator)
            rows_of_weight += (dz.t() @ hidden[chunk].to(projection.gemm_dtype)).to(projection.accumulator)
        if options.group is not None:
            dist.all_reduce(grad_hidden, group=options.group)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None, None


def _grad_logits(
    projection: _Projection,
    log_p: torch.Tensor,
    targets: torch.Tensor,
    logprob: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprob: torch.Tensor,
    grad_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """[chunk, columns] gradient: g (1_target - p) for the log-probability, -g p (log p + H) for the entropy."""
    rows, columns = projection.owned(targets)
    p = log_p.exp()
    dz = -p * grad_logprob[:, None]
    # 1 - p of the target without cancellation.
    dz[rows, columns] = -torch.expm1(logprob[rows]) * grad_logprob[rows]
    if grad_entropy is not None:
        dz -= grad_entropy * p * (log_p + entropy[:, None])
    return dz
