"""What can be known before any process is started: prompts, tokenizer, tags, vocabulary, context, budgets.

Everything here fails with one line and leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from megatron_scalerl.prompts.dataset import PromptSet, check_think_tags, check_vocabulary, load_prompts
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.engine import listen_on
from megatron_scalerl.rollouts.engine_options import check_options
from megatron_scalerl.rollouts.interruption import plan_ids


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The checked inputs of a run."""

    tokenizer: PreTrainedTokenizerBase
    hf_config: PretrainedConfig
    prompts: PromptSet
    longest_sequence: int
    """Longest prompt and completion together, with forced phrase and end (tokens)."""

    def resolved(self, recipe: Recipe) -> Recipe:
        """The recipe with the engine's context length filled in where it was silent."""
        options = {"max_model_len": self.longest_sequence, **recipe.engine.vllm}
        return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"vllm": options})})


def check_inputs(recipe: Recipe) -> Inputs:
    """Load and check what the recipe names. Raises ValueError: one line with key or row, expected, found."""
    folder = Path(recipe.policy.path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"policy.path: expected a Hugging Face folder with config.json, found {folder}")
    check_options(recipe.engine.vllm)
    for index in range(recipe.engine.count if recipe.engine.port else 0):
        listen_on(recipe.engine.host, recipe.engine.port + index).close()
    hf_config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text_config = hf_config.get_text_config()
    check_vocabulary(tokenizer, text_config.vocab_size)
    check_think_tags(
        tokenizer, recipe.prompts.think_start, recipe.prompts.think_end, recipe.interruption.phrase
    )
    prompts = load_prompts(tokenizer, recipe.prompts)
    if recipe.validation.every_steps and not prompts.held_out:
        raise ValueError("validation.every_steps: expected held-out prompts (prompts.held_out), found none")
    longest = _longest_sequence(recipe, tokenizer)
    context = recipe.engine.vllm.get("max_model_len") or longest
    for key, limit in (
        ("engine.vllm.max_model_len", context),
        ("max_position_embeddings of the policy", getattr(text_config, "max_position_embeddings", longest)),
        ("trainer.micro_batch_tokens", recipe.trainer.micro_batch_tokens),
    ):
        if longest > limit:
            raise ValueError(
                f"{key}: expected at least {longest} (prompts.max_prompt_tokens {recipe.prompts.max_prompt_tokens} + "
                f"thinking + phrase + answer), found {limit}"
            )
    return Inputs(
        tokenizer=tokenizer,
        hf_config=hf_config,
        prompts=prompts,
        longest_sequence=longest,
    )


def _longest_sequence(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> int:
    phrase = 0
    if recipe.interruption.enabled:
        phrase = len(plan_ids(tokenizer, recipe.interruption.phrase, recipe.prompts.think_end)[0]) + 1
    return recipe.prompts.max_prompt_tokens + recipe.max_completion_tokens + phrase
