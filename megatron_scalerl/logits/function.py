"""The logit projection as an autograd function, one for all backends.

Statistics of this rank's columns -> one all-gather -> the same merge on every rank, so that results are bitwise
equal on all ranks -> only log-sum-exp, log-probability and entropy are saved; backward recomputes the logits, unless
the caller lets them stay in the workspace and they all fit.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_scalerl.logits.projection import (
    Backend,
    Projection,
    TokenGradients,
    merged,
    no_columns,
    part_of,
    results,
)
from megatron_scalerl.record import record


@record
class Call:
    """A call of the projection with checked arguments. Produced by `arguments.checked`."""

    backend: Backend
    group: dist.ProcessGroup | None
    """Tensor-parallel group; None for a single rank."""
    sequence_parallel: bool
    """hidden is this rank's share of the tokens, in rank order."""
    tokens: int
    """T, all tokens, with and without loss."""
    kept: Tensor | None
    """[C] int64 positions of the tokens with loss; None: all."""
    shape: Projection
    """What the backend computes for the kept tokens, with hidden states of that shape without memory: under sequence
    parallelism this rank has a part of them."""
    main_grad: bool
    """The weight's gradient is added directly to weight.main_grad."""
    keep_logits: bool
    """The logits stay in memory until the backward pass if the workspace holds all of them."""

    def projection(self, hidden: Tensor) -> Projection:
        """The backend's input; gathers hidden under sequence parallelism."""
        if self.sequence_parallel and self.group is not None:
            gathered = hidden.new_empty((self.tokens, hidden.shape[1]))
            dist.all_gather_into_tensor(gathered, hidden.contiguous(), group=self.group)
            hidden = gathered
        return replace(self.shape, hidden=self.with_loss(hidden).detach())

    def places(self, device: torch.device) -> Tensor:
        """[C] int64 positions of the tokens with loss."""
        if self.kept is None:
            return torch.arange(self.tokens, device=device)
        return self.kept

    def with_loss(self, values: Tensor) -> Tensor:
        """[C, ...] of the tokens with loss, from [T, ...]."""
        if self.kept is None:
            return values
        return values.index_select(0, self.kept)

    def chunk_tokens(self, weight: Tensor) -> int:
        """Tokens of a chunk with whole rows, equal on all ranks, which gather after each: padding counts as rows."""
        return self.backend.chunk_tokens(replace(self.shape, weight=weight.detach()))

    def statistics(self, projection: Projection, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """The backend's statistics, and what `chunk_gradients` needs of all logits if they stay in memory."""
        p = projection
        if p.empty:
            return no_columns(p.tokens, p.hidden, p.accumulator), None
        if not (self.keep_logits and self.chunk_tokens(weight) >= p.tokens):
            return self.backend.statistics(p), None
        logits = p.hidden.new_empty((p.tokens, p.count), dtype=p.accumulator)
        return self.backend.chunk_statistics(p, logits), logits

    def merged(self, stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-sum-exp, log-probability and entropy of the kept tokens, from this rank's statistics."""
        # Without tokens on this rank there are none on any: nobody waits in the all-gather.
        if self.group is None or not stats.shape[1]:
            return results(stats)
        parts = stats.new_empty((self.group.size(), *stats.shape))
        dist.all_gather_into_tensor(parts.view(-1), stats.contiguous().view(-1), group=self.group)
        return results(merged(parts))

    def at_all_tokens(self, values: Tensor) -> Tensor:
        """[T, ...] with 0 where there is no loss."""
        if self.kept is None:
            return values
        return values.new_zeros((self.tokens, *values.shape[1:])).index_copy_(0, self.kept, values)

    def grad_of_hidden(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of the given `hidden`, from this rank's columns and the kept tokens.

        Summed over the group in the accumulator's dtype, then rounded.
        """
        if self.group is None:
            return self.at_all_tokens(grad.to(dtype))
        if not self.sequence_parallel:
            # Reduced before it is spread over all tokens, so that fewer numbers travel.
            if grad.shape[0]:
                dist.all_reduce(grad, group=self.group)
            return self.at_all_tokens(grad.to(dtype))
        grad = self.at_all_tokens(grad)
        share = grad.new_empty((self.tokens // self.group.size(), grad.shape[1]))
        dist.reduce_scatter_tensor(share, grad, group=self.group)
        return share.to(dtype)


class TokenLogprobs(torch.autograd.Function):
    """See `api.token_logprobs`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, [tokens] each."""
        stats, logits = call.statistics(call.projection(hidden), weight)
        lse, logprob, entropy = call.merged(stats)
        ctx.save_for_backward(hidden, weight, lse, logprob, entropy)
        ctx.call = call
        ctx.kept = None
        if logits is not None:
            ctx.kept = (logits, stats)
        if not call.shape.entropy:
            entropy = torch.zeros_like(entropy)
        reported = call.at_all_tokens(entropy)
        if not call.shape.entropy_grad:
            ctx.mark_non_differentiable(reported)
        return call.at_all_tokens(logprob), reported

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Recomputes the logits that were not kept."""
        hidden, weight, lse, logprob, entropy = ctx.saved_tensors
        call: Call = ctx.call
        projection = call.projection(hidden)
        grad_logprob = call.with_loss(grads[0])
        grad_entropy = None
        if projection.entropy_grad:
            grad_entropy = call.with_loss(grads[1])
        given = TokenGradients(
            lse=lse, logprob=logprob, entropy=entropy, grad_logprob=grad_logprob, grad_entropy=grad_entropy
        )
        grad_hidden = torch.zeros_like(projection.hidden, dtype=projection.accumulator)
        grad_weight = None
        # Backends add the head's gradient in the accumulator's dtype: to main_grad itself, or to zeros.
        if ctx.needs_input_grad[1] and call.main_grad and weight.main_grad.dtype == projection.accumulator:
            grad_weight = weight.main_grad
        elif ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=projection.accumulator)
        into = part_of(grad_weight, slice(projection.count))
        kept = ctx.kept
        # The backend overwrites the logits: another backward pass has to recompute them.
        ctx.kept = None
        if kept is not None:
            logits, stats = kept
            call.backend.chunk_gradients(projection, logits, stats, given, grad_hidden, into)
        elif not projection.empty:
            call.backend.gradients(projection, given, grad_hidden, into)
        # In fp32 the backend has added to main_grad itself: no second copy of the head's gradient.
        if grad_weight is not None and call.main_grad:
            if grad_weight is not weight.main_grad:
                weight.main_grad += grad_weight
            grad_weight = added_to_main_grad(weight)
        elif grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return call.grad_of_hidden(grad_hidden, hidden.dtype), grad_weight, None


def added_to_main_grad(weight: Tensor) -> Tensor:
    """Tells Megatron's DDP that weight.main_grad contains this gradient, and returns a placeholder for autograd.

    DDP's hook runs only if a gradient arrives, and adds it unless `grad_added_to_main_grad` is set. A weight with
    `zero_out_wgrad` (an embedding tied within one stage) is added anyway, because autograd has summed the placeholder
    with the embedding's own gradient: there it must be 0. As in megatron/core/tensor_parallel/layers.py, where a
    linear layer fuses the accumulation.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)
