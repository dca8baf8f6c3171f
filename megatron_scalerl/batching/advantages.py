"""From scored groups to samples: filters, group-centered advantages, their normalization, token weights.

Khatri et al. 2025, arXiv 2510.13786, eq. 2 (advantage) and section 3.2 (batch-level normalization, prompt mean). Not
specified in the paper and chosen here: the spread is the population standard deviation over one value per completion
that remains after filtering.
"""

import statistics
from collections.abc import Mapping, Sequence
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
    """Of each sample where its group is stored, and its position there."""
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
    """The completions to train on, each with its advantage and its token weight.

    `truncated` "exclude" removes truncated completions from loss and group mean; "wrong" keeps them with the
    incorrect reward of their score. `zero_variance` True drops groups with equal rewards; False keeps them with
    advantage 0, and they count in the mean over prompts. Empty groups are dropped in either case.
    """
    kept, excluded = drop_truncated(groups) if truncated == "exclude" else (list(groups), 0)
    dropped: dict[str, int] = {}
    if zero_variance:
        kept, dropped = drop_zero_variance(kept)
    else:
        empty = [group for group in kept if not group.completions]
        kept = [group for group in kept if group.completions]
        dropped = {"too_few": len(empty)} if empty else {}
    advantages, spread = _advantages([[s.reward for s in group.scores] for group in kept], normalize)
    lengths = [[completion.sampled_tokens for completion in group.completions] for group in kept]
    weights = token_weights(lengths, reduction)
    samples = tuple(
        SampleFacts(
            prompt_token_ids=group.prompt.token_ids,
            tokens=completion.tokens,
            advantage=advantages[p][i],
            token_weight=weights[p][i],
        )
        for p, group in enumerate(kept)
        for i, completion in enumerate(group.completions)
    )
    stats = {
        "groups": float(len(groups)),
        "groups_kept": float(len(kept)),
        "completions": float(sum(len(group.completions) for group in groups)),
        "truncated_dropped": float(excluded),
        "samples": float(len(samples)),
        "loss_tokens": float(sum(map(sum, lengths))),
        "advantage_std": spread,
        **{f"groups_dropped_{reason}": float(count) for reason, count in sorted(dropped.items())},
    }
    sources = tuple((group.stored, position) for group in kept for position in group.positions)
    return BatchPlan(samples=samples, sources=sources, stats=stats)


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
    counts = {reason: stats.get(f"groups_dropped_{reason}", 0.0) for reason in _REASONS}
    parts = [f"{count:.0f} of {stats['groups']:.0f} groups {_REASONS[r]}" for r, count in counts.items() if count]
    if stats["truncated_dropped"]:
        parts.append(f"{stats['truncated_dropped']:.0f} of {stats['completions']:.0f} completions truncated")
    return ", ".join(parts)


def _advantages(
    rewards: list[list[float]], normalize: Literal["batch", "prompt", "none"]
) -> tuple[list[list[float]], float]:
    """Advantage of every completion, and the standard deviation over all centered rewards (0 if there are none)."""
    centered = [_centered(group) for group in rewards]
    flat = [a for group in centered for a in group]
    spread = statistics.pstdev(flat) if flat else 0.0
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
    """`values` over `spread`; zeros for a spread of 0, since then every value is 0."""
    return [value / spread for value in values] if spread else [0.0] * len(values)
