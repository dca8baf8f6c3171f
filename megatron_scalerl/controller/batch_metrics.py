"""Metrics of one batch of groups before filtering: rewards, lengths, staleness, shares; and of its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_scalerl.controller.outcomes import within_variance
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.types import RolloutGroup, StepReport


def batch_metrics(
    groups: Sequence[RolloutGroup], stats: Mapping[str, float], policy_version: int
) -> dict[str, float]:
    """Scalars of the batch that `policy_version` trains on; `stats` are the counts of the filters.

    `staleness_*` are optimizer steps since the oldest first token of each group. `train_pass_rate` is before every
    filter; `train_within_variance` over `train_completions` is its binomial variance given the prompts.
    """
    completions = [c for g in groups for c in g.completions]
    scores = [s for g in groups for s in g.scores]
    staleness = [policy_version - g.first_token_version for g in groups]
    count = len(completions)
    within = within_variance([[score.correct for score in group.scores] for group in groups])
    return {
        **{f"batch/{name}": value for name, value in stats.items()},
        "reward": sum(s.reward for s in scores) / count,
        "train_pass_rate": sum(s.correct for s in scores) / count,
        **({} if within is None else {"train_within_variance": within}),
        "train_completions": float(count),
        **_pass_rates_by_task(groups),
        "truncated_share": sum(c.truncated for c in completions) / count,
        "interrupted_share": sum(c.interrupted for c in completions) / count,
        "lost_completions": float(sum(g.lost_completions for g in groups)),
        "verifier_failed_share": sum(s.reason in ("timeout", "memory", "crash", "error") for s in scores) / count,
        "completion_tokens_mean": sum(c.tokens for c in completions) / count,
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": float(max(staleness)),
        "mixed_version_share": sum(c.first_version != c.last_version for c in completions) / count,
        "epoch": float(max(g.epoch for g in groups)),
    }


def step_metrics(report: StepReport) -> dict[str, float]:
    """Scalars of an optimizer step."""
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "tokens": report.tokens,
        "train_seconds": report.seconds,
        **report.metrics,
    }


def engine_metrics(engines: Membership) -> dict[str, float]:
    """Scalars of the engines at the end of a batch."""
    return {
        "engines_serving": len(engines.serving),
        "engine_restarts": sum(member.restarts for member in engines.members),
        "lost_tokens": sum(member.lost_tokens for member in engines.members),
    }


def _pass_rates_by_task(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Of a mixture: pass rate and groups of each task that is in the batch."""
    scores: dict[str, list[bool]] = {}
    for group in groups:
        if group.prompt.task:
            scores.setdefault(group.prompt.task, []).extend(score.correct for score in group.scores)
    rates = {f"train_pass_rate/{task}": sum(correct) / len(correct) for task, correct in sorted(scores.items())}
    counts = {f"batch/groups/{task}": float(sum(g.prompt.task == task for g in groups)) for task in sorted(scores)}
    return rates | counts
