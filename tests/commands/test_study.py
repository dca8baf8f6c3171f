"""The command `study`, with a stand-in for `train`: order, resumption, failures, changes, signals, results."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megatron_scalerl.__main__ import main
from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.commands import study
from megatron_scalerl.recipe.file import dump_recipe

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).with_name("stand_in_train.py")
WITH_STAND_IN = f"""
import sys
from megatron_scalerl.commands import study
study.PROGRAM = (sys.executable, {str(STAND_IN)!r})
from megatron_scalerl.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
STEPS = 12


@pytest.fixture
def task(tmp_path):
    """A base recipe whose files exist, and two overlays in a folder."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    base = {
        "name": "base",
        "steps": STEPS,
        "policy": {"path": str(tmp_path / "policy")},
        "prompts": {"path": str(tmp_path / "prompts.jsonl")},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "arms").mkdir()
    (tmp_path / "arms/dapo.yaml").write_text("loss: {name: dapo, clip_low: 0.2, clip_high: 0.26}\n")
    (tmp_path / "arms/plain.yaml").write_text("loss: {name: cispo}\n")
    return tmp_path


def words(task, *more):
    return [*f"study {task}/arms --base {task}/base.yaml --out {task}/study --seeds 2".split(), *more]


def start(task, *more, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", WITH_STAND_IN, *words(task, *more)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ran(task, *more, **environment):
    """(exit code, what was printed) of a study that runs to its end."""
    process = start(task, *more, **environment)
    out, err = process.communicate(timeout=300)
    return process.returncode, out + err


def starts(task, run):
    file = task / "study/runs" / run / "starts"
    return len(file.read_text()) if file.exists() else 0


def wait_for_steps(task, run, steps, process):
    end = time.monotonic() + 240
    while len(read_jsonl(task / "study/runs" / run / "metrics.jsonl")) < steps:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_study_from_its_start_to_its_results(task):
    (task / "arms/z_same.yaml").write_text("loss: {name: cispo}\nseed: 4\n")
    references = ("--reference", "dapo=z_same", "--reference", "plain")
    code, said = ran(task, *references)
    assert code == 0 and said.splitlines()[0] == "z_same: it is the same recipe as plain and is left out"
    order = re.findall(r"(\w+): starts", said)
    assert order == ["dapo_seed1", "plain_seed1", "dapo_seed2", "plain_seed2"]
    assert "2 of 4 runs have ended" in said
    folder = task / "study"
    arms = compared(task)["arms"]
    assert {(arm["name"], arm["reference"], len(arm["runs"])) for arm in arms} == {
        ("plain", None, 2),
        ("dapo", "plain", 2),
    }
    [dapo] = [arm for arm in arms if arm["name"] == "dapo"]
    assert dapo["ceiling"]["value"] == pytest.approx(-0.2, abs=0.05)
    assert "loss.name: dapo" in (folder / "study.html").read_text()
    assert (folder / "curves.png").stat().st_size
    # one more seed, by steps, on which the stand-in's compute lies anyway: what is finished is not repeated
    code, said = ran(task, *references, "--seeds", "3", "--per-step")
    assert code == 0 and re.findall(r"(\w+): starts", said) == ["dapo_seed3", "plain_seed3"]
    assert {len(arm["runs"]) for arm in compared(task)["arms"]} == {3}
    # what a finished run was made of is not changed below it
    (task / "arms/dapo.yaml").write_text("loss: {name: dapo, clip_low: 0.2, clip_high: 0.3}\n")
    code, said = ran(task, *references)
    assert code == 2 and "dapo_seed1.yaml: loss.clip_high is 0.3, but the run began with 0.26; take another" in said


def compared(task):
    return json.loads((task / "study/comparison.json").read_text())["comparison"]


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_with_the_run_under_way(task):
    process = start(task, STAND_IN_STOPS="plain_seed1:5")
    wait_for_steps(task, "plain_seed1", 5, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, said = ran(task)
    assert code == 0 and "begins at step 4" in said
    assert [starts(task, name) for name in ("dapo_seed1", "plain_seed1", "dapo_seed2")] == [1, 2, 1]


@pytest.mark.slow
def test_a_run_that_fails_stops_no_other_one(task):
    code, said = ran(task, STAND_IN_FAILS="dapo_seed1")
    assert code == 1 and "RuntimeError: the stand-in fails" in said
    assert f"1 runs failed: {task / 'study' / 'runs' / 'dapo_seed1'}; " in said.splitlines()[-1]
    assert [starts(task, name) for name in ("plain_seed1", "plain_seed2", "dapo_seed2")] == [1, 1, 1]
    assert sum(len(arm["runs"]) for arm in compared(task)["arms"]) == 3
    assert ran(task)[0] == 0
    assert [starts(task, name) for name in ("dapo_seed1", "plain_seed1")] == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 75)], ids=lambda v: str(int(v))
)
def test_signals_end_it_with_the_code_of_the_other_commands(task, number, code):
    process = start(task, STAND_IN_STOPS="dapo_seed1:3")
    wait_for_steps(task, "dapo_seed1", 3, process)
    process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode == code
    assert starts(task, "plain_seed1") == 0


@pytest.mark.parametrize(
    "more, said",
    [
        (
            "--set validation.every_steps=0",
            "validation.every_steps: 0 leaves nothing to compare; take at least 1",
        ),
        ("--seeds 0", "--seeds: 0 is too few; take at least 1"),
        ("--reference gspo", "--reference: gspo is none of the recipes dapo, plain"),
        ("--set gspo:steps=3", "--set: gspo is none of the recipes dapo, plain"),
        (
            "--set plain:validation.every_steps=3",
            "plain_seed1: validation.every_steps is 3, but 100 in dapo_seed1",
        ),
    ],
)
def test_mistakes_are_one_line(task, more, said, capsys):
    try:
        assert main(words(task, *more.split())) == 2
    except SystemExit as error:  # of the options' parser
        assert error.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1] and not (task / "study").exists()


def test_a_setting_of_one_recipe_alone_and_a_study_that_goes_on_however_its_paths_are_written(task, monkeypatch):
    monkeypatch.chdir(task)
    options = argparse.ArgumentParser()
    study.add_arguments(options)
    more = "--set dapo:rollouts.groups_per_batch=27 --set optimizer.lr=1e-5 --seeds 1"
    for out, policy in (("study", "policy"), ("./study", "./policy"), (str(task / "study"), str(task / "policy"))):
        text = f"arms --base base.yaml --out {out} {more} --set policy.path={policy}"
        recipes, same = study._recipes(options.parse_args(text.split()))
        assert [(recipe.name, recipe.rollouts.groups_per_batch) for recipe in recipes] == [
            ("dapo_seed1", 27),
            ("plain_seed1", 48),
        ]
        assert {recipe.optimizer.lr for recipe in recipes} == {1e-5} and same == {}
        for recipe in recipes:
            study._file(recipe).parent.mkdir(parents=True, exist_ok=True)
            study._file(recipe).write_text(dump_recipe(recipe))
