"""The head in the trainer: gradients added directly to main_grad, the loss in the chunk, weights that arrive late.

Why this matters: the projection bypasses autograd's accumulation and Megatron's hooks, so a gradient could be lost,
added twice, or computed from weights of the previous step. Not exercised: the `cuda` backend.
"""

from itertools import product

import pytest
import torch
from chosen import chosen
from layouts import grid, kind_of, layout, layout_of
from runner import run_ranks
from sampling import sampled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAYOUTS = grid(
    """
    llama dp2, llama dp2 reduced-early, llama_tied dp2, llama_tied dp2 reduced-early, llama_tied pp2,
    llama tp2 sp, llama_tied tp2
    """
)
"""One micro-batch on each data-parallel rank, or two on one."""
WAYS = {"autograd": (False, False), "straight": (True, False), "in chunk": (True, True), "chunk grad": (False, True)}
"""Whether the head sees its main_grad, and whether the loss is taken in the chunk."""

LATE = dict(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1)
"""Every parameter in a bucket of its own, which is gathered while the layers before it compute."""
TWO_PASSES = dict(loss_in_chunk=False)
TRAINED = {
    "dp2": {},
    "dp2 two passes": TWO_PASSES,
    "dp2 late weights": {},
    "dp2 two passes, late weights": TWO_PASSES,
    "tp2": {},
    "tp2 two passes": TWO_PASSES,
    "tp2 little workspace": dict(logit_workspace_mb=0.02),
    "pp2": {},
    "pp2 two passes": TWO_PASSES,
}
"""Layout and more -> keys of the trainer section."""


@pytest.fixture(scope="module")
def by_two(request, policies):
    jobs = [
        (f"{name} {way}", policies[kind_of(name)], layout_of(name, "whole"), *how)
        for name in sorted(chosen(request, "name"))
        for way, how in WAYS.items()
    ]
    return run_ranks(2, "head_ranks:gradients", jobs)


@pytest.fixture(scope="module")
def trained(policies):
    jobs = []
    for name, keys in TRAINED.items():
        late = {"ddp": LATE} if "late weights" in name else {}
        jobs.append((name, policies["llama"], {**layout(name.split()[0]), **late}, keys))
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


@pytest.mark.parametrize("words", ["dp2", "tp2", "pp2"])
def test_the_loss_in_the_chunk_trains_as_two_passes_do(words, trained):
    for rank in range(2):
        assert_same_training(trained[rank][words], trained[rank][f"{words} two passes"])


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
