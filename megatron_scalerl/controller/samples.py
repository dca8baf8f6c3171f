"""From scored groups to the samples of a step, as the run's algorithm says."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_scalerl.algorithms.scalerl import ScaleRL, reward_spread
from megatron_scalerl.batching.assignment import SampleFacts
from megatron_scalerl.record import record
from megatron_scalerl.types import BlockRef, RolloutGroup


@record
class BatchPlan:
    """The samples of one optimizer step. Produced by `samples_of`; without samples there is no step."""

    samples: tuple[SampleFacts, ...]
    sources: tuple[tuple[BlockRef | None, int], ...]
    """[samples] where the group of the sample is stored, and the sample's position there."""
    advantages: Mapping[int, Mapping[int, float]]
    """Group id -> position of a trained completion in the group's block -> its advantage, by tokens their mean."""
    dropped: Mapping[int, str]
    """Group id -> why the group is not trained, one word."""
    stats: Mapping[str, float]
    """Counts for the metrics: groups, groups_kept, groups_dropped_REASON, completions, truncated_dropped,
    samples, loss_tokens, and advantage_std (standard deviation of the remaining centered rewards)."""


def samples_of(groups: Sequence[RolloutGroup], algorithm: ScaleRL) -> BatchPlan:
    """The completions to train on, with their advantages and token weights, which the parts of an episode share."""
    kept = []
    dropped = {}
    # Completions go first: a group is judged by the rewards that remain in it.
    trained = [trained_part(group, algorithm) for group in groups]
    for group in trained:
        reason = algorithm.drop_reason(group)
        if reason:
            dropped[group.group_id] = reason
        else:
            kept.append(group)
    samples = []
    sources = []
    advantages = algorithm.advantages(kept)
    for group, group_advantages, group_weights in zip(kept, advantages, algorithm.weights(kept), strict=True):
        members = zip(group.completions, group.positions, group_advantages, group_weights, strict=True)
        for completion, position, advantage, weight in members:
            start = 0  # of the part's tokens in the completion's
            for number, part in enumerate(completion.samples, position):
                of_part: float | tuple[float, ...]
                if isinstance(advantage, Sequence):
                    of_part = tuple(advantage[start : start + part.tokens])
                    start += part.tokens
                else:
                    of_part = advantage
                sample = SampleFacts(
                    prompt_token_ids=group.prompt.token_ids[: part.prompt_tokens],
                    tokens=part.tokens,
                    advantage=of_part,
                    token_weight=weight,
                )
                samples.append(sample)
                sources.append((group.stored, number))
    completions = sum(len(group.completions) for group in groups)
    stats = {
        "groups": len(groups),
        "groups_kept": len(kept),
        "completions": completions,
        "truncated_dropped": completions - sum(len(group.completions) for group in trained),
        "samples": len(samples),
        "loss_tokens": sum(completion.sampled_tokens for group in kept for completion in group.completions),
        "advantage_std": reward_spread(kept),
    }
    stats |= {f"groups_dropped_{reason}": count for reason, count in sorted(Counter(dropped.values()).items())}
    stats = {name: float(number) for name, number in stats.items()}
    return BatchPlan(
        samples=tuple(samples),
        sources=tuple(sources),
        advantages={
            group.group_id: dict(zip(group.positions, map(_mean, values))) for group, values in zip(kept, advantages)
        },
        dropped=dropped,
        stats=stats,
    )


def _mean(advantage: float | Sequence[float]) -> float:
    """The advantage of a completion; of several, one for each token, their mean."""
    return statistics.fmean(advantage) if isinstance(advantage, Sequence) else float(advantage)


def trained_part(group: RolloutGroup, algorithm: ScaleRL) -> RolloutGroup:
    """The group with the completions that are trained; it may be left with none."""
    chosen = [i for i, completion in enumerate(group.completions) if algorithm.trains(completion)]
    # Positions say where the completions are stored: they keep their numbers, with gaps.
    return replace(
        group,
        completions=tuple(group.completions[i] for i in chosen),
        positions=tuple(group.positions[i] for i in chosen),
        scores=tuple(group.scores[i] for i in chosen),
    )


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
    prefix = "groups_dropped_"
    parts = []
    for name, count in stats.items():
        if name.startswith(prefix):
            reason = name.removeprefix(prefix)
            parts.append(f"{count:.0f} of {stats['groups']:.0f} groups {_REASONS.get(reason, reason)}")
    if stats["truncated_dropped"]:
        parts.append(f"{stats['truncated_dropped']:.0f} of {stats['completions']:.0f} completions truncated")
    return ", ".join(parts)
