"""From scored groups to samples: filters, group-centered advantages, their normalization, token weights.

Khatri et al. 2025, arXiv 2510.13786, eq. 2 (advantage) and section 3.2 (batch-level normalization, prompt mean). Not
specified in the paper and chosen here: the spread is the population standard deviation over one value per completion
that remains after filtering.
"""

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal

from megatron_scalerl.batching.assignment import SampleFacts
from megatron_scalerl.batching.filters import drop_truncated, drop_zero_variance
from megatron_scalerl.losses.reduction import Reduction, token_weights
from megatron_scalerl.record import record
from megatron_scalerl.types import BlockRef, RolloutGroup


@record
class BatchPlan:
    """The samples of one optimizer step. Produced by `samples_of`; without samples there is no step."""

    samples: tuple[SampleFacts, ...]
    sources: tuple[tuple[BlockRef | None, int], ...]
    """[samples] where the group of the sample is stored, and the sample's position there."""
    stats: Mapping[str, float]
    """Counts for the metrics: groups, groups_kept, groups_dropped_REASON, completions, truncated_dropped,
    samples, loss_tokens, and advantage_std (standard deviation of the remaining centered rewards)."""


def samples_of(
    groups: Sequence[RolloutGroup],
    *,
    normalize: Literal["batch", "prompt", "none"],
    truncated: Literal["exclude", "wrong"],
    zero_variance: bool,
    reduction: Reduction,
) -> BatchPlan:
    """The completions to train on, each with its advantage and its token weight, which the parts of an episode share.

    `truncated` "exclude" removes truncated completions from loss and group mean; "wrong" keeps them with the
    incorrect reward of their score. `zero_variance` True drops groups with equal rewards; False keeps them with
    advantage 0, and they count in the mean over prompts. Empty groups are dropped in either case.
    """
    # Truncated completions go first: a group is judged by the rewards that remain in it.
    kept = list(groups)
    excluded = 0
    if truncated == "exclude":
        kept, excluded = drop_truncated(groups)
    if zero_variance:
        kept, dropped = drop_zero_variance(kept)
    else:
        filled = [group for group in kept if group.completions]
        dropped = {"too_few": len(kept) - len(filled)}
        kept = filled
    rewards = [[score.reward for score in group.scores] for group in kept]
    advantages, spread = _advantages(rewards, normalize)
    # Weights count the groups and tokens that are left, N_eff prompts in section 3.2.
    lengths = [[completion.sampled_tokens for completion in group.completions] for group in kept]
    weights = token_weights(lengths, reduction)
    samples = []
    sources = []
    for group, group_advantages, group_weights in zip(kept, advantages, weights):
        members = zip(group.completions, group.positions, group_advantages, group_weights)
        for completion, position, advantage, weight in members:
            for number, part in enumerate(completion.samples, position):
                sample = SampleFacts(
                    prompt_token_ids=group.prompt.token_ids[: part.prompt_tokens],
                    tokens=part.tokens,
                    advantage=advantage,
                    token_weight=weight,
                )
                samples.append(sample)
                sources.append((group.stored, number))
    stats = {
        "groups": len(groups),
        "groups_kept": len(kept),
        "completions": sum(len(group.completions) for group in groups),
        "truncated_dropped": excluded,
        "samples": len(samples),
        "loss_tokens": sum(map(sum, lengths)),
        "advantage_std": spread,
    }
    for reason, count in sorted(dropped.items()):
        if count:
            stats[f"groups_dropped_{reason}"] = count
    stats = {name: float(number) for name, number in stats.items()}
    return BatchPlan(samples=tuple(samples), sources=tuple(sources), stats=stats)


_REASONS = {
    "all_incorrect": "all wrong",
    "all_correct": "all right",
    "equal_rewards": "with equal rewards",
    "too_few": "with fewer than two completions that are not truncated",
}


def why_empty(stats: Mapping[str, float]) -> str:
    """Why nothing of a batch is left to train on, from the counts of its plan.

    Example:
        >>> why_empty({"groups": 4, "groups_dropped_all_incorrect": 4, "completions": 32, "truncated_dropped": 0})
        '4 of 4 groups all wrong'
    """
    parts = []
    for reason, words in _REASONS.items():
        count = stats.get(f"groups_dropped_{reason}")
        if count:
            parts.append(f"{count:.0f} of {stats['groups']:.0f} groups {words}")
    if stats["truncated_dropped"]:
        parts.append(f"{stats['truncated_dropped']:.0f} of {stats['completions']:.0f} completions truncated")
    return ", ".join(parts)


def _advantages(
    rewards: list[list[float]], normalize: Literal["batch", "prompt", "none"]
) -> tuple[list[list[float]], float]:
    """Advantage of every completion, and the standard deviation over all centered rewards (0 if there are none)."""
    centered = [_centered(group) for group in rewards]
    flat = list(chain.from_iterable(centered))
    spread = statistics.pstdev(flat or [0.0])
    if normalize == "none":
        return centered, spread
    if normalize == "batch":
        return [_divided(group, spread) for group in centered], spread
    assert normalize == "prompt", normalize
    return [_divided(group, statistics.pstdev(group)) for group in centered], spread


def _centered(group: list[float]) -> list[float]:
    """Rewards minus their mean. Equal rewards give exact zeros, not the rounding error of their mean."""
    if len(set(group)) == 1:
        return [0.0] * len(group)
    mean = statistics.fmean(group)
    return [reward - mean for reward in group]


def _divided(values: list[float], spread: float) -> list[float]:
    """`values` over `spread`. With a spread of 0 every value is 0, and stays so."""
    return [value / (spread or 1.0) for value in values]
