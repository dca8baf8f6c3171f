"""The sampler of completions, without tokens of a policy."""

from dataclasses import replace
from typing import NamedTuple

from rollout_groups import scored

from megatron_scalerl.types import Rollout, Score


class StandInDraw(NamedTuple):
    """Seed, group and index."""

    seed: int
    group: int
    index: int

    @property
    def thinking_cut(self):
        """The group's number; nothing is interrupted."""
        return self.group

    def __str__(self):
        return str(tuple(self))


class StandInSampler:
    """Completions whose tokens, score and duration a test says; they have the engine's versions of begin and end.

    wait(engine, draw, priority): until a completion has ended, or raises what it fails with. correct, tokens,
    logprobs: of a draw; confirmed: what a second judge says of a correct one. mask, environment: of every completion.
    """

    def __init__(
        self,
        wait=None,
        *,
        correct=lambda draw: draw.index % 2 == 0,
        tokens=lambda draw: (draw.group + 1, draw.index + 1),
        logprobs=lambda draw, size: (-1.0,) * size,
        mask=None,
        reason="",
        environment=(),
        confirmed=lambda draw: None,
    ):
        self._wait, self._correct, self._tokens, self._logprobs, self._mask = wait, correct, tokens, logprobs, mask
        self._reason, self._environment = reason, environment
        self._confirmed = confirmed
        self.asked = []
        """(engine, draw) of every completion."""
        self.limits = set()
        """Budgets that were asked for."""
        self.unusable = set()
        """Prompts that cannot be learned from, for `problem`."""
        self.problem = "found at its first use"

    def draw(self, prompt, seed, group_id, index):
        return StandInDraw(seed, group_id, index)

    async def problem_of(self, prompt):
        return self.problem if prompt.prompt_id in self.unusable else ""

    async def complete(self, engine, prompt, draw, *, priority, max_tokens=None):
        self.asked.append((engine, draw))
        self.limits.add(max_tokens)
        version = engine.version
        if self._wait is not None:
            await self._wait(engine, draw, priority)
        tokens, correct = self._tokens(draw), self._correct(draw)
        mask = self._mask or (True,) * len(tokens)
        rollout = Rollout(
            token_ids=tokens,
            rollout_logprobs=self._logprobs(draw, len(tokens)),
            policy_versions=(version,) * (len(tokens) - 1) + (engine.version,),
            loss_mask=mask,
            interrupted=not all(mask),
            truncated=False,
            thinking_cut=draw.group,
            seed=draw.index,
            environment=self._environment,
        )
        score = Score(correct=correct, reward=1.0 if correct else -1.0, reason=self._reason)
        if correct:
            score = replace(score, confirmed=self._confirmed(draw))
        text = f"text {draw.group}.{draw.index}" if score.confirmed is False else ""
        return replace(scored(rollout, score, prompt), unconfirmed_text=text)
