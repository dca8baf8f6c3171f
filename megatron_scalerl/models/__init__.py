"""Model families: Megatron options from a Hugging Face config, and one weight map per family for both directions."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_scalerl.models import deepseek, llama, llama4, mistral, olmo2, qwen2, qwen3, qwen3_moe
from megatron_scalerl.models.family import Family
from megatron_scalerl.models.unsupported import parts_of

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

MOST_PARTS = 10_000
"""Layers, heads or experts of a model: each is an object here."""

__all__ = ["FAMILIES", "PLANNED", "Family", "family", "read_hf_config"]


def family(hf_config: Any, names: Collection[str] = (), *, planned: bool = False) -> Family:
    """The Family of a Hugging Face config; `names` are the checkpoint's tensors, for formats with two layouts.

    planned: families that can only be planned, too. Raises ValueError for an unknown model_type and as the families
    do.
    """
    kind, folder = hf_config.model_type, hf_config.name_or_path
    if kind not in FAMILIES and not (planned and kind in PLANNED):
        raise ValueError(_unsupported("config.json", hf_config.to_dict() | {"model_type": kind}, planned=planned))
    try:
        if kind == "qwen3_moe":
            fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
            return qwen3_moe.family(hf_config, fused=fused)
        return (FAMILIES | PLANNED)[kind](hf_config)
    except ValueError as error:
        raise ValueError(f"{folder}/{error}" if folder else str(error)) from None


def read_hf_config(hf_path: str | Path, *, planned: bool = False) -> Any:
    """The Hugging Face config of a folder; planned: of families that can only be planned, too.

    Raises ValueError for a folder without config.json, and for a config.json that is not readable, has an unknown
    model_type or values of wrong types, or is of a model without a language model's head.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, DeepseekV3Config

    path = Path(hf_path) / "config.json"
    if not path.is_file():
        raise ValueError(f"policy.path: {hf_path} is not a Hugging Face folder: it has no config.json")
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: it is not JSON: {str(error).partition(';')[0]}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: a config is a JSON object, this file has a {type(found).__name__}")
    kind = found.get("model_type")
    if kind not in FAMILIES and not (planned and kind in PLANNED):
        raise ValueError(_unsupported(str(path), found, planned=planned))
    heads = ("ForCausalLM", "ForConditionalGeneration") if "text_config" in found else ("ForCausalLM",)
    names = found.get("architectures")
    for architecture in names if isinstance(names, list) else ():
        if not str(architecture).endswith(heads):
            raise ValueError(
                f"{path}: {architecture} is no policy: its head is not a language model's (a reward model, a "
                "classifier) or is missing; take a ...ForCausalLM"
            )
    parts = [part for part in (found, found.get("text_config")) if isinstance(part, dict)]
    for key, value in (item for part in parts for item in part.items()):
        if key.endswith(("layers", "heads", "experts")) and isinstance(value, int | float) and value > MOST_PARTS:
            raise ValueError(f"{path}: {key}: {value:,} is more than any model has; at most {MOST_PARTS:,} are read")
    try:
        if kind == "kimi_k2":  # DeepSeek-V3's architecture; transformers has no class for its name
            return DeepseekV3Config.from_dict(found)
        return AutoConfig.from_pretrained(str(hf_path), trust_remote_code=False)
    except StrictDataclassError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def _unsupported(where: str, config: Mapping[str, Any], *, planned: bool) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    known = {key for family in FAMILIES for key in CONFIG_MAPPING[family]().to_dict()}
    hint = "; `megatron-scalerl plan` counts it" if kind in PLANNED else ""
    return (
        f"{where}: model_type {kind!r} is not supported: it has {parts_of(config, known)}{hint}; supported are "
        f"{', '.join([*FAMILIES, *(PLANNED if planned else ())])}; adding a family: docs/families.md"
    )
