"""The same step under every parallel layout: tensor, sequence, context, pipeline, expert and data parallel.

Why this matters: a layout is a question of speed; a step that depends on it is a bug in sharding, packing or gradient
reduction. Sequence lengths are not multiples of four, and chunks (16) and temperature steps (8) of the Llama-4 policy
are shorter than the sequences, so padding, chunks and scales all matter. Compared are the loss, the gradient norm
that the optimizer reports, every gradient in Hugging Face coordinates, and the exported weights before and after.

Not exercised: more than one step (test_dp_trainer), bits (different layouts sum in different orders), interleaved
pipelines, NCCL.
"""

import pytest
import random_policies
import torch
from chosen import chosen
from parity_layouts import (
    CP2,
    CP4,
    EP2,
    EXPERTS,
    FIRST_LAYER,
    PLAIN,
    PP2,
    RECOMPUTED,
    SP,
    TP2,
    same_step,
    same_weights,
)
from runner import run_ranks
from sampling import sampled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TWO_RANKS = {
    "llama tp2": ("llama", {**PLAIN, **TP2}),
    "llama tp2 sp": ("llama", {**PLAIN, **TP2, **SP}),
    "llama tp2 sp distributed optimizer": ("llama", {**TP2, **SP}),
    "llama pp2": ("llama", {**PLAIN, **PP2}),
    "llama dp2": ("llama", PLAIN),
    "llama dp2 distributed optimizer": ("llama", {}),
    "llama dp2 overlapped": ("llama", dict(ddp=dict(overlap_grad_reduce=True, overlap_param_gather=True))),
    "llama_tied tp2": ("llama_tied", {**PLAIN, **TP2}),
    "llama_tied pp2": ("llama_tied", {**PLAIN, **PP2}),
    "llama_biased tp2": ("llama_biased", {**PLAIN, **TP2}),
    "llama_biased tp2 sp": ("llama_biased", {**PLAIN, **TP2, **SP}),
    "mistral tp2 sp": ("mistral", {**PLAIN, **TP2, **SP}),
    "olmo2 tp2": ("olmo2", {**PLAIN, **TP2}),
    "olmo2 tp2 sp": ("olmo2", {**PLAIN, **TP2, **SP}),
    "olmo2 pp2": ("olmo2", {**PLAIN, **PP2}),
    "qwen2 tp2 sp": ("qwen2", {**PLAIN, **TP2, **SP}),
    "qwen2 pp2": ("qwen2", {**PLAIN, **PP2}),
    "qwen3 tp2": ("qwen3", {**PLAIN, **TP2}),
    "qwen3 tp2 sp": ("qwen3", {**PLAIN, **TP2, **SP}),
    "qwen3 pp2": ("qwen3", {**PLAIN, **PP2}),
    "qwen3_moe ep2": ("qwen3_moe", {**PLAIN, **EP2}),
    "qwen3_moe pp2": ("qwen3_moe", {**PLAIN, **PP2}),
    "qwen3_moe tp2 sp": ("qwen3_moe", {**PLAIN, **TP2, **SP}),
    "llama4 ep2": ("llama4", {**PLAIN, **EP2}),
    "llama4 ep2 distributed optimizer": ("llama4", EP2),
    "llama4 pp2": ("llama4", {**PLAIN, **PP2}),
    "llama4 tp2 sp": ("llama4", {**PLAIN, **TP2, **SP}),
    "llama cp2": ("llama", {**PLAIN, **CP2}),
    "llama cp2 distributed optimizer": ("llama", CP2),
    "llama cp2 recomputed": ("llama", {**PLAIN, **CP2, **RECOMPUTED}),
    "llama4 cp2": ("llama4", {**PLAIN, **CP2}),
    "llama4 cp2 recomputed": ("llama4", {**PLAIN, **CP2, **RECOMPUTED}),
    "qwen2 cp2": ("qwen2", {**PLAIN, **CP2}),
    "qwen3_moe cp2": ("qwen3_moe", {**PLAIN, **CP2}),
}
BF16 = dict(dtype="bfloat16")
IN_BF16 = {
    "llama": {**BF16, **TP2, **SP},
    "llama_tied": {**BF16, **PP2},
    "llama_biased": {**BF16, **PP2},
    "mistral": {**BF16, **PP2},
    "olmo2": {**BF16, **TP2, **SP},
    "qwen2": {**BF16, **TP2, **SP},
    "qwen3": {**BF16, **TP2, **SP},
    "qwen3_moe": {**BF16, **EP2},
    "llama4": {**BF16, **CP2},
}
"""Layouts in bf16, with fp32 main weights in the distributed optimizer."""
FOUR_RANKS = {
    "llama tp2 pp2 sp": ("llama", {**PLAIN, **TP2, **PP2, **SP}),
    "llama tp2 dp2": ("llama", {**PLAIN, **TP2}),
    "qwen3_moe tp2 ep2": ("qwen3_moe", {**PLAIN, **TP2, **EP2, **SP}),
    "qwen3_moe pp2 ep2": ("qwen3_moe", {**PLAIN, **PP2, **EP2}),
    "llama4 tp2 ep2": ("llama4", {**PLAIN, **TP2, **EP2, **SP}),
    "llama4 tp2 ep2 etp1": ("llama4", {**PLAIN, **TP2, **EP2, **SP, "expert_tensor_parallel_size": 1}),
    "llama4 pp2 ep2": ("llama4", {**PLAIN, **PP2, **EP2}),
    "llama cp2 tp2 sp": ("llama", {**PLAIN, **CP2, **TP2, **SP}),
    "llama4 cp2 tp2 sp": ("llama4", {**PLAIN, **CP2, **TP2, **SP}),
    "llama cp2 pp2": ("llama", {**PLAIN, **CP2, **PP2}),
    "llama4 cp2 pp2": ("llama4", {**PLAIN, **CP2, **PP2}),
    "llama cp2 dp2": ("llama", {**PLAIN, **CP2}),
    "llama cp2 dp2 distributed optimizer": ("llama", CP2),
    "llama4 cp2 ep2": ("llama4", {**PLAIN, **CP2, **EP2}),
    "llama4 cp4": ("llama4", {**PLAIN, **CP4}),
}
KINDS = ("llama", "llama_tied", "llama_biased", "mistral", "olmo2", "qwen2", "qwen3", "qwen3_moe", "llama4")
SOME_KINDS = sampled("kinds of the parity", KINDS, 2)
UNPACKED = tuple((length,) for row in random_policies.ROWS for length in row)


@pytest.fixture(scope="module")
def alone(request, policies):
    kinds = chosen(request, "kind")
    by_kind = kinds | {(TWO_RANKS | FOUR_RANKS)[name][0] for name in chosen(request, "name")}
    jobs = [(kind, policies[kind], PLAIN) for kind in sorted(by_kind)]
    for kind in sorted(kinds):
        layouts = {
            "unpacked": {**PLAIN, "rows": UNPACKED},
            "recomputed": {**PLAIN, **RECOMPUTED},
            "first layer": {**PLAIN, **FIRST_LAYER},
            "bf16": BF16,
        }
        if kind in ("qwen3_moe", "llama4"):
            layouts["experts"] = {**PLAIN, **EXPERTS}
        jobs += [(f"{kind} {name}", policies[kind], layout) for name, layout in layouts.items()]
    return run_ranks(1, "parity_ranks:many", jobs)[0]


@pytest.fixture(scope="module")
def by_two(request, policies):
    jobs = [(name, policies[TWO_RANKS[name][0]], TWO_RANKS[name][1]) for name in sorted(chosen(request, "name"))]
    jobs += [(f"{kind} bf16", policies[kind], IN_BF16[kind]) for kind in sorted(chosen(request, "kind"))]
    return run_ranks(2, "parity_ranks:many", jobs)[0]


@pytest.fixture(scope="module")
def by_four(policies):
    jobs = [(name, policies[kind], layout) for name, (kind, layout) in FOUR_RANKS.items()]
    return run_ranks(4, "parity_ranks:many", jobs)[0]


@pytest.mark.parametrize("name", sampled("parity of two ranks", TWO_RANKS, 3))
def test_two_ranks_make_the_same_step_and_export_what_they_loaded(name, by_two, alone, policies):
    same_step(by_two[name], alone[TWO_RANKS[name][0]])
    same_weights(by_two[name], policies[TWO_RANKS[name][0]])


@pytest.mark.full
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_make_the_same_step(name, by_four, alone, policies):
    same_step(by_four[name], alone[FOUR_RANKS[name][0]])
    same_weights(by_four[name], policies[FOUR_RANKS[name][0]])


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_bf16_steps_agree_within_bf16(kind, by_two, alone):
    """Rounding of activations differs between layouts and from fp32; the weights given out are bf16 exactly."""
    two, one, exact = by_two[f"{kind} bf16"], alone[f"{kind} bf16"], alone[kind]
    for found in (two, one):
        assert found["loss"] == pytest.approx(exact["loss"], rel=0.05)
        assert float(found["grad_norm"]) == pytest.approx(float(exact["grad_norm"]), rel=0.2)
        assert all(dtype == "bfloat16" for _, dtype, _ in found["manifest"])
        for name, weight in exact["weights"].items():
            assert torch.equal(found["weights"][name], weight.bfloat16()), name
            assert found["stepped"][name].dtype == torch.bfloat16
    assert two["loss"] == pytest.approx(one["loss"], rel=0.02)


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_packed_is_unpacked(kind, alone):
    same_step(alone[f"{kind} unpacked"], alone[kind])
    apart = (alone[f"{kind} unpacked"]["logprobs"] - alone[kind]["logprobs"]).abs().max()
    assert apart < 2e-5


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_recomputed_activations_give_the_same_step(kind, alone):
    partly = [f"{kind} {part}" for part in ("recomputed", "first layer", "experts") if f"{kind} {part}" in alone]
    assert len(partly) == (3 if kind in ("qwen3_moe", "llama4") else 2)
    for name in partly:
        same_step(alone[name], alone[kind])


@pytest.mark.parametrize("name", ["llama dp2 overlapped"])
def test_weights_are_read_after_the_background_gather(name, by_two, alone):
    """With overlap_param_gather the optimizer's new weights arrive late; an export must wait for them."""
    for weight, expected in alone["llama"]["stepped"].items():
        assert (by_two[name]["stepped"][weight] - expected).abs().max() < 1e-6, weight
