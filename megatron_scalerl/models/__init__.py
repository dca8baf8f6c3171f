"""Model families: Megatron options from a Hugging Face config, and one weight map per family for both directions."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from megatron_scalerl.models import deepseek, llama, llama4, mistral, olmo2, qwen2, qwen3, qwen3_moe
from megatron_scalerl.models.family import Family

FAMILIES: dict[str, Callable[..., Family]] = {
    "llama": llama.family,
    "llama4": llama4.family,
    "llama4_text": llama4.family,
    "mistral": mistral.family,
    "olmo2": olmo2.family,
    "qwen2": qwen2.family,
    "qwen3": qwen3.family,
    "qwen3_moe": qwen3_moe.family,
}
"""`model_type` of config.json -> function that builds the family."""

PLANNED: dict[str, Callable[..., Family]] = {"deepseek_v3": deepseek.family, "kimi_k2": deepseek.family}
"""The same of families that can be planned and not trained."""
_LATENT = "multi-head latent attention, the router's correction bias (`megatron-scalerl plan` counts it)"
MISSING = {
    **dict.fromkeys(PLANNED, _LATENT),
    "gemma2": "norms after attention and MLP, scaled embeddings, soft caps of logits, sliding windows",
    **dict.fromkeys(("gemma3", "gemma3_text"), "norms after attention and MLP, scaled embeddings, sliding windows"),
    "glm4": "norms after attention and MLP, partial rotary embeddings, fused projections",
    "gpt_oss": "attention sinks, sliding windows, biases of experts",
    "granite": "multipliers of embeddings, attention, residuals and logits",
    "mistral3": "a vision tower around the text model",
    "mixtral": "its names of experts, sliding windows",
    "olmo3": "sliding windows",
    "phi3": "fused projections, partial rotary embeddings, sliding windows",
    "qwen2_moe": "a gate on the shared expert",
    "qwen3_next": "linear attention, a gate on the shared expert",
    "smollm3": "layers without rotary embeddings in a dense model",
}
"""`model_type` of families that people ask for -> what we lack. Others lack a file in this folder."""

MOST_PARTS = 10_000
"""Layers, heads or experts of a model: each is an object here."""

__all__ = ["FAMILIES", "PLANNED", "Family", "family", "read_hf_config"]


def family(hf_config: Any, names: Collection[str] = (), *, planned: bool = False) -> Family:
    """The Family of a Hugging Face config; `names` are the checkpoint's tensors, for formats with two layouts.

    planned: families that can only be planned, too. Raises ValueError for an unknown model_type and as the families
    do.
    """
    kind = hf_config.model_type
    _check_known(kind, planned=planned)
    if kind == "qwen3_moe":
        return qwen3_moe.family(hf_config, fused=any(name.endswith(".mlp.experts.gate_up_proj") for name in names))
    return (FAMILIES | PLANNED)[kind](hf_config)


def read_hf_config(hf_path: str | Path, *, planned: bool = False) -> Any:
    """The Hugging Face config of a folder; planned: of families that can only be planned, too.

    Raises ValueError for a folder without config.json, and for a config.json that is not readable, has an unknown
    model_type or values of wrong types.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, DeepseekV3Config

    path = Path(hf_path) / "config.json"
    if not path.is_file():
        raise ValueError(f"policy.path: {hf_path} is not a Hugging Face folder: it has no config.json")
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, found {str(error).partition(';')[0]}") from error
    kind = found.get("model_type") if isinstance(found, dict) else None
    _check_known(kind, planned=planned)
    parts = [part for part in (found, found.get("text_config")) if isinstance(part, dict)]
    for key, value in (item for part in parts for item in part.items()):
        if key.startswith(("num_", "n_")) and isinstance(value, int | float) and value > MOST_PARTS:
            raise ValueError(f"{path}: {key}: {value:,} is more than any model has; at most {MOST_PARTS:,} are read")
    try:
        if kind == "kimi_k2":  # DeepSeek-V3's architecture; transformers has no class for its name
            return DeepseekV3Config.from_dict(found)
        return AutoConfig.from_pretrained(str(hf_path), trust_remote_code=False)
    except StrictDataclassError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def _check_known(kind: str | None, *, planned: bool) -> None:
    if kind in FAMILIES or (planned and kind in PLANNED):
        return
    known = [*FAMILIES, *(PLANNED if planned else ())]
    missing = f"; missing: {MISSING[kind]}" if kind in MISSING else ""
    raise ValueError(f"config.json: model_type {kind!r} is not supported{missing}; supported are {', '.join(known)}")
