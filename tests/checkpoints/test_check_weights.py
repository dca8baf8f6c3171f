"""A folder holds the weights that its config.json describes, or all that read it say so before any process."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from random_policies import make
from refusals import refused
from safetensors.torch import load_file, save_file

from megatron_scalerl.checkpoints.weight_map import check_weights
from megatron_scalerl.controller.preflight import check_inputs
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.trainer.sft import run_sft

ROOT = Path(__file__).parents[2]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies") / "tied"
    make("llama_tied", folder)
    return folder


def changed(policy, folder, **tensors):
    """A copy of the policy with these tensors, None: without; a dict: with these keys in config.json."""
    shutil.copytree(policy, folder)
    config = json.loads((folder / "config.json").read_text()) | tensors.pop("config", {})
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors") | tensors
    save_file({name: t for name, t in weights.items() if t is not None}, folder / "model.safetensors")
    return folder


def test_a_head_that_repeats_the_embedding_is_fine(policy, tmp_path):
    check_weights(policy)
    head = load_file(policy / "model.safetensors")[EMBEDDING].clone()
    check_weights(changed(policy, tmp_path / "copy", **{HEAD: head}))


FAULTS = {
    "another head": ({HEAD: lambda w: w[EMBEDDING] + 1e-6}, "config.json ties the head to the embedding"),
    "a head of another type": ({HEAD: lambda w: w[EMBEDDING].half()}, "config.json ties the head to the embedding"),
    "a missing tensor": ({EMBEDDING: lambda w: None}, "lacks tensors of the policy: model.embed_tokens.weight"),
    "quantized": ({"config": lambda w: {"quantization_config": {"quant_method": "fp8"}}}, r"are quantized \(fp8\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_with_other_weights_is_refused_in_one_line(policy, tmp_path, fault):
    changes, said = FAULTS[fault]
    weights = load_file(policy / "model.safetensors")
    folder = changed(policy, tmp_path / "p", **{name: value(weights) for name, value in changes.items()})
    with refused(said):
        check_weights(folder)


def test_train_and_sft_refuse_it_before_any_process(tiny, tmp_path):
    folder = changed(tiny / "base_policy", tmp_path / "p", **{"model.norm.scale": torch.ones(3)})
    paths = [f"policy.path={folder}", f"prompts.path={tiny / 'prompts.jsonl'}", f"sft.path={tiny / 'sft.jsonl'}"]
    recipe = load_recipe(ROOT / "recipes/tiny_cpu.yaml", [*paths, f"prompts.held_out_path={tiny / 'held_out.jsonl'}"])
    for command in (lambda: check_inputs(recipe), lambda: run_sft(recipe, tmp_path / "out")):
        with refused(r"does not have the tensors"):
            command()
    assert not (tmp_path / "out").exists()
