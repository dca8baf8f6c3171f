"""Makes the settings of requests to engines (seeds, interruption points, token budgets), and answer formats."""

import hashlib
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_scalerl.engine.client import SamplingSpec
from megatron_scalerl.engine.interruption import Plan, draw_cut, plan_ids, tag_variants
from megatron_scalerl.engine.options import training_seeds
from megatron_scalerl.prompts.end_tokens import end_token_ids, text_config
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.decoder import AnswerFormat

VALIDATION_PRIORITY = 0
TRAINING_PRIORITY = 1
"""Priorities of requests of validation and training; the engine serves lower numbers first.

Validation comes first, because the next weight update may wait for the end of a validation.
"""


@record
class Draw:
    """The random choices of one completion; equal seed of the run, group id and index give equal choices."""

    seed: int
    """Sampling seed, below 2**31."""
    thinking_cut: int
    """Number of thinking tokens after which the interruption phrase is forced; 0 without interruption."""


def forced_ids(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(token ids of the forced phrase with the closing think tag, token ids of the tag alone).

    Both are empty for a policy without think tags. Raises ValueError if phrase or tag change in an encode-decode
    round trip, or contain a token that ends a sequence.
    """
    if not recipe.prompts.think_end.strip():
        return (), ()
    phrase = recipe.interruption.phrase if recipe.interruption.enabled else ""
    phrase_ids, think_end_ids = plan_ids(tokenizer, phrase, recipe.prompts.think_end)
    end_ids = set(phrase_ids) & set(end_token_ids(recipe.policy.path, tokenizer))
    if end_ids:
        raise ValueError(
            f"interruption.phrase: the tokens {sorted(end_ids)} of the phrase end a sequence (tokenizer and "
            f"generation_config.json of {recipe.policy.path}); choose another phrase"
        )
    return phrase_ids, think_end_ids


def longest_sequence(recipe: Recipe, hf_config: Any, tokenizer: Any, *, capacity: int | None = None) -> int:
    """Number of tokens of the longest sequence that the recipe can have; a lower bound without a tokenizer.

    capacity: trainer.micro_batch_tokens. Raises ValueError if a limit of engine, policy or trainer is shorter.
    """
    longest = 0
    for task in recipe.by_task:
        phrase_tokens = len(forced_ids(task, tokenizer)[0]) if tokenizer else 0
        if task.longest_sequence(phrase_tokens) > longest:
            longest = task.longest_sequence(phrase_tokens)
            recipe = task
    positions = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    for key, limit, remedy in (
        ("engine.vllm.max_model_len", recipe.engine.vllm.get("max_model_len"), "raise the limit"),
        ("policy.path: max_position_embeddings of the policy", positions, "take a policy with a longer context"),
        ("trainer.micro_batch_tokens", capacity, "raise the limit"),
    ):
        if limit and longest > limit:
            parts = (
                f"interruption.thinking_tokens {recipe.interruption.thinking_tokens[1]} + interruption.answer_tokens "
                f"{recipe.interruption.answer_tokens}"
            )
            if recipe.environment.episode_tokens:
                parts = f"environment.episode_tokens {recipe.environment.episode_tokens}"
            raise ValueError(
                f"{key}: {limit} is too short for the longest sequence, {longest} tokens (prompts.max_prompt_tokens "
                f"{recipe.prompts.max_prompt_tokens} + {parts} + forced phrase and end); lower a summand, or {remedy}"
            )
    return longest


class Plans:
    """Makes the requests to engines, and the rule by which answers are found in completions."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase):
        """Raises ValueError if encoding and decoding change the think tag or the phrase, or if a token of the phrase
        ends a sequence."""
        self._recipe = recipe
        self._end_ids = end_token_ids(recipe.policy.path, tokenizer)
        self._phrase_ids, self._think_end_ids = forced_ids(recipe, tokenizer)
        self._think_end_first, self._think_end_last = tag_variants(tokenizer, self._think_end_ids)
        self._seeds = training_seeds(recipe)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        words = 1 + max(tokenizer.get_vocab().values())
        self.vocabulary = text_config(recipe.policy.path).get("vocab_size", words)
        """Number of token ids that an engine may sample: rows of the embedding, possibly more than the tokenizer's
        ids."""

    def draw(self, seed: int, group_id: int, index: int) -> Draw:
        """The random choices for completion `index` of a group, which depend only on the three arguments."""
        digest = hashlib.sha256(f"sampling/{seed}/{group_id}/{index}".encode()).digest()
        interruption = self._recipe.interruption
        cut = draw_cut(seed, group_id, index, *interruption.thinking_tokens) if interruption.enabled else 0
        return Draw(seed=int.from_bytes(digest[:4], "big") >> 1, thinking_cut=cut)

    def turn(self, draw: Draw, number: int) -> Draw:
        """The random choices of turn `number` (from 0) of an episode; turn 0 has the choices of the episode."""
        if number == 0:
            return draw
        # No completion has the index -1, so that no turn gets the choices of a completion.
        return self.draw(draw.seed, number, -1)

    def plan(self, cut: int) -> Plan:
        """The interruption plan of a completion that is cut after `cut` tokens of thinking."""
        section = self._recipe.interruption
        whole_budget = self._recipe.max_completion_tokens if section.after_natural_end == "rest_of_budget" else None
        return Plan(
            cut=cut,
            phrase_ids=self._phrase_ids,
            think_end_ids=self._think_end_ids,
            think_end_first=self._think_end_first,
            think_end_last=self._think_end_last,
            answer_budget=section.answer_tokens,
            whole_budget=whole_budget,
            eos_id=self._end_ids[0],
        )

    def spec(self, draw: Draw, priority: int) -> SamplingSpec:
        """The sampling settings of the request for one completion. The engine always gets a seed for validation."""
        section = self._recipe.rollouts
        plan = None
        max_tokens = self._recipe.max_completion_tokens
        if self._recipe.interruption.enabled:
            plan = self.plan(draw.thinking_cut)
            max_tokens = plan.max_tokens
        return SamplingSpec(
            max_tokens=max_tokens,
            temperature=section.temperature,
            end_ids=self._end_ids,
            seed=draw.seed,
            seeded=self._seeds or priority < TRAINING_PRIORITY,
            interruption=plan,
            priority=priority,
        )

    def answer_format(self) -> AnswerFormat:
        """The rule by which the answer is found in a completion."""
        # The closing tag may be a special token, but is not hidden: `AnswerFormat` searches the text for the tag.
        hidden = (self._special_ids | set(self._end_ids)) - set(self._think_end_ids)
        # The cut 1 stands for any cut, since only the closing tag is used, which is the same in all plans of a run.
        plan = self.plan(1) if self._think_end_ids else None
        return AnswerFormat(plan=plan, think_end=self._recipe.prompts.think_end, hidden_ids=hidden)
