"""Groups of a journal, and what is found of them."""

from dataclasses import replace

from journals import read_rollouts
from rollout_groups import group_of, rollout

from megatron_scalerl.rollouts.history import BatchRecord
from megatron_scalerl.types import ExpertChoices, Prompt, Score


def rollouts(version=3, count=2):
    return tuple(
        rollout(
            tokens=(5, 6, 7 + i),
            logprobs=(-0.1, 0.0, -1.5e-7),
            versions=(version, version, version + 1),
            mask=(True, False, True),
            interrupted=True,
            thinking_cut=44,
            seed=11 + i,
            expert_choices=ExpertChoices(layers=2, topk=1, width=1, data=bytes(range(8))) if i else None,
        )
        for i in range(count)
    )


def group(group_id, version=3, correct=(True, False)):
    """(group, its completions)"""
    made = rollouts(version, len(correct))
    prompt = Prompt(prompt_id=f"p{group_id}", text="1;+2=", answer="3", token_ids=(1, 2), extra={"level": 1})
    scores = [Score(correct=c, reward=1.0 if c else -1.0) for c in correct]
    return group_of(made, scores, prompt=prompt, group_id=group_id), made


def found(run_dir, groups):
    """Groups as `group` makes them."""
    return {n: (replace(g, stored=None), tuple(read_rollouts(run_dir, g))) for n, g in groups.items()}


def found_batch(run_dir, batch):
    return [*found(run_dir, dict(enumerate(batch))).values()]


def record(batch, *group_ids):
    return BatchRecord(batch=batch, step=batch + 1, policy_version=batch, group_ids=group_ids)
