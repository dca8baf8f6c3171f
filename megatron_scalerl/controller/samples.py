"""Makes the training samples of an optimizer step from scored groups: filters, advantages and token weights."""

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
    """The training samples of one batch. Produced by `samples_of`. Without samples the trainer makes no step."""

    samples: tuple[SampleFacts, ...]
    sources: tuple[tuple[BlockRef | None, int], ...]
    """[samples] (block of the store that holds the sample's group, position of the sample in the block)"""
    trained: Trained
    """The advantages and the dropped groups, for the page of the run."""
    stats: Mapping[str, float]
    """Counts for the metrics: groups, groups_kept, groups_dropped_REASON, completions, truncated_dropped,
    samples, loss_tokens, and advantage_std (standard deviation of the remaining centered rewards)."""


def samples_of(groups: Sequence[RolloutGroup], algorithm: ScaleRL) -> BatchPlan:
    """The completions to train on, as samples with advantages and token weights.

    An episode may have several samples, one for each part of the context; all get the episode's token weight.
    """
    kept_groups = []
    drop_reasons = {}
    # Completions are filtered before groups, because the rewards of the remaining completions decide about a group.
    filtered_groups = [trained_part(group, algorithm) for group in groups]
    for group in filtered_groups:
        reason = algorithm.drop_reason(group)
        if reason:
            drop_reasons[group.group_id] = reason
        else:
            kept_groups.append(group)
    samples = []
    sources = []
    advantages = algorithm.advantages(kept_groups)
    for group, group_advantages, group_weights in zip(
        kept_groups, advantages, algorithm.weights(kept_groups), strict=True
    ):
        members = zip(group.completions, group.positions, group_advantages, group_weights, strict=True)
        for completion, position, advantage, weight in members:
            parts = list(_sample_facts(group, completion, advantage, weight))
            samples += parts
            sources += [(group.stored, position + number) for number in range(len(parts))]
    stats = {
        "groups": len(groups),
        "groups_kept": len(kept_groups),
        "completions": sum(len(group.completions) for group in groups),
        "truncated_dropped": sum(
            completion.truncated and not algorithm.trains(completion)
            for group in groups
            for completion in group.completions
        ),
        "samples": len(samples),
        "loss_tokens": sum(completion.sampled_tokens for group in kept_groups for completion in group.completions),
        "advantage_std": reward_spread(kept_groups),
    }
    stats |= {f"groups_dropped_{reason}": count for reason, count in sorted(Counter(drop_reasons.values()).items())}
    stats = {name: float(number) for name, number in stats.items()}
    return BatchPlan(
        samples=tuple(samples),
        sources=tuple(sources),
        trained=Trained(
            advantages={
                group.group_id: dict(zip(group.positions, map(float, map(np.mean, values))))
                for group, values in zip(kept_groups, advantages)
            },
            dropped=drop_reasons,
        ),
        stats=stats,
    )


def _sample_facts(
    group: RolloutGroup, completion: Completion, advantage: float | Sequence[float], weight: float
) -> Iterator[SampleFacts]:
    """The samples of a completion. advantage: one value for all tokens, or an array [tokens].

    Raises RuntimeError if the advantage has another shape, or is not finite.
    """
    values = np.asarray(advantage, np.float64)
    if values.shape not in ((), (completion.tokens,)) or not np.isfinite(values).all():
        raise RuntimeError(
            f"algorithm: group {group.group_id} has an advantage of shape {values.shape} for a completion of "
            f"{completion.tokens} tokens; give a finite number, or one for each token"
        )
    start = 0
    for part in completion.samples:
        # An advantage without dimensions is one number for all tokens.
        part_advantage = values.tolist()
        if values.ndim:
            part_advantage = tuple(part_advantage[start : start + part.tokens])
            start += part.tokens
        yield SampleFacts(
            prompt_token_ids=group.prompt.token_ids[: part.prompt_tokens],
            tokens=part.tokens,
            advantage=part_advantage,
            token_weight=weight,
        )


def trained_part(group: RolloutGroup, algorithm: ScaleRL) -> RolloutGroup:
    """A copy of the group with only the completions that the algorithm trains on. The copy may have no completion."""
    trained_indices = [i for i, completion in enumerate(group.completions) if algorithm.trains(completion)]
    # A position says where a completion is stored, so the remaining completions keep the positions of the full group.
    return replace(
        group,
        completions=tuple(group.completions[i] for i in trained_indices),
        positions=tuple(group.positions[i] for i in trained_indices),
        scores=tuple(group.scores[i] for i in trained_indices),
    )


_REASONS = {
    "all_incorrect": "all wrong",
    "all_correct": "all right",
    "equal_rewards": "with equal rewards",
    "too_few": "with fewer than two completions that are not truncated",
}


def empty_reason(stats: Mapping[str, float]) -> str:
    """The reason why the filters left no sample of a batch. stats: counts, as in `BatchPlan.stats`.

    Example:
        >>> empty_reason({"groups": 4, "groups_dropped_all_incorrect": 4, "completions": 32, "truncated_dropped": 0})
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
