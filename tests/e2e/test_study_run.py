"""A real study: task, warm start, two recipes with two seeds each, killed within a run, resumed, compared."""

import json
import os
import signal
import time

import pytest
import yaml
from whole_runs import run, start

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.recipe.file import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.full]

SETTINGS = (
    "steps=8",
    "sft.steps=80",
    "rollouts.groups_per_batch=4",
    "rollouts.group_size=8",
    "rollouts.max_in_flight=64",
    "validation.every_steps=1",
    "validation.prompts=20",
    "validation.generations=2",
    "checkpoint.every_steps=2",
    "optimizer.warmup_steps=1",
)


@pytest.mark.timeout(3000)
def test_two_recipes_with_two_seeds(tmp_path):
    study = tmp_path / "study"
    words = ["-m", "megatron_scalerl", "study", "recipes/ablations/scalerl.yaml", "recipes/ablations/dapo_loss.yaml"]
    words += ["--seeds", "2", "--out", study, "--cache", tmp_path / "cache"]
    words += [word for setting in SETTINGS for word in ("--set", setting)]
    process = start(*map(str, words))
    until, killed = time.monotonic() + 1500, study / "runs" / "dapo_loss_seed1"
    while len(read_jsonl(killed / "metrics.jsonl")) < 4:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    out = run(*words, timeout=2400).stdout
    assert "4 runs, 1 of them finished" in out and "dapo_loss_seed1: goes on" in out
    names = [f"{arm}_seed{seed}" for seed in (1, 2) for arm in ("scalerl", "dapo_loss")]
    assert [row["run"] for row in read_jsonl(study / "runs.jsonl")] == names
    recipes = [load_recipe(study / "runs" / name / "recipe.yaml") for name in names]
    assert len({(recipe.policy.path, recipe.policy.megatron_path, recipe.prompts.path) for recipe in recipes}) == 1
    assert [(recipe.seed, recipe.loss.name) for recipe in recipes] == [
        (s, n) for s in (1, 2) for n in ("cispo", "dapo")
    ]
    assert [len(read_jsonl(study / "runs" / name / "attempts.jsonl")) for name in names] == [1, 2, 1, 1]
    found = json.loads((study / "comparison.json").read_text())
    assert [(arm["name"], len(arm["runs"])) for arm in found["arms"]] == [("scalerl", 2), ("dapo_loss", 2)]
    assert found["paired"] and "loss.name: dapo" in (study / "study.html").read_text()
    # all runs of one seed begin with the same policy on the same held-out prompts, so do the others
    starts = {read_jsonl(study / "runs" / name / "validation.jsonl")[0]["pass_rate"] for name in names}
    assert max(starts) - min(starts) <= 0.1
    assert yaml.safe_load((study / "recipes" / "scalerl_seed2.yaml").read_text())["seed"] == 2
    [entry] = (tmp_path / "cache").iterdir()
    assert {"task", "policy"} <= {path.name for path in entry.iterdir()}
