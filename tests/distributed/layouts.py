"""Parallel layouts, and what makes two steps the same."""

import pytest
import torch

PLAIN = dict(ddp=dict(use_distributed_optimizer=False))
"""Gradients whole on every rank; the distributed optimizer keeps shards of them."""


SP = dict(model=dict(sequence_parallel=True))


TP2, PP2, EP2 = ({f"{kind}_model_parallel_size": 2} for kind in ("tensor", "pipeline", "expert"))
CP2, CP4 = ({"context_parallel_size": size} for size in (2, 4))


RECOMPUTED = dict(model=dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1))
FIRST_LAYER = dict(model=dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1))
EXPERTS = dict(model=dict(recompute_granularity="selective", recompute_modules=["moe"]))
MLP = dict(model=dict(recompute_granularity="selective", recompute_modules=["mlp"]))
"""What the recipes of full size set."""


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
