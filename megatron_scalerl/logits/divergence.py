"""The exact divergence of the policy from a second policy, computed in the chunks of a loss.

s and t are the log-probabilities under the policy and under the second policy at a position, given the prefix:

    reverse   KL(policy || second) = sum p_s (s - t)      d/dz_s = p_s (s - t - KL)
    forward   KL(second || policy) = sum p_t (t - s)      d/dz_s = p_s - p_t

The sums are over the whole vocabulary: nothing is estimated from the sampled token. The second policy has no
gradient. The prefixes come from the rollouts, which an older policy may have sampled.

The life of a chunk:

1. The policy's logits are in memory for the loss. One more GEMM computes the second policy's logits.
2. Ranks exchange the second policy's log-sum-exp and the divergence's sum.
3. The gradient is added to the gradient of the loss, before the two GEMMs of the backward pass.

Equal policies have the same bits in both logits, so divergence and gradient are exactly 0.
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
    """A policy without gradient. The trained policy's divergence from it is part of the loss."""

    hidden: Float[Tensor, "T H2"]
    """The second policy's hidden states of the same tokens; under sequence parallelism this rank's share."""
    weight: Float[Tensor, "rows H2"]
    """This rank's rows of the second policy's head: as many as of the policy's head, in hidden's dtype."""
    token_weights: Float[Tensor, " T"]
    """Weight of each token's divergence in the loss."""
    direction: Direction = "reverse"


class Divergence:
    """Computes the divergence from the second policy in the chunks of one call of `api.token_loss`."""

    def __init__(self, call: Call, second: SecondPolicy, accumulator: torch.dtype, rows: int):
        """rows: tokens of the largest chunk."""
        self._call = call
        self._direction = second.direction
        count = call.shape.count
        self._p = replace(call.projection(second.hidden), weight=second.weight.detach()[:count])
        self.weights = call.with_loss(second.token_weights).to(accumulator)
        """[C] weights of the divergences of the tokens with loss."""
        self._second = self._p.hidden.new_empty((rows, count), dtype=accumulator)
        self._gradient = torch.empty_like(self._second)

    def of_chunk(self, rows: slice, logits: Tensor, stats: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The divergences [C] (nats) of a chunk's tokens, and a gradient [C, n].

        The second result is the gradient of the weighted sum of divergences with respect to hidden @ weight.T; the
        next call overwrites this tensor. logits, stats: from `chunk_statistics`. lse: log-sum-exp [C] over the whole
        vocabulary.
        """
        p = self._p.of_tokens(rows)
        t = self._second[: p.tokens]
        s = self._gradient[: p.tokens]
        stats_t = no_columns(p.tokens, t, t.dtype)
        if p.count:
            stats_t = self._call.backend.chunk_statistics(p, t)
        lse_t, _, _ = self._call.token_results(stats_t)
        # `chunk_statistics` of the backend torch has left z - m in `logits` (z: logit, m: the row's maximum).
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
        """[C] sums over the columns of all ranks, from sums `values` [C] over this rank's columns.

        Every rank adds the ranks' parts in the same order, and so gets the same bits.
        """
        group = self._call.group
        if group is None or not len(values):
            return values
        parts = values.new_empty((group.size(), len(values)))
        dist.all_gather_into_tensor(parts.view(-1), values.contiguous(), group=group)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
