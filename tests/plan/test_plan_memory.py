"""Memory: hand-computed bytes, what each setting changes, and the peak of real runs."""

import json
import sys
from pathlib import Path

import pytest
from planned_recipes import CONFIGS, family_of, recipe_of
from predicted_trainer import predict_trainer
from programs import printed
from recipe_files import ROOT
from refusals import refused
from sampling import sampled

from megatron_scalerl.plan.activations import layer_bytes, recompute_of, shape_of
from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import count
from megatron_scalerl.plan.engine import engine_memory
from megatron_scalerl.plan.hardware import GIB, GPUS, PLAIN_ON_GPU, Kernels
from megatron_scalerl.plan.memory import logit_bytes, trainer_memory
from megatron_scalerl.plan.planner import make_plan
from megatron_scalerl.plan.sharding import layout_of
from megatron_scalerl.plan.update import GROUP_BYTES
from megatron_scalerl.plan.work import Lengths, step_work

H100 = GPUS["h100-80g"]

FUSED = Kernels(layers="te", device="gpu")


def plan_of(*overrides, name="scalerl_llama3_8b", kernels=FUSED):
    recipe = recipe_of(name, *overrides)
    family = family_of(Path(recipe.policy.path).name)
    layout = layout_of(recipe, family, recipe.trainer.world_size)
    return recipe, family, layout, trainer_memory(recipe, family, layout, Assumptions(), kernels=kernels)


def terms(memory):
    return {term.name: term.bytes for term in memory.terms}


def test_static_bytes_a_parameter():
    _, _, _, [rank] = plan_of()
    n = 4_015_263_744
    t = terms(rank)
    assert t["weights"] == 2 * n and t["gradients"] == 4 * n
    assert t["main weights (fp32)"] == 4 * n / 8 and t["Adam moments"] == 8 * n / 8  # 8 data-parallel ranks


def test_fp32_weights_are_their_own_main_weights():
    _, _, _, [rank] = plan_of("policy.dtype=float32", "megatron.ddp.use_distributed_optimizer=false")
    t, n = terms(rank), 4_015_263_744
    assert (t["weights"], t["main weights (fp32)"], t["Adam moments"]) == (4 * n, 0, 8 * n)


def test_a_frozen_policy_is_on_every_rank_as_the_policy_is():
    teacher = CONFIGS / "Qwen3-8B"
    _, _, layout, [rank] = plan_of(f"algorithm={{kl: {{to: {teacher}, coefficient: 1}}}}")
    *_, frozen = rank.terms
    assert layout.tp == 2 and frozen.bytes == pytest.approx(8_190_735_360, rel=1e-3)  # bf16, over two ranks


def test_experts_share_their_optimizer_over_fewer_ranks():
    _, _, _, stages = plan_of(name="scalerl_llama4_scout_17bx16")
    assert terms(stages[0])["Adam moments"] == pytest.approx(8 * (1_393_295_360 / 12 + 3_019_898_880 / 3))


def test_context_parallelism_halves_activations_and_shares_optimizer():
    _, _, _, [one] = plan_of(name="scalerl_llama3_8b_32k")
    _, _, _, [two] = plan_of("megatron.parallel.context_parallel_size=4", name="scalerl_llama3_8b_32k")
    assert terms(two)["saved activations"] == pytest.approx(terms(one)["saved activations"] / 2)
    assert terms(two)["Adam moments"] == terms(one)["Adam moments"]  # data x context parallel ranks stay 8


def test_saved_bytes_of_a_dense_layer_by_hand():
    _, family, layout, _ = plan_of()
    shape = shape_of(family, family.layers[0])
    one = layout_of(recipe_of("tiny_cpu"), family, 1)
    # plain, fp32: two norms (2 fp32 copies and a number), their outputs, projection input, angles, padded q k v and
    # output with its log-sum-exp, five widths of the MLP
    plain = layer_bytes(shape, one, width=4, kernels=Kernels(layers="plain", device="cpu"), imbalance=1.0)
    h, kv, f = 4096, 1024, 14336
    assert plain.total == 2 * (8 * h + 4) + 4 * (2 * h + h + 4 * 128 + 2 * h + 2 * kv + 5 * f) + 4 * 32
    fused = layer_bytes(shape, one, width=2, kernels=FUSED, imbalance=1.0)
    assert fused.total == 2 * (2 * h + 2 * h + h + h + 2 * kv + 3 * f) + 4 * 32 + 2 * 4
    halved = layer_bytes(shape, layout, width=2, kernels=FUSED, imbalance=1.0)
    assert halved.total == fused.total / 2  # TP 2 with sequence parallelism


@pytest.mark.parametrize(
    "tokens, workspace, numbers", [(100, 512, 100 * 128_256), (100, 40, 2**23), (400, 512, 2**23)]
)
def test_a_loss_of_whole_sequences_keeps_all_logits_that_fit(tokens, workspace, numbers):
    """On a CPU, if the workspace holds them and they are at most 2^25 numbers; else blocks of at most 2^23."""
    settings = ["loss.name=gspo", "policy.dtype=float32", f"trainer.logit_workspace_mb={workspace}"]
    recipe, family, _, _ = plan_of(*settings)
    one = layout_of(recipe_of("tiny_cpu"), family, 1)
    _, found = logit_bytes(recipe, family, one, tokens, kernels=Kernels(layers="plain", device="cpu"))
    assert found == 4 * tokens * 4096 + min(workspace * 2**20, 4 * numbers + 8 * 2**18)


def test_plain_layers_on_a_gpu_keep_what_layers_and_device_say():
    """Padded copies, angles and five widths as on a CPU; norms, runtime and logits as on a GPU."""
    _, family, _, _ = plan_of()
    shape = shape_of(family, family.layers[0])
    recipe = recipe_of("scalerl_llama3_8b", "megatron.parallel={}", "megatron.model={}", "trainer.world_size=1")
    one = layout_of(recipe, family, 1)
    h, kv, f, tokens = 4096, 1024, 14336, 16_512
    layer = layer_bytes(shape, one, width=2, kernels=PLAIN_ON_GPU, imbalance=1.0).total
    assert layer == 2 * (2 * h + 2 * h + h + 4 * 128 + 2 * h + 2 * kv + 5 * f) + 2 * 4 + 4 * 32
    [gpu], [fused] = (
        trainer_memory(recipe, family, one, Assumptions(), kernels=kernels) for kernels in (PLAIN_ON_GPU, FUSED)
    )
    plain = terms(gpu)
    assert plain["saved activations"] == tokens * (32 * layer + (h * 2 + 4) + h * 2 + 8 + 8)
    assert plain["logit input gradients"] == terms(fused)["logit input gradients"]
    loss = plain["CUDA, NCCL, fragmentation"] - 3 * GIB
    assert loss == pytest.approx(0.08 * moving(gpu)) and "runtime" not in plain
    assert plain["gradient clipping copy"] == 0


def moving(rank):
    return sum(term.bytes for term in rank.terms if term.moving)


def test_clipping_may_be_the_peak_of_a_gpu_and_the_optimizer_is_not():
    """Fused AdamW steps in place; clipping copies the largest gradient, the embedding's, without activations."""
    whole = [
        "megatron.parallel={}",
        "trainer.world_size=1",
        "trainer.micro_batch_tokens=512",
        "trainer.loss_in_chunk=false",
        "trainer.logit_workspace_mb=512",
        "megatron.model={recompute_granularity: full}",
    ]
    _, _, _, [rank] = plan_of(*whole, kernels=PLAIN_ON_GPU)
    _, _, _, [fused] = plan_of(*whole)
    assert terms(rank)["gradient clipping copy"] + moving(rank) == 4 * 128_256 * 4096
    assert 0 < moving(rank) < 4 * 128_256 * 4096
    assert "gradient clipping copy" not in terms(fused)


@pytest.mark.parametrize(
    "name, overrides, said",
    [
        ("scalerl_llama3_8b", ["policy.dtype=float32"], "policy.dtype: .*float32 .*set bfloat16"),
        ("scalerl_llama3_8b_32k", [], "context_parallel_size: .* 2 with plain layers on a GPU"),
    ],
)
def test_attention_that_saves_its_scores_is_rejected(name, overrides, said):
    with refused(said):
        plan_of(*overrides, name=name, kernels=PLAIN_ON_GPU)


def test_transformer_engine_needs_a_gpu():
    with refused(r"layers: .* plain instead of te"):
        Kernels(layers="te", device="cpu")


def test_a_prediction_is_the_plans():
    """The fullest rank, and the model FLOPs that the plan's step has."""
    recipe, family, layout, [rank] = plan_of()
    folder = CONFIGS / "Llama-3.1-8B"
    found = predict_trainer(recipe, folder, layers="te", device="gpu", sequence_tokens=4096)
    assert found.terms == rank.terms and found.total_bytes == rank.total
    assert found.parameters == rank.parameters.total == 4_015_263_744
    weights = 8_030_261_248 - 128_256 * 4096 - 65 * 4096  # without embedding and norms
    assert found.model_flops_per_token == 6 * weights + 3 * 32 * 2 * 4096 * 4096
    assumed = Assumptions(prompt_tokens=0)
    work = step_work(recipe, family, count(family), layout, H100, Lengths((4096,)), assumed)
    assert work.model_flops == work.trained_tokens * found.model_flops_per_token
    assert work.hardware_flops == pytest.approx(work.trained_tokens * found.hardware_flops_per_token)
    assert found.hardware_flops_per_token > found.model_flops_per_token  # layers are computed again
    assert found.moving_bytes == moving(rank)
    staged = ["megatron.parallel.pipeline_model_parallel_size=2"]
    recipe, _, _, stages = plan_of(*staged)
    found = predict_trainer(recipe, folder, layers="te", device="gpu", sequence_tokens=4096)
    assert found.total_bytes == max(stage.total for stage in stages) != min(stage.total for stage in stages)


def test_recompute_keeps_less():
    settings = ("", "recompute_granularity: selective, recompute_modules: [mlp]", "recompute_granularity: full")
    models = [f"megatron.model={{{', '.join(filter(None, ['sequence_parallel: true', s]))}}}" for s in settings]
    sizes = [terms(plan_of(model)[3][0])["saved activations"] for model in models]
    tokens, layers = 16_512, 32
    assert sizes[0] - sizes[1] == tokens * layers * 3 * 14_336 / 2 * 2  # the MLP's inside, TP 2, bf16
    assert sizes[2] == tokens * (layers * 2048 * 2 + 2 * 2048 * 2 + 4096 * 2 + 10 + 8)
    with refused(r"recompute_modules: .*'mla_up_proj'.* core_attn"):
        modules = "megatron.model.recompute_modules=[mla_up_proj]"
        recompute_of(recipe_of("tiny_cpu", "megatron.model.recompute_granularity=selective", modules))


def test_an_engine_has_narrow_projections_and_routers_on_each_device():
    recipe = recipe_of("kimi_k2_1024gpus")
    family = family_of("Kimi-K2-Instruct")
    p = count(family)
    e = engine_memory(recipe, family, p, GPUS["b300"], Assumptions())
    narrow = 61 * (7168 * (1536 + 576) + 1536 + 512)
    norms = (2 * 61 + 1) * 7168
    assert e.weights_bytes == 2 * (p.total + 7 * (narrow + norms + 60 * 384 * 7168)) / 8


def test_engine_counts_key_value_heads():
    recipe, family, _, _ = plan_of()
    e = engine_memory(recipe, family, count(family), H100, Assumptions())
    assert e.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131_072
    assert e.kv_bytes == H100.memory_bytes * 0.92 - 2 * 8_030_261_248 - 4 * GIB
    assert e.full_sequences == pytest.approx(e.kv_tokens / 16_466) and e.missing_bytes == 0


def test_the_weight_groups_are_counted_on_both_sides():
    """Scout: each of an engine's 8 workers is in the groups of 32 senders, each sender in those of 8 shards."""

    def planned(*overrides):
        recipe = recipe_of("scalerl_llama4_scout_17bx16", *overrides)
        return make_plan(recipe, CONFIGS / Path(recipe.policy.path).name, 256, H100, Assumptions())

    plan, alone = planned(), planned("weights.transport=shm")
    assert [terms(stage)["weight groups (NCCL)"] for stage in plan.trainer] == [8 * GROUP_BYTES] * 2
    assert plan.engine.group_bytes == 32 * GROUP_BYTES and GROUP_BYTES == 160_000_000
    assert plan.engine.total == plan.engine.limit_bytes + plan.engine.group_bytes and not plan.problems()
    assert alone.engine.group_bytes == 0 and alone.headroom == plan.headroom + 8 * GROUP_BYTES
    [problem] = planned("weights.max_senders=96", "engine.vllm.gpu_memory_utilization=0.96").problems()
    assert "vLLM's share and the weight groups' 14.3 GiB are 11.1 GiB more than a device has" in problem


def test_engine_options_that_disagree():
    recipe, family, _, _ = plan_of("engine.vllm.tensor_parallel_size=2")
    with refused(r"parallel sizes is 2, and engine.devices_per_engine is 1"):
        engine_memory(recipe, family, count(family), H100, Assumptions())


CASES = ("dense-fp32", "dense-fp32-recompute", "dense-bf16", "dense-bf16-selective", "moe-fp32", "moe-bf16")


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled("peak", CASES, 1))
def test_the_peak_of_real_runs(case):
    output = printed(sys.executable, ROOT / "tools/bench_plan.py", "memory", "--only", case, timeout=550)
    result = json.loads(output.strip().splitlines()[-1])
    assert 0.85 <= result["ratio"] <= 1.15, result
    assert result["predicted_mib"] == pytest.approx(sum(result["terms_mib"].values()), abs=1)
