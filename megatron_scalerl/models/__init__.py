"""Model families: Megatron options from a Hugging Face config, and one weight map per family.

A weight map serves both conversions, from Hugging Face to Megatron and from Megatron to Hugging Face."""

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_scalerl.models import (
    deepseek,
    dots1,
    ernie4_5,
    exaone4,
    glm4_moe,
    glm4_moe_lite,
    llama,
    llama4,
    minimax_m2,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from megatron_scalerl.models.adapters import refuse_adapter
from megatron_scalerl.models.family import Family
from megatron_scalerl.models.unsupported import parts_of

FAMILIES: dict[str, Callable[..., Family]] = {
    "deepseek_v3": deepseek.family,
    "dots1": dots1.family,
    "ernie4_5": ernie4_5.family,
    "exaone4": exaone4.family,
    "glm4_moe": glm4_moe.family,
    "glm4_moe_lite": glm4_moe_lite.family,
    "kimi_k2": deepseek.family,
    "llama": llama.family,
    "llama4": llama4.family,
    "llama4_text": llama4.family,
    "minimax_m2": minimax_m2.family,
    "mistral": mistral.family,
    "mixtral": mixtral.family,
    "olmo2": olmo2.family,
    "olmoe": olmoe.family,
    "qwen2": qwen2.family,
    "qwen3": qwen3.family,
    "qwen3_moe": qwen3_moe.family,
    "seed_oss": seed_oss.family,
    "smollm3": smollm3.family,
}
"""`model_type` of config.json -> function that builds the `Family` of a config."""

MOST_PARTS = 10_000
"""Largest number of layers, heads or experts that a config may state: a Family needs memory for each."""
AT_LEAST_1 = (
    *("hidden_size", "intermediate_size", "vocab_size", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
"""Keys of config.json whose value must be at least 1, if present."""

__all__ = ["FAMILIES", "Family", "family", "read_hf_config"]


def family(hf_config: Any, names: Collection[str] = ()) -> Family:
    """Build the Family (Megatron options and weight map) of a Hugging Face config.

    names: names of the folder's tensors, from which a Qwen3 model's layout, with fused or separate experts, is read.

    Raises ValueError for an unknown model_type, and for a config that the model's family refuses.
    """
    kind = hf_config.model_type
    if kind not in FAMILIES:
        raise ValueError(_unsupported("config.json", hf_config.to_dict() | {"model_type": kind}))
    try:
        # Only Qwen3's checkpoints come in two layouts: with separate experts and with fused experts.
        if kind == "qwen3_moe":
            fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
            return qwen3_moe.family(hf_config, fused=fused)
        return FAMILIES[kind](hf_config)
    except ValueError as error:
        raise ValueError(os.path.join(hf_config.name_or_path, str(error))) from None


def read_hf_config(hf_path: str | Path) -> Any:
    """The Hugging Face config of a folder.

    Raises ValueError for a folder without config.json, and for an adapter's folder. Raises ValueError for a
    config.json that cannot be read, has an unknown model_type or values of wrong types, or lists an architecture that
    does not belong to the model_type. Raises ValueError for a model without a language model's head.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, DeepseekV3Config

    refuse_adapter(hf_path)
    path = Path(hf_path) / "config.json"
    if not path.is_file():
        raise ValueError(f"policy.path: {hf_path} is not a Hugging Face folder: it has no config.json")
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the file is not valid JSON: {str(error).partition(';')[0]}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: the file has to hold a JSON object, not a {type(config).__name__}")
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(_unsupported(str(path), config))
    heads: tuple[str, ...] = ("ForCausalLM",)
    # A multimodal model has text settings in `text_config`; the architecture may end in ForConditionalGeneration.
    if "text_config" in config:
        heads += ("ForConditionalGeneration",)
    architectures = config.get("architectures")
    if not isinstance(architectures, list):
        architectures = []
    for architecture in architectures:
        if not str(architecture).endswith(heads):
            raise ValueError(
                f"{path}: {architecture} has no language-model head (but a reward model's or classifier's, "
                "for example), so the model cannot be a policy; take a model of type ...ForCausalLM"
            )
    _check_numbers(path, config)
    try:
        # Kimi-K2 has DeepSeek-V3's architecture, and transformers has no class for its model_type.
        if kind == "kimi_k2":
            read = DeepseekV3Config.from_dict(config)
        else:
            # A config may name Python code in the folder, which is never run.
            read = AutoConfig.from_pretrained(str(hf_path), trust_remote_code=False)
    # StrictDataclassError has a text of several lines, which are joined to one line.
    except StrictDataclassError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        line = " ".join(map(str, error.args))
        raise ValueError(f"{path}: transformers cannot read this config: {line}; correct the file") from error
    policy = type(read).__name__.removesuffix("Config").removesuffix("Text")
    for architecture in architectures:
        if architecture not in {policy + head for head in heads}:
            raise ValueError(
                f"{path}: architectures says {architecture} (engines read this key), but model_type {kind!r} means "
                f"{policy}{heads[-1]}; correct the wrong key"
            )
    return read


def _check_numbers(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError for more than MOST_PARTS layers, heads or experts, and for a key of AT_LEAST_1 below 1."""
    items = list(config.items())
    if isinstance(config.get("text_config"), dict):
        items += config["text_config"].items()
    for key, value in items:
        if not isinstance(value, int | float):
            continue
        if key.endswith(("layers", "heads", "experts")) and value > MOST_PARTS:
            raise ValueError(f"{path}: {key}: {value:,} is too large; at most {MOST_PARTS:,} are accepted")
        if key in AT_LEAST_1 and value < 1:
            raise ValueError(f"{path}: {key}: {value} is too small; the value has to be at least 1")


def _unsupported(where: str, config: Mapping[str, Any]) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    supported_keys = {key for name in FAMILIES if name in CONFIG_MAPPING for key in CONFIG_MAPPING[name]().to_dict()}
    parts = parts_of(config, supported_keys)
    return (
        f"{where}: model_type {kind!r} is not supported: the model has {parts}; supported are {', '.join(FAMILIES)}; "
        "docs/families.md says how to add a family"
    )
