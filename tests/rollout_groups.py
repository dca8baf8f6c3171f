"""Rollout groups with chosen rewards and lengths, for the tests of everything behind the engine."""

from megatron_scalerl.batching.rollout_bytes import arrays_of, facts_of, facts_of_parts, write
from megatron_scalerl.rollouts.sampler import ScoredCompletion
from megatron_scalerl.rollouts.store import positions_of
from megatron_scalerl.types import Prompt, Rollout, RolloutGroup, Score


def rollout(*, tokens=(5, 6, 7), mask=None, versions=None, logprobs=None, **changes):
    size = len(tokens)
    return Rollout(
        token_ids=tuple(tokens),
        rollout_logprobs=tuple(logprobs) if logprobs is not None else (-0.5,) * size,
        policy_versions=tuple(versions) if versions is not None else (0,) * size,
        loss_mask=tuple(mask) if mask is not None else (True,) * size,
        **{"interrupted": False, "truncated": False, "thinking_cut": 0, "seed": 0} | changes,
    )


def group(rewards, *, lengths=None, truncated=(), prompt=(1, 2), group_id=0):
    """A group with the given rewards; a reward above 0 is a correct completion."""
    lengths = lengths or [3] * len(rewards)
    rollouts = [rollout(tokens=tuple(range(10, 10 + n)), truncated=i in truncated) for i, n in enumerate(lengths)]
    return group_of(
        rollouts,
        [Score(correct=r > 0, reward=float(r)) for r in rewards],
        group_id=group_id,
        prompt=Prompt(prompt_id=f"p{group_id}", text="", answer="", token_ids=tuple(prompt)),
    )


def parts_of(made):
    """The samples of a completion: the parts of an episode that forked, a tuple, or the completion itself."""
    return made if isinstance(made, tuple) else (made,)


def facts(made):
    """The facts about a completion, or about an episode that forked."""
    if isinstance(made, tuple):
        return facts_of_parts([arrays_of(part) for part in made])
    return facts_of(arrays_of(made))


def group_of(rollouts, scores, *, prompt, group_id=0):
    """The facts about these rollouts; an episode that forked is a tuple of its parts."""
    completions = tuple(map(facts, rollouts))
    return RolloutGroup(
        group_id=group_id,
        prompt=prompt,
        completions=completions,
        positions=positions_of(completions),
        scores=tuple(scores),
        first_token_version=min((each.first_version for each in completions), default=0),
        epoch=0,
    )


def scored(rollout, score, prompt):
    """What the sampler returns for a completion."""
    parts = (write(rollout),)
    return ScoredCompletion(prompt=prompt, completion=facts_of(arrays_of(rollout)), parts=parts, score=score)
