"""The tokenizer of the policy's folder, checked against its model and the recipe's think tags."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, PretrainedConfig

from megatron_scalerl.prompts.rendering import check_think_tags, check_vocabulary
from megatron_scalerl.recipe import Recipe


def policy_tokenizer(recipe: Recipe, hf_config: PretrainedConfig) -> Any:
    """The tokenizer in policy.path.

    Raises ValueError where there is none, where the model has fewer rows than it has tokens, and for think tags that
    do not survive it.
    """
    path = recipe.policy.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"policy.path: expected a tokenizer in {path}, found none ({error})") from None
    check_vocabulary(tokenizer, hf_config.get_text_config().vocab_size)
    check_think_tags(tokenizer, recipe.prompts.think_start, recipe.prompts.think_end)
    return tokenizer
