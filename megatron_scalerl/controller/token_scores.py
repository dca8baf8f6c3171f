"""The trainer's log-probability and entropy of single tokens, for the reader of completions on the page of a run.

Every telemetry.token_scores_every steps, before the step, the trainer scores the best and the worst completion of a
few groups of the batch, with the weights from which the step starts. The mismatch of a token is the difference from
the engine's log-probability, which the store has. The trainer chooses experts by its own router, not by the engine's
recorded choices. A resumed run also scores the batches that are trained again.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.launch.placement import Fleet
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.store import read_completions, segment_path
from megatron_scalerl.rollouts.token_scores import CompletionScores, write_scores
from megatron_scalerl.types import BlockRef, RolloutGroup

_GROUPS = 4
"""Largest number of groups of a batch that are scored, with two completions each. The step waits for the forward pass
over these completions."""


class TokenScores:
    """Asks the trainer for token scores of some completions, every telemetry.token_scores_every steps."""

    def __init__(self, recipe: Recipe, fleet: Fleet, run_dir: Path):
        self._every_steps = recipe.telemetry.token_scores_every
        self._fleet = fleet
        self._run_dir = run_dir

    async def record(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Score some completions of the groups and write the scores, if `step` is a multiple of token_scores_every.

        The caller must call this before the step on the groups. Raises the errors of `TrainerClient`, and OSError.
        """
        if not self._every_steps or step % self._every_steps:
            return
        # Groups with equal rewards are left out, since no completion is the best or the worst.
        groups_with_spread = [
            g for g in groups if isinstance(g.stored, BlockRef) and len({s.reward for s in g.scores}) > 1
        ]
        first_groups = sorted(groups_with_spread, key=lambda group: group.group_id)[:_GROUPS]
        chosen_samples = [(group, *sample) for group in first_groups for sample in _ends(group)]
        if not chosen_samples:
            return
        tokens = await asyncio.to_thread(
            lambda: [self._tokens(group, position) for group, position, _ in chosen_samples]
        )
        prompts = [list(group.prompt.token_ids[:size]) for group, _, size in chosen_samples]
        score_columns = await self._fleet.trainer.token_scores([prompt + ids for prompt, ids in zip(prompts, tokens)])
        rows = [
            CompletionScores(
                group_id=group.group_id,
                position=position,
                policy_version=step - 1,
                logprobs=_rounded(logprobs[len(prompt) - 1 :]),
                entropies=_rounded(entropies[len(prompt) - 1 :]),
            )
            for (group, position, _), prompt, logprobs, entropies in zip(chosen_samples, prompts, *score_columns)
        ]
        await asyncio.to_thread(write_scores, self._run_dir, step, rows)

    def _tokens(self, group: RolloutGroup, position: int) -> list[int]:
        assert isinstance(group.stored, BlockRef)
        path = segment_path(self._run_dir / "rollouts", group.stored.segment)
        [data] = read_completions(path, group.stored, [position])
        return [int(token) for token in rollout_bytes.read(data).token_ids]


def _ends(group: RolloutGroup) -> list[tuple[int, int | None]]:
    """The samples of the group's best and worst completion: (position in the group's block, `Part.prompt_tokens`)."""
    rewards = [score.reward for score in group.scores]
    ends = [rewards.index(max(rewards)), rewards.index(min(rewards))]
    samples = [(group.positions[end], group.completions[end].samples) for end in ends]
    return [(first + i, part.prompt_tokens) for first, parts in samples for i, part in enumerate(parts)]


def _rounded(values: Sequence[float]) -> list[float]:
    """The values rounded to four decimals, which keeps the file of scores small."""
    return [round(value, 4) for value in values]
