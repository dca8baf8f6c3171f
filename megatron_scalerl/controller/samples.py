"""From scored groups to the samples of a step, as the run's algorithm says."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_scalerl.algorithms.scalerl import ScaleRL, reward_spread
from megatron_scalerl.batching.assignment import SampleFacts
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.trained import Trained
from megatron_scalerl.types import BlockRef, Completion, RolloutGroup


@record
class BatchPlan:
    """The samples of one optimizer step. Produced by `samples_of`; without samples there is no step."""

    samples: tuple[SampleFacts, ...]
    sources: tuple[tuple[BlockRef | None, int], ...]
    """[samples] where the group of the sample is stored, and the sample's position there."""
    trained: Trained
    """The advantages and the dropped groups, for the page."""
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
            parts = list(_sample_facts(group, completion, advantage, weight))
            samples += parts
            sources += [(group.stored, position + number) for number in range(len(parts))]
    stats = {
        "groups": len(groups),
        "groups_kept": len(kept),
        "completions": sum(len(group.completions) for group in groups),
        "truncated_dropped": sum(
            completion.truncated and not algorithm.trains(completion)
            for group in groups
            for completion in group.completions
        ),
        "samples": len(samples),
        "loss_tokens": sum(completion.sampled_tokens for group in kept for completion in group.completions),
        "advantage_std": reward_spread(kept),
    }
    stats |= {f"groups_dropped_{reason}": count for reason, count in sorted(Counter(dropped.values()).items())}
    stats = {name: float(number) for name, number in stats.items()}
    return BatchPlan(
        samples=tuple(samples),
        sources=tuple(sources),
        trained=Trained(
            advantages={
                group.group_id: dict(zip(group.positions, map(float, map(np.mean, values))))
                for group, values in zip(kept, advantages)
            },
            dropped=dropped,
        ),
        stats=stats,
    )


def _sample_facts(
    group: RolloutGroup, completion: Completion, advantage: float | Sequence[float], weight: float
) -> Iterator[SampleFacts]:
    """The samples of a completion. advantage: of all its tokens, or [tokens].

    Raises RuntimeError for another number of advantages, and for one that is not finite.
    """
    values = np.asarray(advantage, np.float64)
    if values.shape not in ((), (completion.tokens,)) or not np.isfinite(values).all():
        raise RuntimeError(
            f"algorithm: group {group.group_id} has an advantage of shape {values.shape} for a completion of "
            f"{completion.tokens} tokens; give a finite number, or one for each token"
        )
    start = 0
    for part in completion.samples:
        of_part = values.tolist()  # a number, for all tokens alike
        if values.ndim:
            of_part = tuple(of_part[start : start + part.tokens])
            start += part.tokens
        yield SampleFacts(
            prompt_token_ids=group.prompt.token_ids[: part.prompt_tokens],
            tokens=part.tokens,
            advantage=of_part,
            token_weight=weight,
        )


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
