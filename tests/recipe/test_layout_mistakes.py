"""A layout that Megatron-Core would refuse with an assertion on every rank is one line before any process starts."""

import json
import re

import pytest

from megatron_scalerl.__main__ import main
from megatron_scalerl.models import family, read_hf_config
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.parallel_layout import check_sharding, sizes_of, stages_of
from megatron_scalerl.trainer.options import check_megatron

SHARED = {
    "vocab_size": 65,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
POLICIES = {
    "dense": SHARED | {"model_type": "llama", "intermediate_size": 96},
    "experts": SHARED
    | {
        "model_type": "qwen3_moe",
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
}
P, M = "megatron.parallel.", "megatron.model."
TP, PP, CP, EP = (f"{P}{k}_parallel_size" for k in ("tensor_model", "pipeline_model", "context", "expert_model"))
CHUNKS, ETP = f"{P}virtual_pipeline_model_parallel_size", f"{P}expert_tensor_parallel_size"
FIRST, LAST = (f"{M}num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
LAYOUT, WORLD = f"{M}pipeline_model_parallel_layout", "trainer.world_size"
SP = f"{M}sequence_parallel"

OF_EXPERTS = {"expert MLPs", "sequence, experts", "experts", "expert world"}
"""Mistakes with a policy of experts."""
TWO_STAGES = (f"{PP}=2", f"{WORLD}=2")
MISTAKES = {
    "layers": ([f"{PP}=4", f"{WORLD}=4"], f"{PP}: 6 of 6 layers are left for 4 of 4 stages"),
    "first stage": (
        [f"{PP}=3", f"{WORLD}=3", f"{FIRST}=1"],
        f"{PP}: 5 of 6 layers are left for 2 of 3 stages",
    ),
    "last stage": ([*TWO_STAGES, f"{LAST}=6"], f"{PP}: 0 of 6 layers are left"),
    "both ends": (
        [*TWO_STAGES, f"{FIRST}=1", f"{LAST}=1"],
        "4 of 6 layers are left for 0 of 2",
    ),
    "no number": (
        [*TWO_STAGES, f"{FIRST}=some"],
        f"{FIRST} is 'some'; it has to be a whole number",
    ),
    "a layout": (
        [*TWO_STAGES, f"{LAYOUT}=Et|t*5,L"],
        f"{LAYOUT} is not supported: num_layers_in_",
    ),
    "chunks": (
        [*TWO_STAGES, f"{CHUNKS}=2"],
        f"{CHUNKS}: 2 does not divide the 3 layers of a stage",
    ),
    "chunks alone": ([f"{CHUNKS}=2"], f"{CHUNKS} is 2, but there is only one pipeline stage"),
    "heads": ([f"{TP}=3", f"{WORLD}=3"], f"{TP}: 4 attention heads cannot be divided by 3"),
    "kv heads": ([f"{TP}=4", f"{WORLD}=4"], f"{TP}: 2 key-value heads cannot be divided by 4"),
    "experts": ([f"{EP}=4", f"{WORLD}=4"], f"{EP}: 6 experts cannot be divided by 4"),
    "no experts": ([f"{EP}=2", f"{WORLD}=2"], f"{EP} is 2, but the policy has no experts"),
    "expert MLPs": ([f"{ETP}=5", f"{WORLD}=5"], f"{ETP}: 48 expert MLP columns cannot be divided by 5"),
    "world": ([f"{TP}=2", f"{CP}=2", f"{WORLD}=6"], f"{WORLD}: 6 is not a multiple of 4, the tensor"),
    "expert world": ([f"{EP}=3", f"{WORLD}=4"], f"{WORLD}: 4 is not a multiple of 3, the expert"),
    "instances": (
        [f"{P}num_distributed_optimizer_instances=2", f"{WORLD}=3"],
        f"{WORLD}: 3 is not a multiple of 2, .* with 2 optimizer instances",
    ),
    "sequence": ([f"{SP}=true"], f"{SP} is true, but needs"),
    "sequence, experts": ([f"{TP}=2", f"{WORLD}=2"], f"{SP} is false, but a policy with experts needs"),
    "zero": ([f"{TP}=0"], f"{TP} is 0; it has to be a whole number"),
    "null": ([f"{PP}=null"], f"{PP} is None; it has to be a whole number"),
    "text": ([f"{CP}=two"], f"{CP} is 'two'; it has to be a whole number"),
    "unknown size": (
        [f"{P}tensor_parallel=2"],
        f"megatron.parallel: tensor_parallel is not .*; it is set by {TP} or ",
    ),
    "unknown field": (
        [f"{M}layernorm_epsilom=1"],
        "layernorm_epsilom is not .*; the nearest is layernorm_epsilon",
    ),
    "unknown in ddp": (
        ["megatron.ddp.overlap_grad_reduced=true"],
        "megatron.ddp: overlap_grad_reduced is not .*; the nearest is overlap_grad_reduce$",
    ),
    "unknown in optimizer": (
        ["megatron.optimizer.use_precise=true"],
        "megatron.optimizer: use_precise is not a field of OptimizerConfig$",
    ),
    "num_layers": ([f"{M}num_layers=5"], f"{M}num_layers: 5 would train another model"),
    "Megatron's own": (
        [f"{M}recompute_granularity=full"],
        "megatron.model: Megatron-Core refuses it: .*recompute_method",
    ),
    "an assertion": (
        [f"{CP}=2", f"{WORLD}=2", f"{M}cp_comm_type=[p2p]"],
        "megatron.model: Megatron-Core refuses it: .*cp_comm_type",
    ),
}


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    root = tmp_path_factory.mktemp("layouts")
    for name, config in POLICIES.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    (root / "prompts.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    prompts = {"path": str(root / "prompts.jsonl")}
    recipe = {"name": "r", "output_dir": str(root / "runs"), "steps": 1, "prompts": prompts}
    (root / "recipe.yaml").write_text(json.dumps(recipe))
    return root


@pytest.mark.parametrize("name", MISTAKES)
def test_a_layout_that_cannot_be_is_one_line_and_exit_code_2(name, policies, capsys):
    overrides, said = MISTAKES[name]
    policy = "experts" if name in OF_EXPERTS else "dense"
    code = main(["train", str(policies / "recipe.yaml"), f"policy.path={policies / policy}", *overrides])
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and re.search(said, error), error
    assert not (policies / "runs").exists()


OF_THE_PLANNER = [n for n in MISTAKES if n.startswith(("layers", "first", "a layout", "heads", "seq"))]


@pytest.mark.parametrize("name", OF_THE_PLANNER)
def test_the_planner_says_the_same(name, policies, capsys):
    overrides, said = MISTAKES[name]
    policy = "experts" if name in OF_EXPERTS else "dense"
    argv = [str(policies / "recipe.yaml"), "--gpus", "13", "--no-build", "engine.count=1"]
    assert main(["plan", *argv, f"policy.path={policies / policy}", *overrides]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(said, error), error


def recipe(policies, policy, world, parallel, **model):
    return Recipe.model_validate(
        {
            "name": "r",
            "steps": 1,
            "policy": {"path": str(policies / policy)},
            "prompts": {"path": "p"},
            "trainer": {"world_size": world},
            "megatron": {"parallel": parallel, "model": model},
        }
    )


PP2 = {"pipeline_model_parallel_size": 2}
SPLITS = {
    "even": (PP2, {}, [[0, 1, 2], [3, 4, 5]]),
    "first": (PP2, {"num_layers_in_first_pipeline_stage": 2}, [[0, 1], [2, 3, 4, 5]]),
    "both": (
        {"pipeline_model_parallel_size": 3},
        {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2},
        [[0], [1, 2, 3], [4, 5]],
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_megatrons_own_uneven_splits_pass(name, policies):
    """The layers of each stage are those that Megatron itself builds there."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    from megatron_scalerl.trainer.options import _first_rank, model_options

    parallel, model, expected = SPLITS[name]
    r = recipe(policies, "dense", len(expected), parallel, **model)
    policy = family(read_hf_config(policies / "dense"))
    check_sharding(policy, r.megatron.parallel, r.megatron.model)
    check_megatron(policy, r)
    assert [list(s) for s in stages_of(r.megatron.model, 6, sizes_of(r.megatron.parallel))] == expected
    config = model_options(policy, r, _first_rank(r)).config
    built = [get_num_layers_to_build(config, pp_rank=stage) for stage in range(len(expected))]
    assert built == list(map(len, expected))


def test_a_virtual_pipeline_counts_its_chunks():
    sizes = sizes_of({**PP2, "virtual_pipeline_model_parallel_size": 2})
    assert stages_of({}, 8, sizes) == ((0, 1, 4, 5), (2, 3, 6, 7))
