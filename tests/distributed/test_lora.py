"""Adapters under every parallel layout: log-probabilities and gradients of A and B are those of PEFT.

Why this matters: a factor whose gradient is summed over the wrong ranks still trains, only worse, and nobody sees it.
The reference is transformers with PEFT in float64, the trainer computes in fp32. Not exercised: bf16, Transformer
Engine's layers, NCCL.
"""

import math

import lora_reference
import pytest
import random_policies
import torch
from chosen import Worlds, chosen
from layouts import grid, kind_of, layout_of
from sampling import sampled

pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-5
"""Of the norm of what differs, relative to that of the reference."""
SOME = ["q_proj", "v_proj", "down_proj"]
ROWS = {
    1: grid(
        """
        qwen2, qwen3_moe, llama_tied, olmo2, llama4, qwen2 unpacked, qwen2 recomputed, qwen2 first-layer,
        qwen2 mlp, qwen3_moe recomputed, qwen3_moe experts
        """
    ),
    2: grid(
        """
        qwen2 tp2, qwen2 tp2 sp, qwen2 tp2 recomputed, qwen2 cp2, qwen2 cp2 recomputed, qwen2 pp2,
        qwen2 pp2 recomputed, qwen2 dp2, some tp2 sp, llama_tied tp2 sp, llama_tied pp2, olmo2 tp2 sp,
        qwen3_moe ep2, qwen3_moe tp2 sp, qwen3_moe tp2 etp1 sp, qwen3_moe etp2, qwen3_moe cp2,
        qwen3_moe pp2, llama4 ep2, llama4 tp2 sp
        """
    ),
    4: grid(
        """
        qwen2 tp2 pp2 sp, qwen2 tp2 cp2 sp, qwen2 tp2 dp2, qwen2 cp2 pp2, qwen2 cp4, qwen3_moe tp2 ep2 sp,
        qwen3_moe tp2 ep2 etp1 sp, qwen3_moe cp2 ep2, qwen3_moe pp2 ep2, llama4 tp2 ep2 sp
        """
    ),
}
"""World size -> rows; the policy `some` is qwen2 with adapters of SOME."""


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


def job(row, references):
    words, more = row.replace("unpacked", ""), {}
    if "unpacked" in row:
        more["rows"] = tuple((n,) for lengths in random_policies.ROWS for n in lengths)
    if kind_of(row) == "some":
        more["lora"] = {**lora_reference.SETTINGS, "targets": SOME}
    path, adapter, _ = references[kind_of(row)]
    return row, path, adapter, {**layout_of(words, "whole"), **more}


@pytest.fixture(scope="module")
def together(request, references):
    def jobs(size):
        return [job(row, references) for row in sorted(chosen(request, "row") & {*ROWS[size]})]

    return Worlds("lora_ranks:many", jobs)


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


def same_as_peft(found, expected, *, whole):
    """`found`: the answers of all ranks; `whole`: a rank has the log-probabilities of all rows."""
    first = found[0]
    trained = [name for rank in found for name in rank["trained"]]
    assert trained and all(".lora." in name for name in trained)
    assert first["factors"].keys() == expected["factors"].keys() == first["gradients"].keys()
    for name, factor in expected["factors"].items():
        assert torch.equal(first["factors"][name], factor.float()), name
    apart = {name: distance(first["gradients"][name], g) for name, g in expected["gradients"].items()}
    apart["loss"] = abs(first["loss"] / expected["loss"] - 1)
    norm = sum(float(g.norm()) ** 2 for g in expected["gradients"].values()) ** 0.5
    apart["gradient norm"] = max(abs(rank["grad_norm"] / norm - 1) for rank in found)
    for rank in found:
        if rank["logprobs"] is not None and rank["logprobs"].shape[1] == len(expected["logprobs"]):
            apart["log-probabilities"] = distance(rank["logprobs"][0], expected["logprobs"])
    print(f"largest relative distance {max(apart.values()):.1e}")
    assert {name: far for name, far in apart.items() if far > TOLERANCE} == {}
    assert ("log-probabilities" in apart) == whole
    everyone = [(key, digest) for rank in found for key, digest in rank["replicas"].items()]
    assert len(set(everyone)) == len(dict(everyone)), "ranks that share a factor hold different values"


@pytest.mark.parametrize(
    "row, world_size",
    [
        pytest.param(*p.values, size, marks=p.marks)
        for size, count in ((1, 2), (2, 4), (4, 1))
        for p in sampled(f"adapters of {size}", ROWS[size], count)
    ],
)
def test_a_step_of_adapters_is_that_of_peft(row, world_size, together, references):
    keys = layout_of(row.replace("unpacked", ""))
    sizes = [keys.get(f"{size}_parallel_size", 1) for size in ("tensor_model", "pipeline_model", "context")]
    found = [rank[row] for rank in together[world_size]]
    same_as_peft(found, references[kind_of(row)][2], whole=world_size == math.prod(sizes))
