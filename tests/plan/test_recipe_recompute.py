"""Recipes recompute the least that fits, by the planner; what Megatron-Core means by its settings of recomputation.

The margin: 15 % of a GPU's memory stays free, as far as a measured peak may be from the planner's (test_plan_memory).
A policy with experts fits, besides, where the router sends every token to one rank of an expert-parallel group.
"""

import json
import re
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from megatron_scalerl.__main__ import main
from megatron_scalerl.plan.activations import MODULES, kept_bytes, layer_bytes, recompute_of, shape_of
from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import count, load_family
from megatron_scalerl.plan.engine import decoding, engine_memory
from megatron_scalerl.plan.hardware import GPUS, Kernels
from megatron_scalerl.plan.memory import trainer_memory
from megatron_scalerl.plan.sharding import layout_of
from megatron_scalerl.plan.work import Lengths, token_flops
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
CONFIGS = RECIPES / "configs"
LLAMA, SCOUT = RECIPES / "scalerl_llama3_8b.yaml", RECIPES / "scalerl_llama4_scout_17bx16.yaml"
H100 = GPUS["h100-80g"]
MARGIN = 0.15
FUSED = Kernels(layers="te", device="gpu")


def shipped():
    """Every recipe in the folder that is whole; overlays have no name."""
    return sorted(path for path in RECIPES.rglob("*.yaml") if "name" in yaml.safe_load(path.read_text()))


def with_recompute(recipe, settings):
    data = recipe.model_dump()
    model = {key: value for key, value in data["megatron"]["model"].items() if not key.startswith("recompute_")}
    data["megatron"]["model"] = model | settings
    return Recipe.model_validate(data)


def block(layers, method="block"):
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def settings_of(layers):
    yield {}
    for number in range(1, len(MODULES) + 1):
        for modules in combinations(MODULES, number):
            yield {"recompute_granularity": "selective", "recompute_modules": list(modules)}
    yield from map(block, range(1, layers))
    yield block(1, "uniform")


@cache
def family_of(path):
    """The family and its parameters, which no layout changes."""
    family = load_family(CONFIGS / Path(path).name)
    return family, count(family)


def flops(recipe):
    family, _ = family_of(recipe.policy.path)
    layout = layout_of(recipe, family, recipe.trainer.world_size)
    return token_flops(recipe, family, layout, [8192]).hardware(recipe)


def gpu_of(path):
    """The GPU of the command in the recipe's first comment."""
    named = re.search(r"^#.* plan .*--gpu (\S+)", path.read_text(), re.MULTILINE)
    return GPUS[named[1] if named else "h100-80g"]


def fits(recipe, gpu):
    """With the margin, and with any routing; a colocated engine takes its part of the GPU."""
    family, parameters = family_of(recipe.policy.path)
    layout = layout_of(recipe, family, recipe.trainer.world_size)

    def peak(imbalance):
        assumed = Assumptions(expert_imbalance=imbalance)
        engine = engine_memory(recipe, family, parameters, gpu, assumed).total
        beside = engine if recipe.engine.colocate else 0
        return beside + max(stage.total for stage in trainer_memory(recipe, family, layout, assumed, kernels=FUSED))

    if peak(Assumptions().expert_imbalance) > (1 - MARGIN) * gpu.memory_bytes:
        return False
    return layout.ep == 1 or peak(layout.ep) <= gpu.memory_bytes


def commands():
    """The commands of the planner in the recipes' first comments."""
    found = {path.stem: re.findall(r"^#   .* (plan .*)", path.read_text(), re.MULTILINE) for path in shipped()}
    assert all(found[name] or name.startswith("tiny") for name in found)
    return [command for commands in found.values() for command in commands]


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_every_recipe_fits_with_room_to_spare_by_the_command_that_it_names(command, monkeypatch, capsys):
    monkeypatch.chdir(RECIPES.parent)
    assert main([*command.split(), "--json", "-"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and plan["problems"] == []
    assert plan["split"]["of_recipe"], "the recipe's own split adds up to the stated GPUs"
    assert plan["trainer_headroom_bytes"] > 0.15 * plan["gpu"]["memory_bytes"]
    assert plan["engine_memory"]["full_sequences"] >= 8
    assert plan["meta_build"].startswith("equal on the first rank")


@pytest.mark.slow
@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_no_recipe_recomputes_what_fits_without(path):
    recipe = load_recipe(path, [])
    if recompute_of(recipe).granularity == "none":
        return
    family, _ = family_of(recipe.policy.path)
    stages = layout_of(recipe, family, recipe.trainer.world_size).stages
    cheaper = (with_recompute(recipe, settings) for settings in settings_of(max(map(len, stages))))
    gpu = gpu_of(path)
    limit = 0.999 * flops(recipe)
    found = [str(recompute_of(o)) for o in cheaper if flops(o) < limit and fits(o, gpu)]
    assert fits(recipe, gpu)
    assert not found, f"{path.name} recomputes {recompute_of(recipe)}; enough is any of {found}"


PP2 = ["megatron.parallel.pipeline_model_parallel_size=2"]
VPP2 = [*PP2, "megatron.parallel.virtual_pipeline_model_parallel_size=2"]


@pytest.mark.parametrize("parallel, recomputed", [([], 4), (PP2, 8), (VPP2, 16)])
def test_block_is_for_each_model_chunk_of_each_stage(parallel, recomputed):
    """Megatron-Core's TransformerBlock counts its own layers: one of each virtual stage of each pipeline stage."""
    base = load_recipe(LLAMA, parallel)
    none, some, all_ = (flops(with_recompute(base, s)) for s in ({}, block(4), block(1, "uniform")))
    assert (some - none) / (all_ - none) == pytest.approx(recomputed / 32)


def test_memory_counts_the_same_layers_as_the_work():
    """Two chunks of 8 layers in each stage: 4 of each are recomputed, not the first 4 of the stage."""
    base = load_recipe(LLAMA, VPP2)
    family, _ = family_of("Llama-3.1-8B")
    layout = layout_of(base, family, 16)
    assert layout.stages[0] == (*range(8), *range(16, 24)) and layout.places == (*range(8),) * 4

    def saved(settings):
        memory = trainer_memory(with_recompute(base, settings), family, layout, Assumptions(), kernels=FUSED)
        return next(term.bytes for term in memory[0].terms if term.name == "saved activations")

    none, half, all_ = saved({}), saved(block(4)), saved(block(8))
    assert none - half == pytest.approx((none - all_) / 2)


def test_uniform_groups_fill_a_model_chunk():
    """Megatron-Core would read past the last layer at the first step."""
    family, _ = family_of("Llama-3.1-8B")
    for parallel, layers, each in ((VPP2, 8, 16), (PP2, 16, 32), ([], 32, 3)):
        recipe = with_recompute(load_recipe(LLAMA, parallel), block(each, "uniform"))
        said = f"recompute_num_layers: {each} does not divide the {layers} layers of a "
        with pytest.raises(ValueError, match=said):
            layout_of(recipe, family, 16)
        layout_of(with_recompute(recipe, block(each, "block")), family, 16)


def test_norms_that_are_fused_are_not_recomputed():
    """With Transformer Engine only the norm before experts is a module of its own."""
    selective = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    for path, kernels, norms in (
        (LLAMA, FUSED, 0),
        (SCOUT, FUSED, 1),
        (LLAMA, Kernels(layers="plain", device="gpu"), 2),
    ):
        recipe = with_recompute(load_recipe(path, []), selective)
        family, _ = family_of(recipe.policy.path)
        layout = layout_of(recipe, family, recipe.trainer.world_size)
        shape = shape_of(family, family.layers[0])
        whole = layer_bytes(shape, layout, width=2, kernels=kernels, imbalance=1.0)
        left = kept_bytes(whole, recompute_of(recipe), moe=shape.experts > 0, width=2, hidden=shape.hidden)
        assert whole.total - left == norms * shape.hidden / layout.sp * 2


def test_shared_experts_that_are_recomputed_cost_their_flops():
    base = load_recipe(SCOUT, [])
    shared = {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]}
    assert flops(with_recompute(base, shared)) - flops(with_recompute(base, {})) == 48 * 6 * 5120 * 8192


def test_an_optimizer_instance_holds_the_whole_state():
    family, _ = family_of("Llama-4-Scout-17B-16E")
    one, three = (
        layout_of(load_recipe(SCOUT, [f"megatron.parallel.num_distributed_optimizer_instances={n}"]), family, 96)
        for n in (1, 3)
    )
    assert (one.dense_shards, one.expert_shards) == (12, 3) and (three.dense_shards, three.expert_shards) == (4, 1)


def test_copies_in_one_engine_share_the_experts_alone():
    """Tensor parallel 4 x data parallel 2 on eight devices: each copy has its own attention, embedding and head.

    Each device has norms and routers.
    """
    found = []
    for tensor, data in ((8, 1), (4, 2)):
        over = [f"engine.vllm.tensor_parallel_size={tensor}", f"engine.vllm.data_parallel_size={data}"]
        recipe = load_recipe(SCOUT, over)
        family, p = family_of("Llama-4-Scout-17B-16E")
        memory = engine_memory(recipe, family, p, H100, Assumptions())
        speed = decoding(recipe, p, memory, H100, Lengths((4096,)), Assumptions())
        whole = data * (tensor - 1) * (48 * (2 * 5120 + 16 * 5120) + 5120)  # norms and routers
        assert memory.weights_bytes == 2 * (data * (p.total - p.experts) + p.experts + whole) / 8
        found.append((memory.missing_bytes, speed.fixed_seconds, speed.running))
    assert found[1][1] > found[0][1]
