"""The command `study`, with a stand-in for `train`: order, resumption, failures, changes, signals, results."""

import csv
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

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).with_name("stand_in_train.py")
WITH_STAND_IN = f"""
import sys
from megatron_scalerl.commands.study import runner
runner.PROGRAM = (sys.executable, {str(STAND_IN)!r})
from megatron_scalerl.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
STEPS = 12


@pytest.fixture
def task(tmp_path):
    """A base recipe whose files exist, and two overlays in a folder."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    base = {
        "name": "base",
        "steps": STEPS,
        "policy": {"path": str(tmp_path / "policy")},
        "prompts": {"path": str(tmp_path / "prompts.jsonl")},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "arms").mkdir()
    (tmp_path / "arms" / "dapo.yaml").write_text("loss: {name: dapo, clip_low: 0.2, clip_high: 0.26}\n")
    (tmp_path / "arms" / "plain.yaml").write_text("loss: {name: cispo}\n")
    return tmp_path


def words(task, *more):
    files = ["--base", str(task / "base.yaml"), "--out", str(task / "study")]
    return ["study", str(task / "arms"), *files, "--seeds", "2", *more]


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
    file = task / "study" / "runs" / run / "starts"
    return len(file.read_text()) if file.exists() else 0


def wait_for_steps(task, run, steps, process):
    end = time.monotonic() + 240
    while len(read_jsonl(task / "study" / "runs" / run / "metrics.jsonl")) < steps:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_study_from_its_start_to_its_results(task):
    code, said = ran(task)
    assert code == 0
    order = re.findall(r"(\w+): starts", said)
    assert order == ["plain_seed1", "dapo_seed1", "plain_seed2", "dapo_seed2"]  # the reference first, seed by seed
    assert "time for 4 runs: not known before the first one is finished" in said
    assert re.search(r"2 of 4 runs have ended, about .* left", said)
    study = task / "study"
    found = json.loads((study / "comparison.json").read_text())
    assert [(arm["name"], arm["reference"], len(arm["runs"])) for arm in found["arms"]] == [
        ("plain", None, 2),
        ("dapo", "plain", 2),
    ]
    assert found["paired"] and found["arms"][1]["ceiling"]["value"] == pytest.approx(-0.2, abs=0.05)
    rows = list(csv.DictReader((study / "table.csv").open()))
    assert [row["recipe"] for row in rows] == ["plain", "dapo"]
    assert float(rows[0]["asymptote_lo"]) < float(rows[0]["asymptote"]) < float(rows[0]["asymptote_hi"])
    table, page = (study / "table.md").read_text(), (study / "study.html").read_text()
    assert "| plain | 2 |" in table and "4 of 4 runs are finished and compared" in table
    assert page.count("data:image/png;base64,") == 2 and "loss.name: dapo" in page
    assert (study / "study.png").stat().st_size and (study / "curves.png").stat().st_size
    assert not list(study.glob(".*"))
    # the same command has nothing left to do, and the run folders read the same in `fit --compare`
    code, said = ran(task)
    assert code == 0 and "4 runs, 4 of them finished" in said and starts(task, "plain_seed1") == 1
    again = task / "again.json"
    folders = [str(study / "runs" / name) for name in order]
    assert main(["fit", *folders, "--compare", "--json", str(again)]) == 0
    assert json.loads(again.read_text())["comparison"]["arms"] == found["arms"]
    # by steps, on which the stand-in's compute lies anyway
    assert ran(task, "--per-step")[0] == 0 and "training steps" not in (study / "table.md").read_text()
    by_steps = json.loads((study / "comparison.json").read_text())["arms"]
    assert [arm["asymptote"] for arm in by_steps] == [arm["asymptote"] for arm in found["arms"]]
    # one more seed: what is finished is not repeated, and tells the time
    code, said = ran(task, "--seeds", "3")
    assert code == 0 and "from 4 finished runs" in said and re.findall(r"(\w+): starts", said)[0] == "plain_seed3"


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_with_the_run_under_way(task):
    process = start(task, STAND_IN_STOPS="dapo_seed1:5")
    wait_for_steps(task, "dapo_seed1", 5, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, said = ran(task)
    assert code == 0 and "dapo_seed1: goes on" in said
    assert [starts(task, name) for name in ("plain_seed1", "dapo_seed1", "plain_seed2")] == [1, 2, 1]
    log = (task / "study" / "logs" / "dapo_seed1.log").read_text()
    assert log.count("begins at step 0") == 1 and "begins at step 4" in log


@pytest.mark.slow
def test_a_run_that_fails_stops_no_other_one(task):
    code, said = ran(task, STAND_IN_FAILS="dapo_seed1")
    log = str(task / "study" / "logs" / "dapo_seed1.log")
    assert code == 1 and "dapo_seed1: failed with exit code 1 after" in said
    assert f": RuntimeError: the stand-in fails; log: {log}" in said
    assert said.rstrip().endswith("the same command goes on with them") and "1 of 4 runs failed: dapo_seed1" in said
    assert [starts(task, name) for name in ("plain_seed1", "plain_seed2", "dapo_seed2")] == [1, 1, 1]
    assert "Failed: dapo_seed1 (exit code 1)" in (task / "study" / "study.html").read_text()
    assert ran(task)[0] == 0
    assert [starts(task, name) for name in ("dapo_seed1", "plain_seed1")] == [2, 1]
    assert "Failed" not in (task / "study" / "study.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 75)], ids=lambda v: str(int(v))
)
def test_signals_end_it_with_the_code_of_the_other_commands(task, number, code):
    process = start(task, STAND_IN_STOPS="plain_seed1:3")
    wait_for_steps(task, "plain_seed1", 3, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == code and f"stopped by {signal.Signals(number).name}" in err
    assert len(err.splitlines()) == 1
    assert starts(task, "dapo_seed1") == 0 and ran(task)[0] == 0


def test_one_study_at_a_time_in_a_folder(task):
    process = start(task, STAND_IN_STOPS="plain_seed1:1")
    wait_for_steps(task, "plain_seed1", 1, process)
    code, said = ran(task)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert code == 76
    assert (
        said.rstrip()
        == f"megatron-scalerl: {task / 'study'}: expected a folder that no other study uses, found it locked"
    )


@pytest.mark.slow
def test_a_changed_recipe_is_refused_or_redone(task):
    assert ran(task)[0] == 0
    overlay = task / "arms" / "dapo.yaml"
    overlay.write_text("loss: {name: dapo, clip_low: 0.2, clip_high: 0.3}\n")
    code, said = ran(task)
    assert (code, said.rstrip()) == (
        2,
        f"megatron-scalerl: {task / 'study'}: dapo: expected the recipe with which the study began, loss.clip_high: "
        "0.26, found 0.3; --redo runs it again",
    )
    code, said = ran(task, "--redo")
    assert code == 0 and re.findall(r"(\w+): starts", said) == ["dapo_seed1", "dapo_seed2"]
    assert (task / "study" / "replaced" / "dapo_seed1.1" / "validation.jsonl").exists()
    (task / "prompts.jsonl").write_text('{"prompt": "1+2", "answer": "3"}\n')
    code, said = ran(task)
    assert code == 2 and "prompts.jsonl: expected the content with which the study" in said
    code, said = ran(task, "--redo")
    assert code == 0 and len(re.findall(r": starts", said)) == 4


def compared(task):
    return json.loads((task / "study" / "comparison.json").read_text())["arms"]


@pytest.mark.slow
def test_a_recipe_that_is_the_same_as_another_one_is_left_out(task):
    (task / "arms" / "a_same.yaml").write_text("loss: {name: cispo}\nseed: 4\n")
    more = ("--reference", "dapo=plain", "--reference", "plain")
    code, said = ran(task, *more)
    assert code == 0 and said.splitlines()[0] == "plain: the same recipe as a_same here; left out"
    assert starts(task, "a_same_seed1") == 1 and not (task / "study" / "runs" / "plain_seed1").exists()
    assert [(arm["name"], arm["reference"]) for arm in compared(task)] == [("a_same", None), ("dapo", "a_same")]
    assert "plain is the same recipe as a_same here." in (task / "study" / "study.html").read_text()
    # the one that has runs stays, whatever is listed first
    (task / "arms" / "a.yaml").write_text("loss: {name: cispo}\n")
    code, said = ran(task, *more)
    assert code == 0 and said.count("the same recipe as a_same here; left out") == 2 and ": starts" not in said


@pytest.mark.slow
def test_results_that_cannot_be_written_are_a_failure(task):
    (task / "study" / "table.md").mkdir(parents=True)
    (task / "study" / "lock").touch()
    code, said = ran(task)
    assert code == 1 and "results: " not in said
    assert said.splitlines()[-1].startswith("megatron-scalerl: the results are not written: ")


@pytest.mark.slow
def test_a_run_that_cannot_be_read_is_left_out(task):
    assert ran(task)[0] == 0
    study = task / "study"
    (study / "runs" / "dapo_seed1" / "validation.jsonl").unlink()
    (study / "runs" / "plain_seed2" / "validation.jsonl").write_text("{\n")
    (study / "runs" / "dapo_seed2" / "recipe.yaml").write_text("- 1\n")
    code, said = ran(task, "--seeds", "3")
    assert code == 0 and "results: " in said
    table = (study / "table.md").read_text()
    assert "3 of 6 runs are finished and compared." in table and table.count("Left out: ") == 3
    assert "dapo_seed1: expected a run folder with validation.jsonl of a first validation" in table


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--set", "validation.every_steps=0"],
            "dapo: validation.every_steps: expected at least 1, since a study compares validations, found 0",
        ),
        (["--seeds", "0"], "--seeds: expected at least 1, found 0"),
        (["--target", "1.5"], "--target: expected a pass rate in (0, 1), found 1.5"),
        (["--reference", "gspo"], "--reference: expected one of dapo, plain, found 'gspo'"),
        (["--set", "gspo:steps=3"], "--set: expected one of dapo, plain before the colon, found 'gspo'"),
    ],
)
def test_mistakes_are_one_line(task, more, said, capsys):
    assert main(words(task, *more)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line and not (task / "study").exists()


def test_a_setting_of_one_recipe_alone(task):
    more = ["--set", "dapo:rollouts.groups_per_batch=27", "--set", "optimizer.lr=1e-5", "--set", "steps=4"]
    assert ran(task, *more, "--seeds", "1")[0] == 0
    recipes = {
        name: yaml.safe_load((task / "study" / "recipes" / f"{name}_seed1.yaml").read_text())
        for name in ("plain", "dapo")
    }
    assert {name: recipe["rollouts"]["groups_per_batch"] for name, recipe in recipes.items()} == {
        "plain": 48,
        "dapo": 27,
    }
    assert {recipe["optimizer"]["lr"] for recipe in recipes.values()} == {1e-5}


def test_what_the_recipes_of_a_study_share(task, capsys):
    (task / "arms" / "other.yaml").write_text("validation: {every_steps: 3}\n")
    assert main(words(task)) == 2
    assert (
        "other: expected policy, prompts and validation of dapo, which all recipes of a study share, validation."
        in (capsys.readouterr().err)
    )
    assert not (task / "study").exists()
    (task / "arms" / "other.yaml").unlink()
    (task / "study").mkdir()
    (task / "study" / "mine.txt").write_text("")
    assert main(words(task)) == 2
    assert "expected an empty folder or a study, found other files" in capsys.readouterr().err
