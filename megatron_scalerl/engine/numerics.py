"""Checks that precision and settings of an engine and of the trainer are equal. Runs in the controller."""

import json
from pathlib import Path

from megatron_scalerl.engine.answers import EngineError, EngineInfo
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import RecipeError


def check_engine(info: EngineInfo, recipe: Recipe) -> None:
    """Refuse an engine that does not compute like the trainer.

    Raises RecipeError (a ValueError), naming a key, if a change of the recipe can remove the difference, and
    EngineError if vLLM did not do as configured.
    """
    logits = "float32" if recipe.policy.logits == "fp32" else recipe.policy.dtype
    temperature = info.attention_temperature
    # Only a policy with layers without RoPE has the setting of the attention temperature.
    if temperature is not None:
        temperature = attention_temperature(recipe)
    required_len = recipe.longest_sequence(phrase_tokens=0)
    for error, key, trainer, engine in (
        (EngineError, "policy.dtype", recipe.policy.dtype, info.dtype),
        (EngineError, "rollouts.temperature", logprobs_mode(recipe), info.logprobs_mode),
        (RecipeError, f"policy.logits {recipe.policy.logits}", logits, info.head_dtype),
        (RecipeError, "config.json: attn_temperature_tuning", temperature, info.attention_temperature),
    ):
        if trainer != engine:
            raise error(f"{key}: the trainer has {trainer}, but the engine has {engine}; both have to be equal")
    if info.max_model_len < required_len:
        raise RecipeError(
            f"engine.vllm.max_model_len: {info.max_model_len} is too short for sequences of {required_len} tokens"
        )


def logprobs_mode(recipe: Recipe) -> str:
    """vLLM's option logprobs_mode: log-probs of logits, or of logits / temperature if the temperature is not 1."""
    return "raw_logprobs" if recipe.rollouts.temperature == 1 else "processed_logprobs"


def attention_temperature(recipe: Recipe) -> bool | None:
    """Whether the policy scales queries by position in layers without RoPE (Llama 4); None for other families."""
    path = Path(recipe.policy.path) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    text = config.get("text_config") or config
    if text.get("model_type") != "llama4_text":
        return None
    return bool(text.get("attn_temperature_tuning", True))
