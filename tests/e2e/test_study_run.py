"""A real study: two recipes with two seeds each, killed within a run, resumed, compared."""

import json

import pytest
from waiting import wait_until
from whole_runs import overrides, run, start

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.recipe.file import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.mark.timeout(3000)
def test_two_recipes_with_two_seeds(policy, tmp_path):
    study = tmp_path / "study"
    recipes = "recipes/ablations/scalerl.yaml recipes/ablations/dapo_loss.yaml --base recipes/tiny_cpu.yaml"
    words = f"-m megatron_scalerl study {recipes} --seeds 2 --out {study}".split()
    more = ("steps=8", "validation.every_steps=1", "checkpoint.every_steps=2")
    words += [word for setting in overrides(policy, "", "", *more)[2:] for word in ("--set", setting)]
    process = start(*map(str, words))
    metrics = study / "runs/dapo_loss_seed1/metrics.jsonl"
    wait_until(lambda: process.poll() is not None or len(read_jsonl(metrics)) >= 4, 1500)
    process.kill()
    process.wait()
    out = run(*words, timeout=2400).stdout
    assert "scalerl_seed1: starts" not in out and "dapo_loss_seed1: starts or resumes" in out
    names = [f"{arm}_seed{seed}" for seed in (1, 2) for arm in ("scalerl", "dapo_loss")]
    recipes = [load_recipe(study / "runs" / name / "recipe.yaml") for name in names]
    assert [(recipe.seed, recipe.loss.name) for recipe in recipes] == [
        (s, n) for s in (1, 2) for n in ("cispo", "dapo")
    ]
    assert [len(read_jsonl(study / "runs" / name / "attempts.jsonl")) for name in names] == [1, 2, 1, 1]
    compared = json.loads((study / "comparison.json").read_text())["comparison"]
    runs = {arm["name"]: len(arm["runs"]) for arm in compared["arms"]}
    for name, fallen in compared["falling"].items():  # of eight noisy validations the last ones may be a fall
        runs[name] = runs.get(name, 0) + len(fallen)
    assert runs == {"scalerl": 2, "dapo_loss": 2}
    assert compared["falling"] or "loss.name: dapo" in (study / "study.html").read_text()
    # all runs of one seed begin with the same policy on the same held-out prompts, so do the others
    starts = {read_jsonl(study / "runs" / name / "validation.jsonl")[0]["pass_rate"] for name in names}
    assert max(starts) - min(starts) <= 0.1
