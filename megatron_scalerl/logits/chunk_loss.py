"""A loss that is a sum over tokens, computed while a chunk's logits are in memory.

The logits are computed once, so there are three GEMMs instead of four. The forward pass computes the gradients of the
loss itself. The backward pass multiplies these gradients by the gradient that arrives for the loss. Under tensor
parallelism there is one small all-gather per chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_scalerl.logits.divergence import Divergence, SecondPolicy
from megatron_scalerl.logits.function import Call, added_to_main_grad
from megatron_scalerl.logits.projection import TokenGradients, no_columns, part_of, slices

ChunkLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function (log-probabilities [C], entropies [C], places [C]) -> summed loss of these tokens.

Places are int64 positions among all tokens of the call. The result is a scalar, differentiable in log-probabilities
and entropies. A token's loss must not depend on other tokens: each token is passed once, in chunks of any size."""

SCALED = 2**22
"""Number of elements of the head's gradient that `_scaled` multiplies and rounds at a time (16 MiB in fp32)."""


class TokenLoss(torch.autograd.Function):
    """The autograd function of `api.token_loss`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, loss: ChunkLoss, call: Call, second: SecondPolicy | None
    ) -> tuple[Tensor, ...]:
        """The loss, log-probabilities, entropies, and divergences from the second policy; the last three [tokens]."""
        p = call.projection(hidden)
        size = call.chunk_tokens(weight)
        if second is not None:
            # A divergence needs four more matrices as large as the chunk's logits, two of the four only briefly.
            size //= 5
        size = max(1, size)
        logits = p.hidden.new_empty((min(size, p.tokens), p.count), dtype=p.accumulator)
        grad_hidden = None
        grad_weight = None
        if any(ctx.needs_input_grad):
            grad_hidden = torch.zeros_like(p.hidden, dtype=p.accumulator)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=p.accumulator)
        # The head's padding rows keep the gradient 0.
        grad_rows = part_of(grad_weight, slice(p.count))
        total = p.hidden.new_zeros((), dtype=p.accumulator)
        logprobs = p.hidden.new_zeros(p.tokens, dtype=p.accumulator)
        entropies = torch.zeros_like(logprobs)
        divergences = torch.zeros_like(logprobs)
        divergence = None
        if second is not None:
            divergence = Divergence(call, second, p.accumulator, len(logits))
        places = call.places(p.hidden.device)
        for rows in slices(p.tokens, size):
            part = p.of_tokens(rows)
            block = logits[: part.tokens]
            stats = no_columns(part.tokens, block, p.accumulator)
            if p.count:
                stats = call.backend.chunk_statistics(part, block)
            lse, logprobs[rows], entropies[rows] = call.token_results(stats)
            value, token_gradients = _differentiated(loss, call, lse, logprobs[rows], entropies[rows], places[rows])
            total += value
            extra_gradient = None
            if divergence is not None:
                divergences[rows], extra_gradient = divergence.of_chunk(rows, block, stats, lse)
                total += divergence.weights[rows] @ divergences[rows]
            if grad_hidden is not None and p.count:
                # The next chunk overwrites the logits, so the gradients are computed now.
                call.backend.chunk_gradients(
                    part, block, stats, token_gradients, grad_hidden[rows], grad_rows, extra_gradient
                )
        # The workspace is freed before the gradient is summed over the ranks.
        del logits, divergence
        if grad_hidden is not None:
            grad_hidden = call.grad_of_hidden(grad_hidden, p.accumulator)
        ctx.save_for_backward(weight, grad_hidden, grad_weight)
        ctx.call = call
        ctx.dtype = hidden.dtype
        if not p.entropy:
            entropies.zero_()
        reported = tuple(map(call.at_all_tokens, (logprobs, entropies, divergences)))
        ctx.mark_non_differentiable(*reported)
        return total, *reported

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `hidden` and `weight` that the forward pass computed, multiplied by the gradient of the
        loss and then rounded once."""
        weight, grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        result = None
        if grad_weight is not None and ctx.call.main_grad:
            weight.main_grad.addcmul_(grad_weight, scale)
            result = added_to_main_grad(weight)
        elif grad_weight is not None:
            result = _scaled(grad_weight, scale, torch.empty_like(weight))
        return (grad_hidden * scale).to(ctx.dtype), result, None, None, None


def _scaled(grad: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """grad * scale, rounded into `out` part by part. In one piece, a CPU would allocate the whole unrounded
    product."""
    for rows in slices(grad.shape[0], max(1, SCALED // max(1, grad.shape[1]))):
        torch.mul(grad[rows], scale, out=out[rows])
    return out


def _differentiated(
    loss: ChunkLoss, call: Call, lse: Tensor, logprob: Tensor, entropy: Tensor, places: Tensor
) -> tuple[Tensor, TokenGradients]:
    """The loss of one chunk, and the loss's gradients with respect to log-probabilities and entropies."""
    leaf = logprob.detach().clone().requires_grad_()
    entropies = entropy.detach().clone().requires_grad_(call.shape.entropy_grad)
    with torch.enable_grad():
        value = loss(leaf, entropies, places)
    inputs = [leaf]
    if call.shape.entropy_grad:
        inputs.append(entropies)
    # With `materialize_grads` an input that the loss ignores has the gradient 0 instead of None.
    grads = torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)
    token_gradients = TokenGradients(
        lse=lse, logprob=logprob, entropy=entropy, grad_logprob=grads[0], grad_entropy=next(iter(grads[1:]), None)
    )
    return value.detach(), token_gradients
