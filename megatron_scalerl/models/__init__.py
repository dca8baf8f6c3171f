"""Model families: Megatron options from a Hugging Face config, and one weight map per family for both directions."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from megatron_scalerl.models import llama, llama4, mistral, qwen2, qwen3, qwen3_moe
from megatron_scalerl.models.family import Family

FAMILIES: dict[str, Callable[..., Family]] = {
    "llama": llama.family,
    "llama4": llama4.family,
    "llama4_text": llama4.family,
    "mistral": mistral.family,
    "qwen2": qwen2.family,
    "qwen3": qwen3.family,
    "qwen3_moe": qwen3_moe.family,
}
"""`model_type` of config.json -> function that builds the family."""

__all__ = ["FAMILIES", "Family", "family", "read_hf_config"]


def family(hf_config: Any, names: Collection[str] = ()) -> Family:
    """The Family of a Hugging Face config; `names` are the checkpoint's tensors, for formats with two layouts.

    Raises ValueError for an unknown model_type and as the families do.
    """
    kind = hf_config.model_type
    _check_known(kind)
    if kind == "qwen3_moe":
        return qwen3_moe.family(hf_config, fused=any(name.endswith(".mlp.experts.gate_up_proj") for name in names))
    return FAMILIES[kind](hf_config)


def read_hf_config(hf_path: str | Path) -> Any:
    """The Hugging Face config of a folder.

    Raises ValueError for a folder without config.json, and for a config.json that is not readable, has an unknown
    model_type or values of wrong types.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = Path(hf_path) / "config.json"
    if not path.is_file():
        raise ValueError(f"policy.path: expected a Hugging Face folder with config.json, found {hf_path}")
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, found {str(error).partition(';')[0]}") from error
    _check_known(found.get("model_type") if isinstance(found, dict) else None)
    try:
        return AutoConfig.from_pretrained(str(hf_path), trust_remote_code=False)
    except StrictDataclassError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def _check_known(kind: str | None) -> None:
    if kind not in FAMILIES:
        raise ValueError(f"config.json: model_type: expected one of {', '.join(FAMILIES)}, found {kind!r}")
