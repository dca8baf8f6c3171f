"""Published policies by their config.json as transformers 4 wrote it: every tensor and every parameter counted."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from family_configs import experts_apart

from megatron_scalerl.models import family, read_hf_config
from megatron_scalerl.models.family import check_layout

ROOT = Path(__file__).parents[2]
PUBLISHED = {
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-Nemo-Base-2407": 12_247_782_400,
    "OLMo-2-0425-1B": 1_484_916_736,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-30B-A3B": 30_532_122_624,
    "SmolLM3-3B": 3_075_098_624,
    "GLM-4.5-Air": 106_852_245_504,
    "GLM-4.7-Flash": 29_943_390_976,
    "Llama-4-Scout-17B-16E": 107_769_861_120,
}
"""Name -> parameters without vision tower, layers of multi-token prediction and biases of routers."""


def published(name):
    """config.json of a published policy: the one with which the recipes of full size plan, or the tests' own."""
    of_recipes = ROOT / "recipes/configs" / name / "config.json"
    return json.loads((of_recipes if of_recipes.exists() else ROOT / f"tests/data/configs/{name}.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_parameter_of_a_published_policy_has_its_place(name, tmp_path):
    """Names and shapes are those of transformers' module, each expert apart; none is there twice."""
    expected = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published(name)))
    config = read_hf_config(tmp_path)
    rules = [rule for rule in family(config).rules if rule.exported and not rule.frozen]
    found = {tensor: shape for rule in rules for tensor, shape in rule.hf_shapes.items()}
    assert sum(prod(shape) for shape in found.values()) == expected
    theirs = [(tensor, p) for tensor, p in on_meta(config).named_parameters() if "vision" not in tensor]
    theirs = {tensor: tuple(p.shape) for tensor, p in experts_apart(config.model_type, theirs)}
    theirs.pop("multi_modal_projector.linear_1.weight", None)
    assert found == theirs
    check_layout(family(config), tp_size=2, ep_size=16 if "num_moe_experts" in family(config).transformer else 1)


def on_meta(config):
    from transformers import AutoModelForCausalLM, Llama4ForConditionalGeneration

    with torch.device("meta"):
        if config.model_type == "llama4":
            return Llama4ForConditionalGeneration(config)
        return AutoModelForCausalLM.from_config(config)


def test_scout_has_rope_in_three_of_four_layers(tmp_path):
    written = published("Llama-4-Scout-17B-16E")
    written["text_config"] |= {"no_rope_layers": []}
    written["text_config"]["rope_scaling"] |= {"factor": 16.0, "high_freq_factor": 1.0}  # as its instruct version
    (tmp_path / "config.json").write_text(json.dumps(written))
    found = family(read_hf_config(tmp_path))
    assert found.transformer["no_rope_freq"] == [0, 0, 0, 1] * 12
    assert [style.chunked for style in found.layers] == [style.rope for style in found.layers]
    assert all(style.moe for style in found.layers) and found.attention_chunk_size == 8192
    assert found.generation_config == {"attn_temperature_tuning": True}
    # no ramp between kept and divided frequencies: ratios are 1 or 16
    plain = 1.0 / 5e5 ** (torch.arange(0, 128, 2) / 128)
    assert set((plain / found.inv_freq).round().int().tolist()) == {1, 16}
