"""Token weights that turn the sum of a batch's token losses into one of three means.

The controller computes the weights once for the whole batch. Ranks and micro-batches then only add, and need no
common denominator.
"""

from collections.abc import Sequence
from typing import Literal

Reduction = Literal["prompt_mean", "sequence_mean", "token_mean"]


def token_weights(lengths: Sequence[Sequence[int]], reduction: Reduction) -> list[list[float]]:
    """For every completion of every group, the weight of each of the completion's loss-mask tokens.

    `lengths[p][i]` is |y_pi|, the number of loss-mask tokens of completion i of group p. N_eff is the number of
    groups. G_p is the number of completions of group p, and T_p is their number of loss-mask tokens. Source: Khatri
    et al. 2025, arXiv 2510.13786, section 3.2.

        prompt_mean    1 / (N_eff T_p)
        sequence_mean  1 / (N_eff G_p |y_pi|)
        token_mean     1 / sum_p T_p

    A completion without loss-mask tokens has weight 0. Raises ValueError for an unknown reduction.
    """
    groups = len(lengths)
    total = sum(sum(group) for group in lengths)
    result = []
    for group in lengths:
        if reduction == "prompt_mean":
            weights = [_inverse(groups * sum(group))] * len(group)
        elif reduction == "sequence_mean":
            weights = [_inverse(groups * len(group) * length) for length in group]
        elif reduction == "token_mean":
            weights = [_inverse(total)] * len(group)
        else:
            raise ValueError(
                f"loss.reduction is {reduction!r}; it has to be prompt_mean, sequence_mean or token_mean"
            )
        result.append([w if length else 0.0 for w, length in zip(weights, group)])
    return result


def _inverse(count: int) -> float:
    """1 / count; 0 for a count of 0."""
    return 1.0 / count if count else 0.0
