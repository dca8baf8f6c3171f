"""Filters of a batch before training: truncated completions, and groups without a learning signal.

Nothing is refilled: the batch shrinks (Khatri et al. 2025, arXiv 2510.13786, section 3.2, zero-variance filtering).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megatron_scalerl.types import RolloutGroup


def drop_truncated(groups: Sequence[RolloutGroup]) -> tuple[list[RolloutGroup], int]:
    """The groups without their truncated completions, and the number of completions removed.

    A group may be returned with fewer completions, or with none. Its `pass_rate` then differs from that of the whole
    group (where truncated completions count as wrong), so compute pass rates before.
    """
    kept = []
    dropped = 0
    for group in groups:
        whole = [i for i, completion in enumerate(group.completions) if not completion.truncated]
        dropped += len(group.completions) - len(whole)
        # Positions say where the completions are stored: they keep their numbers, with gaps.
        shorter = replace(
            group,
            completions=tuple(group.completions[i] for i in whole),
            positions=tuple(group.positions[i] for i in whole),
            scores=tuple(group.scores[i] for i in whole),
        )
        kept.append(shorter)
    return kept, dropped


def drop_zero_variance(groups: Sequence[RolloutGroup]) -> tuple[list[RolloutGroup], dict[str, int]]:
    """The groups whose rewards differ, and the number of groups dropped for each reason.

    Reasons: `too_few` (fewer than two completions, so there is no spread), `all_correct`, `all_incorrect`,
    `equal_rewards` (equal although correctness differs).
    """
    kept = []
    dropped: Counter[str] = Counter()
    for group in groups:
        reason = _without_variance(group)
        if reason is None:
            kept.append(group)
        else:
            dropped[reason] += 1
    return kept, dict(dropped)


def _without_variance(group: RolloutGroup) -> str | None:
    """The reason why the group has no learning signal, or None."""
    if len(group.scores) < 2:
        return "too_few"
    if len({score.reward for score in group.scores}) > 1:
        return None
    correct = {score.correct for score in group.scores}
    if correct == {True}:
        return "all_correct"
    if correct == {False}:
        return "all_incorrect"
    return "equal_rewards"
