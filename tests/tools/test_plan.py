"""`megatron-scalerl plan`: its recipes fit, its numbers are the printed ones, bad input is one line and exit 2."""

import json

import pytest
from command_line import command, refusal
from programs import ROOT

main = command("plan")


def recipe(name):
    return str(ROOT / f"recipes/{name}.yaml")


@pytest.mark.slow
def test_phases_cost_more_than_the_pipeline_and_are_as_old_as_they_may_be(capsys):
    found = []
    for schedule in ("pipeline", "ppo_off_policy"):
        override = f"rollouts.schedule={schedule}"
        args = [recipe("scalerl_llama3_8b"), "--gpus", "80", "--no-build", override]
        assert main([*args, "--json", "-"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    pipeline, phases = found
    costs = [plan["gpu_hours_per_1000_steps"] for plan in (pipeline, phases)]
    assert costs[1] > costs[0]
    assert (phases["timing"]["staleness_mean"], phases["timing"]["staleness_max"]) == (3.5, 7)


@pytest.mark.slow
def test_another_number_of_gpus_is_split_here(capsys):
    assert main([recipe("scalerl_llama3_8b"), "--gpus", "48", "--no-build", "--json", "-"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not plan["split"]["of_recipe"] and plan["split"]["trainer"] + plan["split"]["engines"] == 48
    steps = [s["timing"]["step_seconds"] for s in plan["best_splits"]]
    assert steps[0] <= min(steps) * 1.02


@pytest.mark.parametrize(
    "name, gpus, model, advised",
    [
        ("scalerl_llama3_8b", "80", "{}", "[mlp]"),
        ("scalerl_llama3_8b", "80", "{recompute_granularity: selective}", "[core_attn, mlp]"),
        ("scalerl_llama4_scout_17bx16", "256", "{sequence_parallel: true}", "[moe]"),
    ],
)
def test_what_to_set_where_a_rank_does_not_fit(capsys, name, gpus, model, advised):
    over = [f"megatron.model={model}", "trainer.micro_batch_tokens=2000000"]
    argv = [recipe(name), "--gpus", gpus, "--no-build", *over]
    assert main([*argv, "--check"]) == 2
    text = "tensor_model_parallel_size, or megatron.model.recompute_granularity: selective with recompute_modules: "
    assert capsys.readouterr().err.endswith(f"{text}{advised}\n")
    main([*argv, "--json", "-"])
    advice = [line for line in json.loads(capsys.readouterr().out)["problems"] if "; try " in line]
    assert len(advice) == 1, "for all stages of the pipeline"


@pytest.mark.slow
def test_check_sees_an_engine_without_room(capsys):
    argv = [recipe("scalerl_llama3_8b"), "--gpus", "80", "--no-build", "--check"]
    assert main([*argv, "engine.vllm.gpu_memory_utilization=0.25"]) == 2
    assert "the KV cache of an engine cannot hold one sequence of 16,466 tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_trainer_and_engine_on_one_gpu_share_its_memory_and_its_time(capsys):
    def planned(name, gpus, *overrides, code=0):
        assert main([recipe(name), "--gpus", gpus, "--no-build", "--json", "-", "--check", *overrides]) == code
        return json.loads(capsys.readouterr().out)

    both = planned("qwen2_5_math_1_5b_1gpu", "1")
    assert both["split"]["trainer"] == both["split"]["engines"] == both["gpus"] == 1
    # alone on its GPU the trainer would take a larger workspace, and have the weight groups of NCCL
    alike = ("trainer.logit_workspace_mb=512", "weights.transport=gloo")
    apart = planned("qwen2_5_math_1_5b_1gpu", "2", "engine.colocate=false", *alike)
    memory = both["engine_memory"]
    engine = max(memory["limit_bytes"], sum(memory[f"{part}_bytes"] for part in ("weights", "overhead", "kv")))
    assert apart["trainer_headroom_bytes"] - both["trainer_headroom_bytes"] == engine
    train, other = both["work"]["train_seconds"], both["timing"]["step_seconds"] - both["work"]["train_seconds"]
    generate = both["completion_tokens"]["mean"] * both["work"]["completions"] / both["decoding"]["tokens_per_second"]
    assert apart["timing"]["step_seconds"] < 1.15 * max(train, generate), "side by side"
    assert other == pytest.approx(generate, rel=0.15), "in turn"
    larger = planned("qwen2_5_math_1_5b_1gpu", "1", "trainer.micro_batch_tokens=16384", code=2)
    assert "GiB and an engine 19.9, NVIDIA H100 SXM 80 GB has 79.6: " in larger["problems"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv, said",
    [
        ("--gpus 1", "--gpus: 1 GPUs cannot be split"),
        ("--gpus 80 megatron.optimizer.optimizer_cpu_offload=true", "does not support this option"),
        ("--gpus 80 megatron.parallel.tensor_model_parallel_size=3", "is not a multiple of"),
        ("--gpus 80 --json /nowhere/x.json", "/nowhere/x.json: "),
    ],
)
def test_bad_input_is_one_line(argv, said, capsys):
    line = refusal(["plan", recipe("scalerl_llama3_8b"), *argv.split(), "--no-build"], capsys)
    assert said in line and line.startswith("megatron-scalerl: ")
