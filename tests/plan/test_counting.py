"""Parameters: the published totals exactly, ranks that add up to the whole, and the same from Megatron's modules."""

from pathlib import Path

import pytest

from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import count, load_family, of_stage
from megatron_scalerl.plan.hardware import GPUS
from megatron_scalerl.plan.meta_build import compare_with_build
from megatron_scalerl.plan.planner import make_plan
from megatron_scalerl.plan.sharding import layout_of
from megatron_scalerl.recipe.file import load_recipe

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "configs"
DENSE, SCOUT = "scalerl_llama3_8b", "scalerl_llama4_scout_17bx16"


def recipe_of(name, *overrides):
    return load_recipe(ROOT / "recipes" / f"{name}.yaml", overrides)


def test_llama_3_1_8b_has_its_published_number():
    p = count(*load_family(CONFIGS / "Llama-3.1-8B"))
    assert (p.total, p.active, p.experts, p.passthrough) == (8_030_261_248, 8_030_261_248, 0, 0)
    assert p.embedding == p.head == 128_256 * 4_096


def test_scout_total_active_and_vision():
    p = count(*load_family(CONFIGS / "Llama-4-Scout-17B-16E"))
    assert p.total == 107_769_861_120
    assert p.active == 17_172_894_720
    assert p.experts == 48 * 16 * 3 * 5_120 * 8_192
    assert p.total + p.passthrough == 108_641_793_536  # the published checkpoint


def test_ranks_add_up_to_the_whole():
    family, _ = load_family(CONFIGS / "Llama-4-Scout-17B-16E")
    layout = layout_of(recipe_of(SCOUT), family, 96)
    assert (layout.dp, layout.dense_shards, layout.expert_shards) == (12, 12, 3)
    stages = [of_stage(family, layout, stage) for stage in range(2)]
    assert sum(s.expert for s in stages) * 16 == 96_636_764_160
    # tensor parallelism cuts all but norms and routers, which each of the four ranks holds whole
    whole = 48 * (2 * 5_120 + 16 * 5_120) + 5_120
    assert sum(s.dense for s in stages) * 4 - 3 * whole == 107_769_861_120 - 96_636_764_160


def test_a_head_of_another_size_is_padded_per_rank():
    family, _ = load_family(CONFIGS / "Llama-3.1-8B")
    layout = layout_of(recipe_of(DENSE), family, 16)
    assert of_stage(family, layout, 0).total == 4_015_263_744


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["megatron.parallel.tensor_model_parallel_size=16"], "expected a divisor of 8 key-value heads, found 16"),
        (
            ["megatron.parallel.pipeline_model_parallel_size=3", "trainer.world_size=18"],
            "expected a divisor of 32 layers .*num_layers_in_first_pipeline_stage.*, found 3",
        ),
        (["megatron.parallel.expert_model_parallel_size=2"], "expected 1 for a policy without experts, found 2"),
    ],
)
def test_layouts_that_do_not_divide(overrides, said):
    family, _ = load_family(CONFIGS / "Llama-3.1-8B")
    recipe = recipe_of(DENSE, *overrides)
    with pytest.raises(ValueError, match=said):
        layout_of(recipe, family, recipe.trainer.world_size)


def test_uneven_pipeline_stages():
    family, _ = load_family(CONFIGS / "Llama-3.1-8B")
    recipe = recipe_of(
        DENSE,
        "megatron.parallel.pipeline_model_parallel_size=2",
        "megatron.model.num_layers_in_last_pipeline_stage=14",
    )
    layout = layout_of(recipe, family, 16)
    assert [len(s) for s in layout.stages] == [18, 14]
    assert layout.layers_in_flight(0, 8) == 36 and layout.layers_in_flight(1, 8) == 14


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gpus"), [(DENSE, 80), (SCOUT, 256), ("scalerl_llama3_8b_32k", 80)])
def test_megatrons_own_modules_have_the_same_number(name, gpus):
    recipe = recipe_of(name)
    config = CONFIGS / Path(recipe.policy.path).name
    plan = make_plan(recipe, config, gpus, GPUS["h100-80g"], Assumptions())
    assert compare_with_build(plan, config).startswith("equal on the first rank")
