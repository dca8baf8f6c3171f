"""Model families: Hugging Face config -> Megatron options, and one weight map per family used both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_scalerl.models import llama, llama4
from megatron_scalerl.models.family import Family

FAMILIES: dict[str, Callable[[Any], Family]] = {
    "llama": llama.family,
    "llama4": llama4.family,
    "llama4_text": llama4.family,
}
"""`model_type` of config.json -> the family's maker."""

__all__ = ["FAMILIES", "Family", "family", "read_hf_config"]


def family(hf_config: Any) -> Family:
    """The Family of a Hugging Face config. Raises ValueError for an unknown model_type."""
    kind = hf_config.model_type
    if kind not in FAMILIES:
        raise ValueError(f"config.json: model_type: expected one of {', '.join(FAMILIES)}, found {kind!r}")
    return FAMILIES[kind](hf_config)


def read_hf_config(hf_path: str | Path) -> Any:
    """The Hugging Face config of a folder. Raises ValueError where the folder holds no config.json."""
    from transformers import AutoConfig

    if not (Path(hf_path) / "config.json").is_file():
        raise ValueError(f"policy.path: expected a Hugging Face folder with config.json, found {hf_path}")
    return AutoConfig.from_pretrained(str(hf_path))
