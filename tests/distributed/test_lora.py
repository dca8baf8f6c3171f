"""Adapters under every parallel layout: log-probabilities and gradients of A and B are those of PEFT.

Why this matters: a factor whose gradient is summed over the wrong ranks still trains, only worse, and nobody sees it.
The reference is transformers with PEFT in float64, the trainer computes in fp32. `FAULTS` are faults of public
systems, which the comparison has to see. Not exercised: bf16, Transformer Engine's layers, NCCL.
"""

import math

import lora_reference
import pytest
import random_policies
import torch
from chosen import chosen
from parity_layouts import CP2, CP4, EP2, EXPERTS, FIRST_LAYER, MLP, PLAIN, PP2, RECOMPUTED, SP, TP2
from runner import run_ranks
from sampling import sampled

pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-5
"""Of the norm of what differs, relative to that of the reference."""
ETP1, ETP2 = ({"expert_tensor_parallel_size": size} for size in (1, 2))
SOME = ["q_proj", "v_proj", "down_proj"]
KINDS = ("qwen2", "qwen3_moe", "llama_tied", "olmo2", "llama4")
ONE = {
    **{kind: (kind, {}) for kind in KINDS},
    "qwen2 unpacked": ("qwen2", dict(rows=tuple((n,) for row in random_policies.ROWS for n in row))),
    "qwen2 recomputed": ("qwen2", RECOMPUTED),
    "qwen2 first layer recomputed": ("qwen2", FIRST_LAYER),
    "qwen2 mlp recomputed": ("qwen2", MLP),
    "qwen3_moe recomputed": ("qwen3_moe", RECOMPUTED),
    "qwen3_moe experts recomputed": ("qwen3_moe", EXPERTS),
}
TWO = {
    "qwen2 tp2": ("qwen2", TP2),
    "qwen2 tp2 sp": ("qwen2", {**TP2, **SP}),
    "qwen2 tp2 recomputed": ("qwen2", {**TP2, **RECOMPUTED}),
    "qwen2 cp2": ("qwen2", CP2),
    "qwen2 cp2 recomputed": ("qwen2", {**CP2, **RECOMPUTED}),
    "qwen2 pp2": ("qwen2", PP2),
    "qwen2 pp2 recomputed": ("qwen2", {**PP2, **RECOMPUTED}),
    "qwen2 dp2": ("qwen2", {}),
    "qwen2 tp2 sp, some projections": ("some", {**TP2, **SP, "lora": {**lora_reference.SETTINGS, "targets": SOME}}),
    "llama_tied tp2 sp": ("llama_tied", {**TP2, **SP}),
    "llama_tied pp2": ("llama_tied", PP2),
    "olmo2 tp2 sp": ("olmo2", {**TP2, **SP}),
    "qwen3_moe ep2": ("qwen3_moe", EP2),
    "qwen3_moe tp2 sp": ("qwen3_moe", {**TP2, **SP}),
    "qwen3_moe tp2 etp1 sp": ("qwen3_moe", {**TP2, **ETP1, **SP}),
    "qwen3_moe etp2": ("qwen3_moe", ETP2),
    "qwen3_moe cp2": ("qwen3_moe", CP2),
    "qwen3_moe pp2": ("qwen3_moe", PP2),
    "llama4 ep2": ("llama4", EP2),
    "llama4 tp2 sp": ("llama4", {**TP2, **SP}),
}
FOUR = {
    "qwen2 tp2 pp2 sp": ("qwen2", {**TP2, **PP2, **SP}),
    "qwen2 tp2 cp2 sp": ("qwen2", {**TP2, **CP2, **SP}),
    "qwen2 tp2 dp2": ("qwen2", TP2),
    "qwen2 cp2 pp2": ("qwen2", {**CP2, **PP2}),
    "qwen2 cp4": ("qwen2", CP4),
    "qwen3_moe tp2 ep2 sp": ("qwen3_moe", {**TP2, **EP2, **SP}),
    "qwen3_moe tp2 ep2 etp1 sp": ("qwen3_moe", {**TP2, **EP2, **ETP1, **SP}),
    "qwen3_moe cp2 ep2": ("qwen3_moe", {**CP2, **EP2}),
    "qwen3_moe pp2 ep2": ("qwen3_moe", {**PP2, **EP2}),
    "llama4 tp2 ep2 sp": ("llama4", {**TP2, **EP2, **SP}),
}
FAULTS = {
    "unsummed_tokens": ("qwen2", {**TP2, **SP}),
    "experts_like_dense_layers": ("qwen3_moe", {**TP2, **SP}),
    "unsummed_columns": ("qwen3_moe", ETP2),
    "experts_over_all_data_parallel_ranks": ("qwen3_moe", EP2),
    "fused_accumulation": ("qwen3_moe", ETP2),
    "no_gradient_of_the_embeddings": ("qwen2", FIRST_LAYER),
}
"""Function of lora_ranks that makes the fault -> a layout of two ranks on which it matters."""


DRIFTING = ("unsummed_tokens", "unsummed_columns", "fused_accumulation")
"""Faults with which ranks that share a factor hold different values after a step."""


class References(dict):
    """Kind -> (folder of the policy, PEFT folder of its adapters, the reference's step on the fixed rows)."""

    def __init__(self, root):
        super().__init__()
        self._root = root

    def __missing__(self, kind):
        path = self._root / kind
        if kind == "some":
            adapted = lora_reference.policy("qwen2", path / "policy", SOME)
        else:
            adapted = lora_reference.policy(kind, path / "policy")
        lora_reference.save_adapter(adapted, path / "adapter")
        loss, logprobs = lora_reference.forward_backward(adapted, random_policies.rows())
        gradients = lora_reference.named(adapted, lambda parameter: parameter.grad)
        expected = dict(loss=loss, logprobs=logprobs, gradients=gradients, factors=lora_reference.named(adapted))
        self[kind] = (str(path / "policy"), str(path / "adapter"), expected)
        return self[kind]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return References(tmp_path_factory.mktemp("lora"))


def ranks(world_size, cases, references, *, fault=False):
    """For each rank, its answers by name."""
    jobs = []
    for name, (kind, layout) in cases.items():
        path, adapter, _ = references[kind]
        jobs.append((name, path, adapter, {**PLAIN, **layout, "fault": name if fault else None}))
    return run_ranks(world_size, "lora_ranks:many", jobs)


def of(request, cases):
    return {name: cases[name] for name in sorted(chosen(request, "name"))}


@pytest.fixture(scope="module")
def alone(request, references):
    return ranks(1, of(request, ONE), references)


@pytest.fixture(scope="module")
def by_two(request, references):
    return ranks(2, of(request, TWO), references)


@pytest.fixture(scope="module")
def by_four(request, references):
    return ranks(4, of(request, FOUR), references)


@pytest.fixture(scope="module")
def wrong(request, references):
    return ranks(2, of(request, FAULTS), references, fault=True)


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


def distances(found, expected):
    """What is wrong in the answers of all ranks: the relative distances of numbers, and factors that have drifted."""
    apart = {name: distance(found[0]["gradients"][name], g) for name, g in expected["gradients"].items()}
    apart["loss"] = abs(found[0]["loss"] / expected["loss"] - 1)
    norm = sum(float(g.norm()) ** 2 for g in expected["gradients"].values()) ** 0.5
    apart["gradient norm"] = max(abs(rank["grad_norm"] / norm - 1) for rank in found)
    for rank in found:
        if rank["logprobs"] is not None and rank["logprobs"].shape[1] == len(expected["logprobs"]):
            apart["log-probabilities"] = distance(rank["logprobs"][0], expected["logprobs"])
    everyone = [(key, digest) for rank in found for key, digest in rank["replicas"].items()]
    drifted = len(set(everyone)) - len(dict(everyone))
    return apart, drifted


def same_as_peft(found, expected, *, whole):
    """`found`: the answers of all ranks; `whole`: a rank has the log-probabilities of all rows."""
    first = found[0]
    trained = [name for rank in found for name in rank["trained"]]
    assert trained and all(".lora." in name for name in trained)
    assert first["factors"].keys() == expected["factors"].keys() == first["gradients"].keys()
    for name, factor in expected["factors"].items():
        assert torch.equal(first["factors"][name], factor.float()), name
    apart, drifted = distances(found, expected)
    print(f"largest relative distance {max(apart.values()):.1e}")
    assert {name: far for name, far in apart.items() if far > TOLERANCE} == {} and drifted == 0
    assert ("log-probabilities" in apart) == whole


def check(name, cases, answers, references):
    kind, layout = cases[name]
    sizes = [layout.get(f"{size}_parallel_size", 1) for size in ("tensor_model", "pipeline_model", "context")]
    same_as_peft([rank[name] for rank in answers], references[kind][2], whole=len(answers) == math.prod(sizes))


@pytest.mark.parametrize("name", sampled("adapters of one rank", ONE, 2))
def test_one_rank(name, alone, references):
    check(name, ONE, alone, references)


@pytest.mark.parametrize("name", sampled("adapters of two ranks", TWO, 4))
def test_two_ranks(name, by_two, references):
    check(name, TWO, by_two, references)


@pytest.mark.parametrize("name", sampled("adapters of four ranks", FOUR, 1))
def test_four_ranks(name, by_four, references):
    check(name, FOUR, by_four, references)


@pytest.mark.parametrize("name", FAULTS)
def test_a_known_fault_is_far_from_peft(name, wrong, references):
    apart, drifted = distances([rank[name] for rank in wrong], references[FAULTS[name][0]][2])
    print(f"largest relative distance {max(apart.values()):.1e}, {drifted} factors drifted")
    assert max(apart.values()) > 1000 * TOLERANCE
    assert (drifted > 0) == (name in DRIFTING)
