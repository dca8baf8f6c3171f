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
from chosen import Worlds, chosen
from layouts import gradients_whole, grid, kind_of, layout, same_step, same_weights
from runner import run_ranks
from sampling import sampled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TWO_RANKS = grid(
    """
    llama tp2, llama tp2 sp, llama tp2 sp sharded, llama pp2, llama dp2, llama dp2 sharded,
    llama dp2 overlapped, llama_tied tp2, llama_tied pp2, llama_biased tp2, llama_biased tp2 sp,
    mistral tp2 sp, olmo2 tp2, olmo2 tp2 sp, olmo2 pp2, qwen2 tp2 sp, qwen2 pp2, qwen3 tp2,
    qwen3 tp2 sp, qwen3 pp2, qwen3_moe ep2, qwen3_moe pp2, qwen3_moe tp2 sp, llama4 ep2,
    llama4 ep2 sharded, llama4 pp2, llama4 tp2 sp, llama cp2, llama cp2 sharded, llama cp2 recomputed,
    llama4 cp2, llama4 cp2 recomputed, qwen2 cp2, qwen3_moe cp2
    """
)
IN_BF16 = grid(
    """
    llama bf16 tp2 sp, llama_tied bf16 pp2, llama_biased bf16 pp2, mistral bf16 pp2, olmo2 bf16 tp2 sp,
    qwen2 bf16 tp2 sp, qwen3 bf16 tp2 sp, qwen3_moe bf16 ep2, llama4 bf16 cp2
    """
)
"""Layouts in bf16, with fp32 main weights in the distributed optimizer."""
FOUR_RANKS = grid(
    """
    llama tp2 pp2 sp, llama tp2 dp2, qwen3_moe tp2 ep2 sp, qwen3_moe pp2 ep2, llama4 tp2 ep2 sp,
    llama4 tp2 ep2 sp etp1, llama4 pp2 ep2, llama cp2 tp2 sp, llama4 cp2 tp2 sp, llama cp2 pp2,
    llama4 cp2 pp2, llama cp2 dp2, llama cp2 dp2 sharded, llama4 cp2 ep2, llama4 cp4
    """
)
SOME_KINDS = sampled("kinds of the parity", map(kind_of, IN_BF16), 2)
BY_WORLD = {2: TWO_RANKS, 4: FOUR_RANKS}
UNPACKED = tuple((length,) for row in random_policies.ROWS for length in row)


@pytest.fixture(scope="module")
def alone(request, policies):
    kinds = chosen(request, "kind")
    by_kind = kinds | {kind_of(name) for name in chosen(request, "name")}
    jobs = [(kind, policies[kind], layout("whole")) for kind in sorted(by_kind)]
    for kind in sorted(kinds):
        layouts = {"unpacked": {**layout("whole"), "rows": UNPACKED}, "bf16": layout("bf16")}
        for words in ("recomputed", "first-layer", *(["experts"] if kind in ("qwen3_moe", "llama4") else [])):
            layouts[words] = layout(f"whole {words}")
        jobs += [(f"{kind} {name}", policies[kind], layout) for name, layout in layouts.items()]
    return run_ranks(1, "parity_ranks:many", jobs)[0]


@pytest.fixture(scope="module")
def together(request, policies):
    def jobs(world_size):
        rows = [row for row in IN_BF16 if world_size == 2 and kind_of(row) in chosen(request, "kind")]
        rows += sorted(chosen(request, "name") & {*BY_WORLD[world_size]})
        return [(row, policies[kind_of(row)], gradients_whole(row)) for row in rows]

    return Worlds("parity_ranks:many", jobs)


@pytest.mark.parametrize(
    "name, world_size",
    [
        *(pytest.param(*p.values, 2, marks=p.marks) for p in sampled("parity of two ranks", TWO_RANKS, 3)),
        *(pytest.param(name, 4, marks=pytest.mark.full) for name in FOUR_RANKS),
    ],
)
def test_several_ranks_make_the_same_step_and_export_what_they_loaded(name, world_size, together, alone, policies):
    found = together[world_size][0][name]
    same_step(found, alone[kind_of(name)])
    same_weights(found, policies[kind_of(name)])


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_bf16_steps_agree_within_bf16(kind, together, alone):
    """Rounding of activations differs between layouts and from fp32; the weights given out are bf16 exactly."""
    [name] = [name for name in IN_BF16 if kind_of(name) == kind]
    two, one, exact = together[2][0][name], alone[f"{kind} bf16"], alone[kind]
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
    partly = [f"{kind} {part}" for part in ("recomputed", "first-layer", "experts") if f"{kind} {part}" in alone]
    assert len(partly) == (3 if kind in ("qwen3_moe", "llama4") else 2)
    for name in partly:
        same_step(alone[name], alone[kind])


@pytest.mark.parametrize("name", ["llama dp2 overlapped"])
def test_weights_are_read_after_the_background_gather(name, together, alone):
    """With overlap_param_gather the optimizer's new weights arrive late; an export must wait for them."""
    for weight, expected in alone["llama"]["stepped"].items():
        assert (together[2][0][name]["stepped"][weight] - expected).abs().max() < 1e-6, weight
