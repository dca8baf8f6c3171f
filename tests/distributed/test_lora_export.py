"""Adapters of a checkpoint, exported, started from and sent: all of them compute what the trainer computes."""

import json

import pytest
import torch
from layouts import kind_of, layout, layout_of
from runner import run_ranks
from safetensors.torch import load_file
from sampling import sampled

from megatron_scalerl.checkpoints.to_peft import Adapted, to_merged, to_peft
from megatron_scalerl.recipe.sections import LoraSection

pytest.importorskip("peft", reason="peft is not installed")

import lora_reference
import random_policies

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-6
"""Of the norm of logits that differ, relative to that of the trainer's."""
LORA = LoraSection(**lora_reference.SETTINGS)
CASES = {
    "qwen2": (1, "tp2"),
    "qwen2 tp2 sp": (2, "pp2"),
    "llama_tied pp2": (2, "tp2"),
    "qwen3_moe ep2": (2, "tp2 sp"),
    "llama4": (1, "ep2"),
}
"""Row of the checkpoint -> its ranks, layout of two ranks that start from the export."""


@torch.no_grad()
def logits(model):
    return random_policies.row_logits(model, random_policies.rows()[0])


def distance(found, expected):
    return float((found.float() - expected).norm() / expected.norm())


def differs(weight, other):
    return not torch.equal(weight, other)


@pytest.mark.parametrize("case", sampled("exported adapters", CASES, 2))
def test_what_peft_and_transformers_and_engines_get_is_the_trainers(case, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    kind, (ranks, other) = kind_of(case), CASES[case]
    path, checkpoint, adapter, merged = (tmp_path / name for name in ("base", "checkpoint", "adapter", "merged"))
    more = {"mlp_only_layers": []} if kind == "qwen3_moe" else {}
    random_policies.make(kind, path, std=lora_reference.STD, num_hidden_layers=2, **more)
    drawn, expected = run_ranks(ranks, "lora_export_ranks:save", str(path), layout_of(case), str(checkpoint))[0]
    policy = Adapted(path=str(path), dtype="float32", **LORA.model_dump())
    to_peft(checkpoint, adapter, policy)
    to_merged(checkpoint, merged, policy)
    started, alone, whole = run_ranks(
        2, "lora_export_ranks:start", str(path), {**layout(other), "adapter": str(adapter)}
    )[0]
    if expected is None:
        expected = started
    elif started is not None:
        assert distance(started, expected) <= TOLERANCE

    factors = load_file(adapter / "adapter_model.safetensors")
    assert factors.keys() == drawn.keys()
    for name, factor in factors.items():
        assert torch.equal(factor, drawn[name]), name
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert distance(logits(base), expected) > 0.1
    if kind != "llama4":  # peft has no form of its experts that are stored transposed
        assert distance(logits(PeftModel.from_pretrained(base, adapter)), expected) <= TOLERANCE
    weights = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert distance(logits(weights), expected) <= TOLERANCE
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == lora_reference.RANK

    scale = lora_reference.ALPHA / lora_reference.RANK
    assert alone.keys() == factors.keys()
    for name, factor in factors.items():
        assert torch.equal(alone[name], factor * (scale if ".lora_B." in name else 1.0)), name
    exported = load_file(merged / "model.safetensors")
    assert whole.keys() == exported.keys()
    adapted = [
        name for name, weight in load_file(path / "model.safetensors").items() if differs(weight, exported[name])
    ]
    assert len(adapted) == len(factors) / 2 or kind == "llama4"  # whose experts are in one tensor
    for name, weight in exported.items():
        assert distance(whole[name], weight) <= TOLERANCE, name
