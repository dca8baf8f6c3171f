"""The trainer's log-probability and entropy of single tokens, for the reader of completions on the page of a run.

Every telemetry.token_scores_every steps, before the step, the trainer scores the best and the worst completion of a
few groups of the batch with the weights that the loss then uses. The difference from the engine's log-probabilities,
which the store has, is the mismatch of each token. Expert choices of the engine are not replayed. A resumed run
scores the batches that are trained again.
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
"""Number of groups of a batch with two scored completions each. The trainer waits for a forward pass over these
completions."""


class TokenScores:
    """Has the trainer score some completions, every telemetry.token_scores_every steps."""

    def __init__(self, recipe: Recipe, fleet: Fleet, run_dir: Path):
        self._every_steps = recipe.telemetry.token_scores_every
        self._fleet = fleet
        self._run_dir = run_dir

    async def record(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Score and write some completions of the groups if `step` is due; called before the step on the groups.

        Raises as `TrainerClient`, and OSError.
        """
        if not self._every_steps or step % self._every_steps:
            return
        # Most groups that are trained on have completions of different rewards.
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
    """(position, `types.Part.prompt_tokens`) of each sample of the completions with the highest and the lowest
    reward."""
    rewards = [score.reward for score in group.scores]
    ends = [rewards.index(max(rewards)), rewards.index(min(rewards))]
    samples = [(group.positions[end], group.completions[end].samples) for end in ends]
    return [(first + i, part.prompt_tokens) for first, parts in samples for i, part in enumerate(parts)]


def _rounded(values: Sequence[float]) -> list[float]:
    """The values rounded to 1e-4, which keeps the file small."""
    return [round(value, 4) for value in values]
