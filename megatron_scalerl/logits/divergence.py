"""The exact divergence of the policy from a second policy, over the whole vocabulary, in the chunks of a loss.

With log-probabilities s of the policy and t of the second policy at a position, given the prefix:

    reverse   KL(policy || second) = sum p_s (s - t)      d/dz_s = p_s (s - t - KL)
    forward   KL(second || policy) = sum p_t (t - s)      d/dz_s = p_s - p_t

The sums are over the vocabulary: nothing is estimated from the sampled token. The second policy has no gradient. The
prefixes come from the rollouts, which an older policy may have sampled.

The life of a chunk: the policy's logits are in memory for the loss; the second policy's logits are one GEMM more;
ranks exchange the second log-sum-exp and the sum; the gradient joins the gradient of the loss, before the two GEMMs
of the backward pass. Equal policies have the same bits in both logits, so divergence and gradient are exactly 0.
"""

from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_scalerl.logits.function import Call
from megatron_scalerl.logits.projection import no_columns
from megatron_scalerl.record import record
from megatron_scalerl.types import Float

Direction = Literal["reverse", "forward"]


@record
class SecondPolicy:
    """A policy without gradient, from which the policy's divergence is part of the loss."""

    hidden: Float[Tensor, "T H2"]
    """Hidden states of the same tokens: this rank's share under sequence parallelism."""
    weight: Float[Tensor, "rows H2"]
    """This rank's rows of the second policy's head, equal in number to the policy's rows, in hidden's dtype."""
    token_weights: Float[Tensor, " T"]
    """Weight of each token's divergence in the loss."""
    direction: Direction = "reverse"


class Divergence:
    """The divergence in the chunks of one call."""

    def __init__(self, call: Call, second: SecondPolicy, accumulator: torch.dtype, rows: int):
        """rows: tokens of the largest chunk."""
        self._call = call
        self._direction = second.direction
        count = call.shape.count
        self._p = replace(call.projection(second.hidden), weight=second.weight.detach()[:count])
        self.weights = call.with_loss(second.token_weights).to(accumulator)
        """[C] factors of the divergences of the tokens with loss."""
        self._second = self._p.hidden.new_empty((rows, count), dtype=accumulator)
        self._gradient = torch.empty_like(self._second)

    def of_chunk(self, rows: slice, logits: Tensor, stats: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """(divergence [C] of the chunk's tokens (nats), gradient [C, n] of the weighted sum in hidden @ weight.T).

        logits, stats: from `chunk_statistics`. lse: [C] over the whole vocabulary. The next call overwrites the
        gradient.
        """
        p = self._p.of_tokens(rows)
        t = self._second[: p.tokens]
        s = self._gradient[: p.tokens]
        stats_t = no_columns(p.tokens, t, t.dtype)
        if p.count:
            stats_t = self._call.backend.chunk_statistics(p, t)
        lse_t, _, _ = self._call.token_results(stats_t)
        # `chunk_statistics` of the backend torch leaves z - m in the logits.
        torch.sub(logits, (lse - stats[0])[:, None], out=s)
        t -= (lse_t - stats_t[0])[:, None]
        scale = (self.weights[rows] * p.scale)[:, None]
        if self._direction == "forward":
            p_t = t.exp()
            divergence = self._summed(torch.linalg.vecdot(p_t, t.sub_(s)))
            gradient = s.exp_().sub_(p_t)
        else:
            p_s = s.exp()
            gap = s.sub_(t)
            divergence = self._summed(torch.linalg.vecdot(p_s, gap))
            gradient = gap.sub_(divergence[:, None]).mul_(p_s)
        return divergence, gradient.mul_(scale)

    def _summed(self, values: Tensor) -> Tensor:
        """[C] the sum over all columns, the same bits on every rank: parts are added in the order of the ranks."""
        group = self._call.group
        if group is None or not len(values):
            return values
        parts = values.new_empty((group.size(), len(values)))
        dist.all_gather_into_tensor(parts.view(-1), values.contiguous(), group=group)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
