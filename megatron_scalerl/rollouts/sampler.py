"""One completion from plan to score: draws the seed and the cut, asks an engine, asks the verifier.

Shared by training rollouts and validation, which so cannot differ in anything but seeds and priority.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rewards.verifier import VerifierPool
from megatron_scalerl.rollouts.engine_client import EngineClient, SamplingSpec
from megatron_scalerl.rollouts.interruption import Plan, draw_cut, plan_ids
from megatron_scalerl.types import Prompt, Rollout, Score

TRAINING_PRIORITY, VALIDATION_PRIORITY = 1, 0
"""The engine serves lower numbers first: a validation holds the next weight update back."""


class Verifier(Protocol):
    """What the sampler needs of a verifier pool."""

    async def score(self, answer_text: str | None, prompt: Prompt, rollout: Rollout) -> Score:
        """Judge the text after thinking."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The random choices of one completion, fixed by seed, group and index."""

    seed: int
    """Sampling seed, below 2**31."""
    thinking_cut: int
    """Thinking tokens before the phrase is forced; 0 with interruption off."""


class Sampler:
    """Completes prompts on engines and scores them."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, verifier: Verifier | VerifierPool) -> None:
        """Raises ValueError if think tags or phrase do not survive encode and decode."""
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._verifier = verifier
        eos = tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise ValueError(f"policy.path: expected a tokenizer with an end-of-sequence token, found {eos!r}")
        self._eos_id = eos
        self._phrase_ids, self._think_end_ids = plan_ids(
            tokenizer, recipe.interruption.phrase, recipe.prompts.think_end
        )

    @property
    def longest_completion(self) -> int:
        """Tokens that the longest completion can have, a forced phrase and a forced end included."""
        i = self._recipe.interruption
        return i.thinking_tokens[1] + i.answer_tokens + len(self._phrase_ids) + 1

    def draw(self, seed: int, group_id: int, index: int) -> Draw:
        """The choices for completion `index` of a group; the same for the same three numbers."""
        digest = hashlib.sha256(f"sampling/{seed}/{group_id}/{index}".encode()).digest()
        i = self._recipe.interruption
        return Draw(
            seed=int.from_bytes(digest[:4], "big") >> 1,
            thinking_cut=draw_cut(seed, group_id, index, *i.thinking_tokens) if i.enabled else 0,
        )

    async def complete(
        self, engine: EngineClient, prompt: Prompt, draw: Draw, *, priority: int
    ) -> tuple[Rollout, Score]:
        """One completion with its score. Engine failures are raised, a failing verifier is a wrong answer."""
        rollout = await engine.generate(prompt.token_ids, sampling=self._spec(draw, priority))
        if rollout.truncated:
            return rollout, Score(correct=False, reward=self._recipe.rewards.incorrect, reason="truncated")
        return rollout, await self._verifier.score(self.answer_text(rollout), prompt, rollout)

    def answer_text(self, rollout: Rollout) -> str | None:
        """The text after thinking, None if thinking never ended."""
        ids, tag = rollout.token_ids, self._think_end_ids
        for end in range(len(tag), len(ids) + 1):
            if ids[end - len(tag) : end] == tag:
                return self._tokenizer.decode(list(ids[end:]), skip_special_tokens=True)
        return None

    def _spec(self, draw: Draw, priority: int) -> SamplingSpec:
        i, r = self._recipe.interruption, self._recipe.rollouts
        plan = None
        if i.enabled:
            plan = Plan(
                cut=draw.thinking_cut,
                phrase_ids=self._phrase_ids,
                think_end_ids=self._think_end_ids,
                answer_budget=i.answer_tokens,
                eos_id=self._eos_id,
            )
        return SamplingSpec(
            max_tokens=plan.max_tokens if plan else self._recipe.max_completion_tokens,
            temperature=r.temperature,
            top_p=r.top_p,
            seed=draw.seed,
            interruption=plan,
            priority=priority,
        )
