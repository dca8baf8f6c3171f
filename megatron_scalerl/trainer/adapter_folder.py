"""Reads the PEFT folder that training starts from (policy.adapter), with exactly the adapters of policy.lora.

Some keys of adapter_config.json are compared with policy.lora, and some have no effect on loaded factors. All other
keys have to be off: with one of them on, the adapter would not compute W x + alpha / rank B A x.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.assembly import TORCH_NAMES, has_nonfinite
from megatron_scalerl.checkpoints.hf_folder import HfReader, open_folder
from megatron_scalerl.models.adapters import CONFIG, read_config
from megatron_scalerl.models.family import Family
from megatron_scalerl.processes.logs import listed
from megatron_scalerl.recipe.sections import PolicySection

logger = logging.getLogger(__name__)

_ALLOWED_VALUES: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": (None, "none"),
    # Values that are not in this tuple change the base's weights (peft/tuners/lora/layer.py, update_layer).
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
"""Key of adapter_config.json -> the values with which an adapter only adds B A to the unchanged base.

Keys that are neither here nor in _WITHOUT_EFFECT or _COMPARED have to be off."""
_WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
    *("fan_in_fan_out", "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config"),
    *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "unsloth_fixed"),
    "velora_config",
)
"""Keys of PEFT 0.21 and of Unsloth without an effect on loaded factors.

They concern initial values, gradients, Megatron's own layers, or another key that has to be off. PEFT turns
fan_in_fan_out off for linear layers."""
_COMPARED = ("r", "lora_alpha", "target_modules", "exclude_modules")


def adapter_reader(policy: PolicySection, adapters: Family) -> HfReader:
    """A reader of the folder policy.adapter, which has exactly the factors of `adapters`, all of finite numbers.

    Warns if the adapter was trained with another base model. Raises ValueError for a folder whose rank or alpha
    differs from policy.lora's, whose layers or shapes differ from `adapters`, or whose adapter PEFT would not compute
    as W x + alpha / rank B A x.
    """
    assert policy.adapter is not None
    assert policy.lora is not None
    path = Path(policy.adapter)
    config = read_config(path)
    _check_config(
        f"policy.adapter: {path / CONFIG}", config, {"r": policy.lora.rank, "lora_alpha": policy.lora.alpha}
    )
    reader = HfReader(open_folder(path))
    shapes = {name: shape for rule in adapters.rules for name, shape in rule.hf_shapes.items()}
    if different_names := sorted(shapes.keys() ^ reader.folder.tensors.keys()):
        raise ValueError(
            f"policy.adapter: {path}: the tensors and policy.lora.targets differ; set the targets to the adapter's "
            f"layers (missing or unexpected: {listed(different_names)})"
        )
    for name, shape in shapes.items():
        _check_tensor(reader, name, shape, config)
    base = str(config.get("base_model_name_or_path") or policy.path)
    # policy.path may be the model's folder in the hub's cache, models--ORG--NAME.
    name = re.escape(Path(base).name)
    if base != policy.path and not re.search(rf"(^|/|--){name}(/|$)", policy.path, re.IGNORECASE):
        logger.warning(
            "policy.adapter: %s was trained with the base model %s, but policy.path is %s; with another base model "
            "an adapter gives another policy",
            path,
            base,
            policy.path,
        )
    return reader


def _check_config(place: str, config: Mapping[str, Any], expected: Mapping[str, float]) -> None:
    """Raises ValueError if rank or alpha differ from `expected`, or a key makes the adapter do more than add B A."""
    for key, value in expected.items():
        if config.get(key) != value:
            raise ValueError(
                f"{place}: {key} is {config.get(key)!r}, but policy.lora sets {value!r}; set policy.lora.rank and "
                "policy.lora.alpha to r and lora_alpha of this file"
            )
    for key in {**_ALLOWED_VALUES, **config}:
        setting = config.get(key)
        # `is` distinguishes False from 0, which equals False and may be the number of a layer or a token.
        usual = setting is False or setting in (None, "", [], {})
        if key in _ALLOWED_VALUES:
            usual = setting in _ALLOWED_VALUES[key]
        if not usual and key not in _WITHOUT_EFFECT + _COMPARED:
            raise ValueError(
                f"{place}: {key} is {str(setting)[:60]}, but an adapter may only add alpha / rank B A to an "
                "unchanged base; merge the adapter into the base with PEFT, and set policy.path to the merged model"
            )


def _check_tensor(reader: HfReader, name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> None:
    """Raises ValueError for a factor that PEFT would not load, and for a wrong shape, an unknown type, NaN or Inf."""
    tensor = reader.folder.tensors[name]
    place = f"policy.adapter: {reader.folder.path / tensor.file}: {name}"
    if tensor.shape != shape:
        raise ValueError(
            f"{place}: the shape is {list(tensor.shape)}, but the model in policy.path needs {list(shape)}; set "
            f"policy.path to the adapter's base model, {config.get('base_model_name_or_path')}"
        )
    if tensor.dtype not in TORCH_NAMES:
        raise ValueError(f"{place}: its type is {tensor.dtype}; save the adapter in one of {', '.join(TORCH_NAMES)}")
    if has_nonfinite(reader.bits(name), tensor.dtype):
        raise ValueError(f"{place}: the factor has NaN or Inf; take another checkpoint of the adapter")
    module = name.removeprefix("base_model.model.").partition(".lora_")[0]
    targets = config.get("target_modules")
    # PEFT reads a string as a regular expression. A foreign file's expression is not run: every module is accepted.
    targeted = not isinstance(targets, list) or _names(targets, module)
    excluded = config.get("exclude_modules")
    if not targeted or isinstance(excluded, str) or _names(excluded or (), module):
        raise ValueError(
            f"{place}: PEFT would not load this factor, because target_modules or exclude_modules of {CONFIG} leaves "
            f"out {module}; correct the two lists"
        )


def _names(names: Iterable[str], module: str) -> bool:
    """Whether one of `names` is the module's name or the end of that name, as in peft/tuners/tuners_utils.py."""
    return any(f".{module}".endswith(f".{name}") for name in names)
