"""Numerics that trainer and engine must share, and the check that they do. Runs in the controller."""

import json
from pathlib import Path

from megatron_scalerl.engine.answers import EngineError, EngineInfo
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import RecipeError


def check_engine(info: EngineInfo, recipe: Recipe) -> None:
    """Refuse an engine that does not compute what the trainer computes.

    Raises ValueError with the key that the user can change, EngineError where vLLM does not do what it was configured
    to do.
    """
    logits = "float32" if recipe.policy.logits == "fp32" else recipe.policy.dtype
    temperature = None if info.attention_temperature is None else attention_temperature(recipe)
    required_len = recipe.longest_sequence(phrase_tokens=0)
    for error, key, expected, found in (
        (EngineError, "policy.dtype", recipe.policy.dtype, info.dtype),
        (EngineError, "rollouts.temperature", logprobs_mode(recipe), info.logprobs_mode),
        (RecipeError, f"policy.logits {recipe.policy.logits}", logits, info.head_dtype),
        (RecipeError, "config.json: attn_temperature_tuning", temperature, info.attention_temperature),
    ):
        if expected != found:
            raise error(f"{key}: the trainer has {expected}, and the engine {found}; they have to be equal")
    if info.max_model_len < required_len:
        raise RecipeError(
            f"engine.vllm.max_model_len: {info.max_model_len} is too short for sequences of {required_len} tokens"
        )


def logprobs_mode(recipe: Recipe) -> str:
    """Which log-probs the engine reports: those of the policy, or those of its logits over the temperature."""
    return "raw_logprobs" if recipe.rollouts.temperature == 1 else "processed_logprobs"


def attention_temperature(recipe: Recipe) -> bool | None:
    """Whether the policy scales the queries of layers without RoPE by position (Llama 4); None for other families."""
    path = Path(recipe.policy.path) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    text = config.get("text_config") or config
    return bool(text.get("attn_temperature_tuning", True)) if text.get("model_type") == "llama4_text" else None
