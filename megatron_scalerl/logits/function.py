"""The logit projection as an autograd function for all backends.

The forward pass computes the statistics of this rank's columns. One all-gather exchanges them. Every rank merges them
in the same way, so that results are bitwise equal on all ranks. Only log-sum-exp, log-probability and entropy are
saved for the backward pass, which recomputes the logits. With `keep_logits` the logits are kept as well, if the
workspace holds all of them.
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
    merged_statistics,
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
    """True: `hidden` is this rank's share of the tokens. The shares follow each other in rank order."""
    tokens: int
    """T, the number of all tokens, with and without loss."""
    loss_places: Tensor | None
    """[C] int64 positions of the tokens with loss; None: all tokens have loss."""
    shape: Projection
    """The projection of the tokens with loss, without their hidden states.

    `hidden` has the right shape and no memory of its own, because under sequence parallelism this rank has only a
    share until `projection` gathers all."""
    main_grad: bool
    """True: the weight's gradient is added directly to weight.main_grad."""
    keep_logits: bool
    """True: the logits stay in memory until the backward pass, if the workspace holds all of them."""

    def projection(self, hidden: Tensor) -> Projection:
        """The backend's input, with the hidden states of the tokens with loss.

        Under sequence parallelism the call gathers the hidden states of all ranks.
        """
        if self.sequence_parallel and self.group is not None:
            gathered = hidden.new_empty((self.tokens, hidden.shape[1]))
            dist.all_gather_into_tensor(gathered, hidden.contiguous(), group=self.group)
            hidden = gathered
        return replace(self.shape, hidden=self.with_loss(hidden).detach())

    def places(self, device: torch.device) -> Tensor:
        """[C] int64 positions of the tokens with loss."""
        if self.loss_places is None:
            return torch.arange(self.tokens, device=device)
        return self.loss_places

    def with_loss(self, values: Tensor) -> Tensor:
        """The values [C, ...] of the tokens with loss, selected from the values [T, ...] of all tokens."""
        if self.loss_places is None:
            return values
        return values.index_select(0, self.loss_places)

    def chunk_tokens(self, weight: Tensor) -> int:
        """Tokens of a chunk with whole rows.

        All ranks of the group gather after each chunk, and so need chunks of equal size. So the size is computed with
        the head's padding rows, of which ranks have different numbers.
        """
        return self.backend.chunk_tokens(replace(self.shape, weight=weight.detach()))

    def statistics(self, projection: Projection, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """The backend's statistics, and the logits for `chunk_gradients` if they stay in memory, else None."""
        p = projection
        if p.empty:
            return no_columns(p.tokens, p.hidden, p.accumulator), None
        if not (self.keep_logits and self.chunk_tokens(weight) >= p.tokens):
            return self.backend.statistics(p), None
        logits = p.hidden.new_empty((p.tokens, p.count), dtype=p.accumulator)
        return self.backend.chunk_statistics(p, logits), logits

    def token_results(self, stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-sum-exp, log-probability and entropy of the tokens with loss, over all ranks' columns."""
        # All ranks have the same tokens. If there are none, every rank skips the all-gather and no rank waits.
        if self.group is None or not stats.shape[1]:
            return results(stats)
        parts = stats.new_empty((self.group.size(), *stats.shape))
        dist.all_gather_into_tensor(parts.view(-1), stats.contiguous().view(-1), group=self.group)
        return results(merged_statistics(parts))

    def at_all_tokens(self, values: Tensor) -> Tensor:
        """The values [C, ...] of the tokens with loss in a tensor [T, ...] that is 0 for all other tokens."""
        if self.loss_places is None:
            return values
        return values.new_zeros((self.tokens, *values.shape[1:])).index_copy_(0, self.loss_places, values)

    def grad_of_hidden(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of the caller's `hidden`.

        `grad` is the sum over this rank's columns, for the tokens with loss. The sum over the ranks is made in the
        accumulator's dtype, and is then rounded to `dtype`.
        """
        if self.group is None:
            return self.at_all_tokens(grad.to(dtype))
        if not self.sequence_parallel:
            # The sum over the ranks comes before `at_all_tokens` adds rows of zeros, so that fewer numbers travel.
            if grad.shape[0]:
                dist.all_reduce(grad, group=self.group)
            return self.at_all_tokens(grad.to(dtype))
        grad = self.at_all_tokens(grad)
        share = grad.new_empty((self.tokens // self.group.size(), grad.shape[1]))
        dist.reduce_scatter_tensor(share, grad, group=self.group)
        return share.to(dtype)


class TokenLogprobs(torch.autograd.Function):
    """The autograd function of `api.token_logprobs`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Log-probabilities [tokens] and entropies [tokens]."""
        stats, logits = call.statistics(call.projection(hidden), weight)
        lse, logprob, entropy = call.token_results(stats)
        ctx.save_for_backward(hidden, weight, lse, logprob, entropy)
        ctx.call = call
        ctx.kept_logits = None
        if logits is not None:
            ctx.kept_logits = (logits, stats)
        if not call.shape.entropy:
            entropy = torch.zeros_like(entropy)
        reported = call.at_all_tokens(entropy)
        if not call.shape.entropy_grad:
            ctx.mark_non_differentiable(reported)
        return call.at_all_tokens(logprob), reported

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The gradients of hidden and weight, from kept or recomputed logits."""
        hidden, weight, lse, logprob, entropy = ctx.saved_tensors
        call: Call = ctx.call
        projection = call.projection(hidden)
        grad_logprob = call.with_loss(grads[0])
        grad_entropy = None
        if projection.entropy_grad:
            grad_entropy = call.with_loss(grads[1])
        token_gradients = TokenGradients(
            lse=lse, logprob=logprob, entropy=entropy, grad_logprob=grad_logprob, grad_entropy=grad_entropy
        )
        grad_hidden = torch.zeros_like(projection.hidden, dtype=projection.accumulator)
        grad_weight = None
        # A backend adds the head's gradient in the accumulator's dtype: to a main_grad of that dtype, else to zeros.
        if ctx.needs_input_grad[1] and call.main_grad and weight.main_grad.dtype == projection.accumulator:
            grad_weight = weight.main_grad
        elif ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=projection.accumulator)
        grad_rows = part_of(grad_weight, slice(projection.count))
        kept_logits = ctx.kept_logits
        # The backend overwrites the logits, so a second backward pass has to recompute them.
        ctx.kept_logits = None
        if kept_logits is not None:
            logits, stats = kept_logits
            call.backend.chunk_gradients(projection, logits, stats, token_gradients, grad_hidden, grad_rows)
        elif not projection.empty:
            call.backend.gradients(projection, token_gradients, grad_hidden, grad_rows)
        # A main_grad of the accumulator's dtype already contains the gradient: the backend has added to it.
        if grad_weight is not None and call.main_grad:
            if grad_weight is not weight.main_grad:
                weight.main_grad += grad_weight
            grad_weight = added_to_main_grad(weight)
        elif grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return call.grad_of_hidden(grad_hidden, hidden.dtype), grad_weight, None


def added_to_main_grad(weight: Tensor) -> Tensor:
    """Tells Megatron's DDP that weight.main_grad contains this gradient, and returns a placeholder for autograd.

    DDP's hook runs only if a gradient arrives, and adds the gradient unless `grad_added_to_main_grad` is set. An
    embedding tied within one stage has `zero_out_wgrad`, and DDP adds its gradient anyway. Autograd has then summed
    the placeholder with the embedding's gradient, so the placeholder must be 0. Source: the linear layers of
    megatron/core/tensor_parallel/layers.py with fused accumulation.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)
