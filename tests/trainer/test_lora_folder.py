"""A PEFT folder to start from: it has to hold the adapters of the recipe, and no others."""

import json

import pytest
import torch
from family_configs import family_of
from safetensors.torch import save_file

from megatron_scalerl.models.adapters import adapter_family
from megatron_scalerl.recipe.sections import LoraSection
from megatron_scalerl.trainer.layers.lora import _checked_folder

LORA = LoraSection(rank=2, alpha=8.0, targets=("q_proj", "down_proj"))
CONFIG = dict(peft_type="LORA", r=2, lora_alpha=8, use_rslora=False, alpha_pattern=None)
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def folder(path, *, drop=(), add=(), **config):
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    adapters = adapter_family(family_of("qwen2"), rank=LORA.rank, targets=LORA.targets)
    shapes = {name: shape for rule in adapters.rules for name, shape in rule.hf_shapes.items() if name not in drop}
    tensors = {name: torch.full(shape, float(number)) for number, (name, shape) in enumerate(shapes.items())}
    save_file(tensors | {name: torch.zeros(1) for name in add}, path / "adapter_model.safetensors")
    return path, adapters, LORA


def test_the_adapters_of_the_recipe_are_read(tmp_path):
    reader = _checked_folder(*folder(tmp_path))
    assert reader.read(Q_PROJ, (slice(0, 2), slice(0, 5)), (2, 24)).shape == (2, 5)


@pytest.mark.parametrize(
    ("key", "value"),
    [("r", 4), ("lora_alpha", 16), ("lora_alpha", None), ("use_rslora", True), ("alpha_pattern", {"q_proj": 4})],
)
def test_another_scale_is_refused_by_its_key(tmp_path, key, value):
    with pytest.raises(ValueError, match=rf"policy\.adapter: .*adapter_config\.json: {key} is"):
        _checked_folder(*folder(tmp_path, **{key: value}))


@pytest.mark.parametrize("start", [True, False, "gaussian", "pissa", "pissa_niter_4", "olora", "loftq", "lora_ga"])
def test_adapters_that_replace_a_part_of_the_base_are_refused(tmp_path, start):
    if start in (True, False, "gaussian"):
        _checked_folder(*folder(tmp_path, init_lora_weights=start))
        return
    with pytest.raises(ValueError, match=f"init_lora_weights is '{start}'"):
        _checked_folder(*folder(tmp_path, init_lora_weights=start))


@pytest.mark.parametrize("change", [dict(drop=[Q_PROJ]), dict(add=["base_model.model.lm_head.lora_A.weight"])])
def test_other_layers_are_refused_by_their_names(tmp_path, change):
    [[name]] = change.values()
    with pytest.raises(ValueError, match=f"policy.lora.targets .*{name}"):
        _checked_folder(*folder(tmp_path, **change))


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        _checked_folder(tmp_path, family_of("qwen2"), LORA)
