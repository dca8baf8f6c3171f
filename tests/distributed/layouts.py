"""Parallel layouts by their words, and what makes two steps the same.

A row of a grid is a policy and the words of a layout, "llama4 tp2 sp recomputed": its name says all of it.
"""

import pytest
import torch

SIZES = {"tp": "tensor_model", "pp": "pipeline_model", "ep": "expert_model", "etp": "expert_tensor", "cp": "context"}
WORDS = {
    **{f"{short}{n}": {f"{name}_parallel_size": n} for short, name in SIZES.items() for n in (1, 2, 4)},
    "dp2": {},
    "sp": {"model": {"sequence_parallel": True}},
    # Gradients whole on every rank; the distributed optimizer keeps shards of them.
    "whole": {"ddp": {"use_distributed_optimizer": False}},
    "sharded": {},
    "overlapped": {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    "reduced-early": {"ddp": {"overlap_grad_reduce": True}},
    "bf16": {"dtype": "bfloat16"},
    # What the recipes of full size set.
    "recomputed": {
        "model": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    },
    "first-layer": {
        "model": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    },
    "experts": {"model": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
    "mlp": {"model": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}},
    "per-token": {"model": {"calculate_per_token_loss": True}},
    # Layers of the two stages of a pipeline.
    "1+3": {"model": {"num_layers_in_first_pipeline_stage": 1}},
    "3+1": {"model": {"num_layers_in_last_pipeline_stage": 1}},
}
"""Word -> keys of megatron.parallel, and model=, ddp=, dtype=."""


def grid(text):
    """The rows of a text, between commas."""
    return tuple(row.strip() for row in text.split(","))


def layout(words):
    """The keys of all words together."""
    found = {}
    for word in words.split():
        for key, value in WORDS[word].items():
            found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


def kind_of(row):
    """The policy of a row."""
    return row.partition(" ")[0]


def layout_of(row, also=""):
    """The layout of a row, with further words."""
    return layout(f"{also} {row.partition(' ')[2]}")


def gradients_whole(row):
    """`layout_of` where gradients are compared: whole on every rank, unless the row says otherwise."""
    return layout_of(row, "" if {"sharded", "overlapped", "bf16"} & {*row.split()} else "whole")


def same_step(found, expected):
    """The same loss, gradients and weights after the step.

    AdamW's first step is its learning rate times the gradient's sign: where a gradient is as small as rounding, the
    sign is anything.
    """
    assert abs(expected["loss"]) > 1.0 and float(expected["grad_norm"]) > 1.0
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert float(found["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=1e-5)
    for name, weight in expected["stepped"].items():
        moved = (weight - expected["weights"][name]).abs() > 1e-4
        apart = (found["stepped"][name] - weight).abs() > 1e-5
        assert moved.any() and apart.float().mean() < 1e-3, name
    for name, grad in expected["grads"].items() if "grads" in found else ():
        assert grad.norm() > 0, name
        assert (found["grads"][name] - grad).norm() / grad.norm() < 2e-5, name


def same_weights(found, path):
    """Hugging Face -> Megatron -> Hugging Face, bit for bit, in the manifest's order and shapes."""
    from safetensors.torch import load_file

    saved = load_file(f"{path}/model.safetensors")
    assert list(found["weights"]) == [name for name, _, _ in found["manifest"]]
    assert set(found["weights"]) == set(saved)
    for name, dtype, shape in found["manifest"]:
        assert (dtype, shape) == ("float32", tuple(saved[name].shape))
        assert torch.equal(found["weights"][name], saved[name]), name
