"""One completion from plan to score: draws seed and interruption point, calls an engine and the verifier.

Training rollouts and validation share it, so that they differ only in seeds and priority.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from megatron_scalerl.engine.client import EngineClient, SamplingSpec
from megatron_scalerl.engine.interruption import Plan, draw_cut, plan_ids, tag_variants
from megatron_scalerl.prompts.end_tokens import end_token_ids
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rewards.math import extract_answer
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.rewards.task_pools import TaskPools
from megatron_scalerl.types import Prompt, Rollout, Score

TRAINING_PRIORITY, VALIDATION_PRIORITY = 1, 0
"""The engine serves lower numbers first: validation comes first because the next weight update waits for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The random choices of one completion, determined by seed, group and index."""

    seed: int
    """Sampling seed, below 2**31."""
    thinking_cut: int
    """Thinking tokens before the phrase is forced; 0 without interruption."""


def forced_ids(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(tokens of the forced phrase with the closing tag, tokens of the tag) in the policy's tokenizer.

    Raises ValueError if one of them changes in an encode-decode round trip, or ends a sequence.
    """
    phrase = recipe.interruption.phrase if recipe.interruption.enabled else ""
    phrase_ids, think_end_ids = plan_ids(tokenizer, phrase, recipe.prompts.think_end)
    if stops := set(phrase_ids) & set(end_token_ids(recipe.policy.path, tokenizer)):
        raise ValueError(
            f"interruption.phrase: expected tokens that end no sequence, found {sorted(stops)} "
            f"(tokenizer and generation_config.json of {recipe.policy.path})"
        )
    return phrase_ids, think_end_ids


class Sampler:
    """Completes prompts on engines and scores them."""

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, verifier: VerifierPool | TaskPools
    ) -> None:
        """Raises ValueError if think tags or phrase change in an encode-decode round trip, or end a sequence."""
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._verifier = verifier
        self._end_ids = end_token_ids(recipe.policy.path, tokenizer)
        self._phrase_ids, self._think_end_ids = forced_ids(recipe, tokenizer)
        self._think_end_first, self._think_end_last = tag_variants(tokenizer, self._think_end_ids)
        self._hidden_ids = frozenset((*tokenizer.all_special_ids, *self._end_ids)) - frozenset(self._think_end_ids)

    def draw(self, seed: int, group_id: int, index: int) -> Draw:
        """The random choices for completion `index` of a group, a function of these three numbers."""
        digest = hashlib.sha256(f"sampling/{seed}/{group_id}/{index}".encode()).digest()
        i = self._recipe.interruption
        return Draw(
            seed=int.from_bytes(digest[:4], "big") >> 1,
            thinking_cut=draw_cut(seed, group_id, index, *i.thinking_tokens) if i.enabled else 0,
        )

    async def complete(
        self, engine: EngineClient, prompt: Prompt, draw: Draw, *, priority: int
    ) -> tuple[Rollout, Score]:
        """One completion and its score.

        An answer on which the verifier fails counts as wrong. Raises CompletionLost for a completion that is unusable
        for a reason other than the policy. Errors that end the run: EngineError, and RuntimeError from a verifier
        pool without processes.
        """
        rollout = await engine.generate(prompt.token_ids, sampling=self._spec(draw, priority))
        if rollout.truncated:
            return rollout, Score(correct=False, reward=self._recipe.rewards.incorrect, reason="truncated")
        return rollout, await self._verifier.score(self.answer_text(rollout), prompt, rollout)

    def answer_text(self, rollout: Rollout) -> str | None:
        """The text after thinking; None if thinking did not end."""
        ids, width = rollout.token_ids, len(self._think_end_ids)
        plan = self._plan(1)
        for end in range(width, len(ids) + 1):
            if plan.ends_thinking(ids, end):
                # the tag's tokens may include neighboring text, so decode them too and cut the tag off as text
                rest = [token for token in ids[end - width :] if token not in self._hidden_ids]
                text = str(self._tokenizer.decode(rest, skip_special_tokens=False))
                return extract_answer(text, self._recipe.prompts.think_end)
        return None

    def _plan(self, cut: int) -> Plan:
        section = self._recipe.interruption
        whole = self._recipe.max_completion_tokens if section.after_natural_end == "rest_of_budget" else None
        return Plan(
            cut=cut,
            phrase_ids=self._phrase_ids,
            think_end_ids=self._think_end_ids,
            think_end_first=self._think_end_first,
            think_end_last=self._think_end_last,
            answer_budget=section.answer_tokens,
            whole_budget=whole,
            eos_id=self._end_ids[0],
        )

    def _spec(self, draw: Draw, priority: int) -> SamplingSpec:
        r = self._recipe.rollouts
        plan = self._plan(draw.thinking_cut) if self._recipe.interruption.enabled else None
        return SamplingSpec(
            max_tokens=plan.max_tokens if plan else self._recipe.max_completion_tokens,
            temperature=r.temperature,
            end_ids=self._end_ids,
            seed=draw.seed,
            interruption=plan,
            priority=priority,
        )
