"""Parameters: the published totals exactly, ranks that add up to the whole, and the same from Megatron's modules."""

from math import prod

import pytest
from planned_recipes import CONFIGS, family_of, recipe_of

from megatron_scalerl.models import read_hf_config
from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import count, of_stage
from megatron_scalerl.plan.hardware import GPUS
from megatron_scalerl.plan.planner import make_plan
from megatron_scalerl.plan.sharding import layout_of

DENSE, SCOUT = "scalerl_llama3_8b", "scalerl_llama4_scout_17bx16"


def test_scout_total_and_active():
    p = count(family_of("Llama-4-Scout-17B-16E"))
    assert p.total == 107_769_861_120
    assert p.active == 17_172_894_720
    assert p.experts == 48 * 16 * 3 * 5_120 * 8_192


@pytest.mark.parametrize(
    "name, total, active, with_mtp",
    [
        ("DeepSeek-V3", 671_026_404_352, 37_552_282_624, 684_489_830_400),
        ("Kimi-K2-Instruct", 1_026_408_209_408, 32_861_477_888, 1_026_408_209_408),
        ("Moonlight-16B-A3B-Instruct", 15_960_108_544, 2_914_774_528, 15_960_108_544),
    ],
)
def test_latent_attention_is_counted_as_transformers_builds_it(name, total, active, with_mtp):
    """Every parameter of transformers' own module on the meta device, names and shapes, experts together."""
    from torch import device
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    family = family_of(name)
    p = count(family)
    assert (p.total, p.active, p.total + p.passthrough) == (total, active, with_mtp)
    with device("meta"):
        model = DeepseekV3ForCausalLM(DeepseekV3Config.from_dict(read_hf_config(CONFIGS / name).to_dict()))
    theirs = {tensor: tuple(parameter.shape) for tensor, parameter in model.named_parameters()}
    assert sum(prod(shape) for shape in theirs.values()) == total
    shapes = {n: shape for rule in family.rules if not rule.frozen for n, shape in rule.hf_shapes.items()}
    ours = {tensor: shape for tensor, shape in shapes.items() if ".mlp.experts." not in tensor}
    assert ours == {tensor: shape for tensor, shape in theirs.items() if ".mlp.experts." not in tensor}
    assert p.experts == sum(prod(shape) for tensor, shape in theirs.items() if ".mlp.experts." in tensor)


OF_1T = (
    "trainer.world_size=512",
    "megatron.parallel={tensor_model_parallel_size: 8, pipeline_model_parallel_size: 8, "
    "expert_model_parallel_size: 64, expert_tensor_parallel_size: 1}",
    "megatron.model.num_layers_in_last_pipeline_stage=5",
    "engine.count=16",
    "engine.devices_per_engine=32",
    "engine.vllm={tensor_parallel_size: 32, enable_expert_parallel: true}",
    "weights.max_senders=512",
)


@pytest.mark.slow
def test_a_policy_of_1_t_is_planned_on_1024_gpus():
    """The cache of a token and the bytes of an update, by hand; its ranks: test_recipe_recompute.py."""
    recipe = recipe_of(SCOUT, *OF_1T)
    plan = make_plan(recipe, CONFIGS / "Kimi-K2-Instruct", 1024, GPUS["h100-80g"], Assumptions())
    # 512 latent numbers and 64 rotated ones a layer, in bf16, on each of 32 devices
    assert plan.engine.kv_bytes_per_token == 61 * 576 * 2 * 32
    assert any("an engine runs on one node, which has 8 GPUs, and cannot have 32" in p for p in plan.problems())
    update = plan.update
    biases = 4 * 60 * 384  # of routers, in fp32
    assert update.bytes == 2 * 1_026_408_209_408 + biases and update.senders == 512
    assert update.bytes / 512 <= update.most_sent <= 1.3 * update.bytes / 512
    assert update.bytes / 32 <= update.most_received <= 1.05 * update.bytes / 32
    assert plan.publish_seconds == pytest.approx(2 * update.bound_seconds(50e9))


def test_ranks_add_up_to_the_whole():
    family = family_of("Llama-4-Scout-17B-16E")
    layout = layout_of(recipe_of(SCOUT), family, 96)
    assert layout.dp == 12
    stages = [of_stage(family, layout, stage) for stage in range(2)]
    assert sum(s.expert for s in stages) * 16 == 96_636_764_160
    # tensor parallelism cuts all but norms and routers, which each of the four ranks holds whole
    whole = 48 * (2 * 5_120 + 16 * 5_120) + 5_120
    assert sum(s.dense for s in stages) * 4 - 3 * whole == 107_769_861_120 - 96_636_764_160


def test_uneven_pipeline_stages():
    family = family_of("Llama-3.1-8B")
    recipe = recipe_of(
        DENSE,
        "megatron.parallel.pipeline_model_parallel_size=2",
        "megatron.model.num_layers_in_last_pipeline_stage=14",
    )
    layout = layout_of(recipe, family, 16)
    assert [len(s) for s in layout.stages] == [18, 14]
    assert layout.layers_in_flight(0, 8) == 36 and layout.layers_in_flight(1, 8) == 14
