"""The metrics of one optimiser step: sums and maxima over the loss mask, reduced over all ranks once.

Each micro-batch adds to one vector of sums and one of maxima on the device; names and quotients come at the
end of the step. Nothing here takes part in the gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_scalerl.losses.inputs import LossInputs, LossOutput, log_ratio
from megatron_scalerl.trainer.staging import staged

STALENESS_BUCKETS: tuple[tuple[str, int], ...] = (("0", 0), ("1", 1), ("2", 2), ("3_4", 4), ("5_8", 8))
"""Name and largest staleness (optimiser steps) of each bucket; what is older falls in `over_8`."""

_SUMS = (
    "loss",
    "loss_tokens",
    "tokens",
    "entropy",
    "mismatch",
    "kl_k3",
    "capped",
    "weight",
    "weight_squared",
    "staleness",
)
_MAXIMA = ("mismatch", "weight", "staleness", "seconds")
_BUCKETS = tuple(name for name, _ in STALENESS_BUCKETS) + ("over_8",)


class Tally:
    """Running sums and maxima of one step on one rank."""

    def __init__(self, place: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS) + 2 * len(_BUCKETS), dtype=torch.float64, device=place)
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=place)
        self._edges = staged(torch.tensor([last for _, last in STALENESS_BUCKETS], dtype=torch.int32), place)

    @torch.no_grad()
    def add(self, inputs: LossInputs, output: LossOutput, entropy: Tensor, staleness: Tensor, places: Tensor) -> None:
        """Count one micro-batch: `entropy` [N] nats, `staleness` [N] optimiser steps, -1 off the loss mask.

        `places` [K] int64 is where the loss mask is True: a mask as an index would make the host count it first.
        """
        log_ratios = log_ratio(inputs).index_select(0, places).double()
        mismatch = (inputs.trainer_logprobs - inputs.rollout_logprobs).index_select(0, places).abs().double()
        weights = output.is_weights.index_select(0, places).double()
        age = staleness.index_select(0, places)
        totals = [
            output.loss.detach().double(),
            inputs.loss_mask.sum().double(),
            mismatch.new_zeros(()),
            entropy.index_select(0, places).sum(dtype=torch.float64),
            mismatch.sum(),
            (log_ratios.expm1() - log_ratios).sum(),
            output.capped.index_select(0, places).sum().double(),
            weights.sum(),
            weights.square().sum(),
            age.sum().double(),
        ]
        bucket = torch.bucketize(age.int(), self._edges)
        zeros = mismatch.new_zeros(len(_BUCKETS))
        counts = zeros.index_add(0, bucket, torch.ones_like(mismatch))
        self._sums += torch.cat([torch.stack(totals), counts, zeros.index_add(0, bucket, mismatch)])
        if mismatch.numel():
            seen = torch.stack([mismatch.max(), weights.max(), age.max().double()])
            self._maxima[:3] = self._maxima[:3].maximum(seen)

    def reduced(self, *, counts: bool, tokens: int, seconds: float) -> dict[str, float]:
        """The metrics over all ranks of the world; every rank must call it, and gets the same.

        `counts` is True on the one rank of each model replica that holds its log-probabilities, so that no
        token is counted twice. `tokens` is what that rank's batch holds with prompts, summed under that name;
        `seconds` this rank's wall time, of which the maximum comes back.
        """
        self._sums[_SUMS.index("tokens")].fill_(tokens)
        if not counts:
            self._sums.zero_()
        self._maxima[3].fill_(seconds)
        if dist.get_world_size() > 1:
            dist.all_reduce(self._sums)
            dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX)
        found = torch.cat([self._sums, self._maxima]).tolist()
        return _named(found[: len(self._sums)], found[len(self._sums) :])


def _named(sums: list[float], maxima: list[float]) -> dict[str, float]:
    """Means, shares and maxima by name, from reduced vectors; `loss` and `seconds` among them."""
    total = dict(zip(_SUMS, sums))
    largest = dict(zip(_MAXIMA, maxima))
    tokens = max(total["loss_tokens"], 1.0)
    squared = total["weight_squared"]
    metrics = {
        "loss": total["loss"],
        "seconds": largest["seconds"],
        "tokens": total["tokens"],
        "loss_tokens": total["loss_tokens"],
        "entropy": total["entropy"] / tokens,
        "mismatch_mean": total["mismatch"] / tokens,
        "mismatch_max": largest["mismatch"],
        "kl_k3": total["kl_k3"] / tokens,
        "capped_share": total["capped"] / tokens,
        "is_weight_mean": total["weight"] / tokens,
        "is_weight_max": largest["weight"],
        "ess": total["weight"] ** 2 / (tokens * squared) if squared else 0.0,
        "token_staleness_mean": total["staleness"] / tokens,
        "token_staleness_max": largest["staleness"],
    }
    counts = sums[len(_SUMS) : len(_SUMS) + len(_BUCKETS)]
    for name, count, mismatch in zip(_BUCKETS, counts, sums[len(_SUMS) + len(_BUCKETS) :]):
        if count:
            metrics[f"mismatch_staleness_{name}"] = mismatch / count
            metrics[f"loss_tokens_staleness_{name}"] = count
    return metrics
