"""PEFT folders, written without PEFT."""

import json

import torch
from safetensors.torch import save_file

from megatron_scalerl.models.adapters import adapter_family

CONFIG = dict(peft_type="LORA", use_rslora=False, alpha_pattern=None)


def save_adapter(path, family, lora, *, drop=(), change=None, **config):
    """A PEFT folder of `lora`'s adapters beside the family; returns their family.

    The n-th factor has the value n throughout. drop, change: names of factors left out, and factors that are others.
    """
    path.mkdir(exist_ok=True)
    settings = {"r": lora.rank, "lora_alpha": lora.alpha, **CONFIG, **config}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    adapters = adapter_family(family, rank=lora.rank, targets=lora.targets)
    shapes = {name: shape for rule in adapters.rules for name, shape in rule.hf_shapes.items() if name not in drop}
    tensors = {name: torch.full(shape, float(n)) for n, (name, shape) in enumerate(shapes.items())}
    save_file(tensors | (change or {}), path / "adapter_model.safetensors")
    return adapters
