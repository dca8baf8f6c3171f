"""The plan of a recipe with adapters: memory, bytes of updates and FLOPs, counted by hand."""

from dataclasses import asdict

import pytest
from planned_recipes import CONFIGS, recipe_of

from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.hardware import GPUS
from megatron_scalerl.plan.planner import make_plan
from megatron_scalerl.plan.settings import check_settings

HIDDEN, INNER, QUERY, KEY, LAYERS = 1536, 8960, 1536, 256, 28
"""Of Qwen2.5-Math-1.5B."""
PER_RANK = LAYERS * (4 * HIDDEN + 2 * QUERY + 2 * KEY + 3 * (HIDDEN + INNER))
"""Numbers of all projections' A and B for each rank of the adapters."""


def plan(*more):
    recipe = recipe_of("qwen2_5_math_1_5b_lora_24gb", *more)
    return make_plan(recipe, CONFIGS / "Qwen2.5-Math-1.5B", 1, GPUS["rtx4090-24g"], Assumptions(), layers="plain")


def terms(planned):
    [stage] = planned.trainer
    return {term.name: term.bytes for term in stage.terms}


def test_frozen_weights_have_neither_gradients_nor_moments():
    adapters = 32 * PER_RANK
    # whose largest workspace is a layer's, with and without adapters
    full = "megatron.model={recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
    found, whole = plan(full), plan(full, "policy.lora=null")
    weights = found.parameters.total
    memory = terms(found)
    assert memory["weights"] == 2 * (weights + adapters)
    assert memory["gradients"] == 4 * adapters
    assert memory["main weights (fp32)"] == 4 * adapters and memory["Adam moments"] == 8 * adapters
    assert terms(whole)["gradients"] == 4 * weights and terms(whole)["Adam moments"] == 8 * weights
    # a layer's outputs and three more copies of them: of gate and up those of the widest layer
    tokens = recipe_of("qwen2_5_math_1_5b_lora_24gb").micro_batch_tokens
    more = memory["layer workspace"] - terms(whole)["layer workspace"]
    assert more == 3 * 2 * INNER * tokens * 2
    # without a gradient of the head
    head = 4 * found.parameters.head
    assert terms(whole)["logit input gradients"] - memory["logit input gradients"] == head
    assert found.problems() == [] and whole.problems() != []


def test_an_update_has_the_adapters_or_all_weights():
    alone, narrow, merged = plan(), plan("policy.lora.rank=1"), plan("weights.adapters=merged")
    assert alone.update.bytes == 2 * 32 * PER_RANK and narrow.update.bytes == 2 * PER_RANK
    assert merged.update.bytes == 2 * merged.parameters.total == plan("policy.lora=null").update.bytes
    assert asdict(alone.engine)["weights_bytes"] - asdict(merged.engine)["weights_bytes"] == 2 * 32 * PER_RANK


def test_an_update_to_engines_of_several_workers_sends_each_its_part():
    more = ("engine.colocate=false", "engine.devices_per_engine=2", "engine.vllm.tensor_parallel_size=2")
    recipe = recipe_of("qwen2_5_math_1_5b_lora_24gb", *more)
    found = make_plan(recipe, CONFIGS / "Qwen2.5-Math-1.5B", 3, GPUS["h100-80g"], Assumptions())
    # one of A and B of each projection is whole on every worker
    whole = 32 * LAYERS * (5 * HIDDEN + HIDDEN + HIDDEN)
    split = 32 * PER_RANK - whole
    assert found.update.most_received == pytest.approx(2 * (whole + split / 2), rel=1e-4)


def test_a_step_computes_no_gradients_of_frozen_weights():
    lora, whole = plan().work, plan("policy.lora=null").work
    assert 0.66 < lora.model_flops / whole.model_flops < 0.75
    assert plan("policy.lora.rank=1").work.model_flops < lora.model_flops


def test_experts_are_updated_merged():
    recipe = recipe_of("qwen3_30b_a3b_16gpus", "policy.lora={}")
    folder = CONFIGS / "Qwen3-30B-A3B"
    with pytest.raises(ValueError, match=r"weights\.adapters: .* merged"):
        check_settings(recipe, folder, planned=True)
    merged = recipe_of("qwen3_30b_a3b_16gpus", "policy.lora={}", "weights.adapters=merged")
    check_settings(merged, folder, planned=True)


def test_a_plan_with_transformer_engine_below_hopper_is_refused_with_the_way_out():
    recipe = recipe_of("qwen2_5_math_1_5b_lora_24gb")
    found = make_plan(recipe, CONFIGS / "Qwen2.5-Math-1.5B", 1, GPUS["rtx4090-24g"], Assumptions())
    assert "MSRL_LAYERS=plain" in found.problems()[-1] and plan().problems() == []
