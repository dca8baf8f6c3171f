"""Adapters through optimizer steps and checkpoints: AdamW's steps on PEFT, start values, a resume elsewhere.

Why this matters: optimizer and checkpoint hold adapters alone, and data-parallel ranks a part of them each.
Not exercised: more than two ranks, NCCL.
"""

import lora_reference
import pytest
import random_policies
import torch
from layouts import grid, kind_of, layout, layout_of
from runner import run_ranks
from sampling import sampled

pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROWS = grid("qwen2 dp2, qwen2 tp2 sp, qwen2 pp2, qwen3_moe ep2, qwen3_moe etp2")
MERGED = ("qwen2 tp2 sp", "qwen3_moe etp2")
RESUMES = grid(
    """
    qwen2 tp2 sp to cp2, qwen2 dp2 to pp2, qwen3_moe etp2 to tp2 etp1 sp,
    qwen3_moe tp2 ep2 etp1 sp to ep2
    """
)


@pytest.fixture(scope="module")
def peft(tmp_path_factory):
    """Kind -> (folder of the policy, PEFT folder of its adapters, function that makes the reference anew)."""
    found = {}
    for kind in ("qwen2", "qwen3_moe"):
        path = tmp_path_factory.mktemp(kind)
        lora_reference.save_adapter(lora_reference.policy(kind, path / "policy"), path / "adapter")
        found[kind] = (
            str(path / "policy"),
            str(path / "adapter"),
            lambda kind=kind, path=path: lora_reference.policy(kind, path / "again"),
        )
    return found


def run(function, chosen, peft):
    jobs = [(row, *peft[kind_of(row)][:2], layout_of(row)) for row in chosen]
    return run_ranks(2, f"lora_ranks:{function}", jobs)


def test_three_steps_are_those_of_adamw_on_peft(peft):
    """Compared with how far the factors moved; ranks that share a factor hold the same bits."""
    ranks = run("steps", ROWS, peft)
    for kind in ("qwen2", "qwen3_moe"):
        adapted = peft[kind][2]()
        start = lora_reference.named(adapted)
        expected = lora_reference.stepped(adapted, random_policies.rows())
        for name in (row for row in ROWS if kind_of(row) == kind):
            found = ranks[0][name]["factors"]
            apart = {
                key: float((found[key] - end).norm() / (end - start[key]).norm()) for key, end in expected.items()
            }
            print(f"{name}: {max(apart.values()):.1e} of the way")
            assert max(apart.values()) < 1e-4, apart
            digests = [item for rank in ranks for item in rank[name]["replicas"].items()]
            assert len(set(digests)) == len(dict(digests))


def test_merged_weights_are_those_of_peft(peft):
    ranks = run("merged", MERGED, peft)
    for name in MERGED:
        expected = peft[kind_of(name)][2]().merge_and_unload().state_dict()
        for key, weight in ranks[0][name].items():
            assert (weight - expected[key]).abs().max() < 1e-6, key


def test_a_step_in_bf16_changes_factors_alone_and_counts_them(peft):
    """Frozen weights have no gradient buffers; half of the new factors are B, whose zeros all change."""
    ranks = run_ranks(2, "lora_ranks:changed", peft["qwen2"][0], layout("tp2 sp"))
    share = sum(rank[0] for rank in ranks) / sum(rank[1] for rank in ranks)
    for _, elements, metric, frozen, held in ranks:
        assert frozen and elements <= held < 1.1 * elements + 1000
        assert 0.2 < share < 1.0 and metric == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("name", sampled("resumes of adapters", RESUMES, 2))
def test_new_adapters_and_a_checkpoint_are_the_same_bits_under_another_layout(name, peft, tmp_path):
    row, _, other = name.partition(" to ")
    path = peft[kind_of(row)][0]
    first, again = (str(tmp_path / step) for step in ("step_000002", "again"))
    before = run_ranks(2, "lora_ranks:saved", path, layout_of(row), first)[0]
    after = run_ranks(2, "lora_ranks:resumed", path, layout(other), first, again)[0]
    assert before["stored"].keys() == after["stored"].keys()
    weights = {key for key in before["stored"] if not key.startswith("optimizer")}
    assert weights and all(".lora." in key for key in before["stored"])
    for key, stored in before["stored"].items():
        assert torch.equal(stored, after["stored"][key]), key
    for key, factor in before["before"].items():
        assert torch.equal(factor, after["before"][key]) and not torch.equal(factor, before["after"][key]), key
        torch.testing.assert_close(after["after"][key], before["after"][key], rtol=0, atol=1e-5)
    assert after["report"] == pytest.approx(before["report"], rel=1e-5)
    new_ones(before["start"], after["start"])


def new_ones(start, other):
    """The same on both layouts: B is 0, A is uniform within 1 / sqrt(inputs) as PEFT's, and each A is another one."""
    assert start.keys() == other.keys()
    firsts = []
    for key, factor in start.items():
        assert torch.equal(factor, other[key]), key
        if "lora_B" in key:
            assert not factor.any()
            continue
        bound = factor.shape[1] ** -0.5
        assert factor.abs().max() <= bound and factor.std() == pytest.approx(bound / 3**0.5, rel=0.2)
        firsts.append(float(factor[0, 0]))
    assert len(set(firsts)) == len(firsts) == len(start) / 2
