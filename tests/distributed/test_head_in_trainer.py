"""The head in the trainer: gradients added directly to main_grad, the loss in the chunk, weights that arrive late.

Why this matters: the projection bypasses autograd's accumulation and Megatron's hooks, so a gradient could be lost,
added twice, or computed from weights of the previous step. Not exercised: the `cuda` backend.
"""

from itertools import product

import pytest
import torch
from chosen import chosen
from runner import run_ranks
from sampling import sampled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PLAIN = dict(use_distributed_optimizer=False)
OVERLAPPED = dict(PLAIN, overlap_grad_reduce=True)
TP2, PP2 = ({f"{kind}_model_parallel_size": 2} for kind in ("tensor", "pipeline"))
SP = dict(sequence_parallel=True)
LAYOUTS = {
    "llama dp2": ("llama", dict(ddp=PLAIN)),
    "llama dp2 overlapped": ("llama", dict(ddp=OVERLAPPED)),
    "llama_tied dp2": ("llama_tied", dict(ddp=PLAIN)),
    "llama_tied dp2 overlapped": ("llama_tied", dict(ddp=OVERLAPPED)),
    "llama_tied pp2": ("llama_tied", dict(ddp=PLAIN, **PP2)),
    "llama tp2 sp": ("llama", dict(ddp=PLAIN, model=SP, **TP2)),
    "llama_tied tp2": ("llama_tied", dict(ddp=PLAIN, **TP2)),
}
"""One micro-batch on each data-parallel rank, or two on one."""
WAYS = {"autograd": (False, False), "straight": (None, False), "in chunk": (None, True), "chunk grad": (False, True)}
"""main_grad, and whether the loss is taken in the chunk."""

LATE = dict(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1)
"""Every parameter in a bucket of its own, which is gathered while the layers before it compute."""
TRAINED = {
    "dp2": ({}, {}),
    "dp2 two passes": ({}, dict(loss_in_chunk=False)),
    "dp2 late weights": (dict(ddp=LATE), {}),
    "dp2 two passes, late weights": (dict(ddp=LATE), dict(loss_in_chunk=False)),
    "tp2": (dict(parallel=TP2, model=SP), {}),
    "tp2 two passes": (dict(parallel=TP2, model=SP), dict(loss_in_chunk=False)),
    "tp2 little workspace": (dict(parallel=TP2, model=SP), dict(logit_workspace_mb=0.02)),
    "pp2": (dict(parallel=PP2), {}),
    "pp2 two passes": (dict(parallel=PP2), dict(loss_in_chunk=False)),
}


@pytest.fixture(scope="module")
def by_two(request, policies):
    cases = [(name, *LAYOUTS[name]) for name in sorted(chosen(request, "name"))]
    jobs = [
        (f"{name} {way}", policies[kind], layout, *how) for name, kind, layout in cases for way, how in WAYS.items()
    ]
    return run_ranks(2, "head_ranks:gradients", jobs)


@pytest.fixture(scope="module")
def trained(policies):
    jobs = [(name, policies["llama"], megatron, keys) for name, (megatron, keys) in TRAINED.items()]
    return run_ranks(2, "head_ranks:steps", jobs)


@pytest.mark.parametrize("name", sampled("gradients of the head", LAYOUTS, 3))
def test_main_grads_are_those_of_autograd(name, by_two):
    for rank, way in product(range(2), ("straight", "in chunk", "chunk grad")):
        expected, found = by_two[rank][f"{name} autograd"], by_two[rank][f"{name} {way}"]
        assert expected["straight"] == [] and found["left"] == expected["left"] == []
        head = "embedding.word_embeddings.weight" if "output_layer.weight" not in found["grads"] else None
        if way != "chunk grad" and "pp2" not in name:
            assert found["straight"] == [head or "output_layer.weight"]
        for key, grad in expected["grads"].items():
            assert grad.norm() > 0, key
            assert (found["grads"][key] - grad).norm() / grad.norm() < 2e-6, key


@pytest.mark.parametrize("name", ["llama_tied pp2"])
def test_on_a_pipeline_only_the_last_stage_adds_straight(name, by_two):
    assert [by_two[rank][f"{name} straight"]["straight"] for rank in range(2)] == [[], ["output_layer.weight"]]


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
def test_the_loss_in_the_chunk_trains_as_two_passes_do(layout, trained):
    for rank in range(2):
        assert_same_training(trained[rank][layout], trained[rank][f"{layout} two passes"])


def test_a_small_workspace_changes_nothing(trained):
    assert_same_training(trained[0]["tp2 little workspace"], trained[0]["tp2"])


@pytest.mark.parametrize("way", ["dp2", "dp2 two passes"])
def test_the_head_waits_for_weights_that_are_still_on_their_way(way, trained):
    late = "dp2 late weights" if way == "dp2" else "dp2 two passes, late weights"
    assert_same_training(trained[0][late], trained[0][way])
    assert trained[0][late]["logprobs"] == trained[1][late]["logprobs"]


def assert_same_training(found, expected):
    for ours, theirs in zip(found["reports"], expected["reports"], strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5, abs=1e-7)
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
        for key, value in theirs[2].items():
            assert ours[2][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    for key, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], weight, rtol=1e-4, atol=2e-5, msg=key)
