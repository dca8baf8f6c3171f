"""The plan on CPUs: memory, cores and seconds of the recipes that `init` writes for them."""

import json
import re

import pytest
import random_policies

from megatron_scalerl.__main__ import main
from megatron_scalerl.plan import cpus
from megatron_scalerl.tiny.tokenizer import save_tokenizer

RATE = 1e10


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe of a policy of a few thousand parameters, on a machine of a known rate."""
    monkeypatch.setattr(cpus, "measured_flops", lambda width, dtype: RATE)
    random_policies.make("qwen2", tmp_path / "policy", **random_policies.QWEN2_FOR_ENGINES)
    save_tokenizer(tmp_path / "policy")
    (tmp_path / "data.jsonl").write_text('{"question": "1;+1=", "answer": "2"}\n' * 2)
    file = tmp_path / "my_run.yaml"
    sections = {"name": "my_run", "steps": 10, "policy": {"path": str(tmp_path / "policy"), "dtype": "float32"}}
    sections["prompts"] = {"path": str(tmp_path / "data.jsonl"), "held_out": 1, "max_prompt_tokens": 8}
    sections["interruption"] = {"thinking_tokens": [20, 24], "answer_tokens": 8}
    file.write_text(json.dumps(sections))
    return file


def planned(capsys, recipe, *settings):
    assert main(["plan", str(recipe), *settings, "--gpus", "0", "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_cores_and_completions_decide_the_seconds(recipe, capsys):
    one = planned(capsys, recipe, "validation.every_steps=0")
    assert one["threads"] == 2
    assert one["run_seconds"] == pytest.approx(10 * one["step_seconds"])
    half = planned(capsys, recipe, "rollouts.groups_per_batch=24")["seconds"]
    assert half == pytest.approx({kind: seconds / 2 for kind, seconds in one["seconds"].items()})
    # many threads of few cores take turns
    cores = one["cores"]
    busy = planned(capsys, recipe, f"trainer.threads={4 * cores}", f"engine.threads={4 * cores}")
    in_turn = sum(one["seconds"].values()) / cores
    assert busy["step_seconds"] == pytest.approx(cpus.FIXED_S + in_turn)
    assert busy["seconds"]["trainer"] == pytest.approx(one["seconds"]["trainer"] / (4 * cores))


def test_validations_take_the_engines_time(recipe, capsys):
    sections = ("validation.every_steps=5", "validation.prompts=1", "validation.generations=48")
    plan = planned(capsys, recipe, *sections, "validation.end_generations=96", "rollouts.group_size=2")
    # of step 0 and of the end 96 completions each, of step 5 48, of a batch 96
    expected = 10 * plan["step_seconds"] + 2.5 * plan["seconds"]["engine"]
    assert plan["run_seconds"] == pytest.approx(expected)


def test_memory_is_that_of_all_processes(recipe, capsys):
    plan = planned(capsys, recipe)
    two = planned(capsys, recipe, "engine.count=2", "engine.vllm={kv_cache_memory_bytes: 1073741824}")
    assert two["gib"]["engine"] == pytest.approx(2 * (plan["gib"]["engine"] + 0.75))
    assert two["gib"]["trainer"] == plan["gib"]["trainer"]


def test_a_run_that_does_not_fit_is_one_line(recipe, capsys):
    assert main(["plan", str(recipe), "--gpus", "0", "--check"]) == 0
    shown = capsys.readouterr().out
    assert re.match(r"my_run on CPUs: fits: \d\.\d of [\d.]+ GiB \(trainer .*; 2 threads on \d+ cores; ", shown)
    cache = "engine.vllm={kv_cache_memory_bytes: 10000000000000000}"
    assert main(["plan", str(recipe), cache, "--gpus", "0", "--check"]) == 2
    error = r"megatron-scalerl: my_run: the run needs 93\d{5}\.\d GiB more than this machine has"
    assert re.search(error, capsys.readouterr().err)


def test_the_rate_is_measured():
    assert 1e7 < cpus.measured_flops(256, "float32") < 1e13
