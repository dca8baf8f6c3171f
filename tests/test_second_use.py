"""Each command on its own results: it goes on, says that nothing is left to do, or refuses in one line.

The same command is also written in other ways: paths relative, absolute, with ./ and a slash at the end, overrides in
another order, a reformatted recipe, defaults that are stated. Engines and ranks are left out where what is asked is
decided before they start; tests/e2e/test_train.py has the whole runs, tests/slurm the jobs.
"""

import json
import os
import shutil

import pytest
import yaml
from command_line import refusal
from programs import ROOT

from megatron_scalerl.__main__ import main
from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.controller import train as training
from megatron_scalerl.controller.run_folder import ResumePoint, RunFolder
from megatron_scalerl.page.demo import recorded_run
from megatron_scalerl.processes import signals
from megatron_scalerl.recipe.file import dump_recipe, load_recipe


@pytest.fixture
def place(tiny, tmp_path, monkeypatch):
    """The working directory: a policy, prompts, and the recipe r.yaml, also reformatted and with its defaults."""
    for name in ("base_policy", "prompts.jsonl", "held_out.jsonl", "sft.jsonl"):
        (tmp_path / name).symlink_to(tiny / name)
    recipe = yaml.safe_load((ROOT / "recipes/tiny_cpu.yaml").read_text())
    recipe |= {"name": "r", "output_dir": "runs", "steps": 3}
    recipe["policy"]["path"] = "base_policy"
    recipe["prompts"] |= {"path": "prompts.jsonl", "held_out_path": "held_out.jsonl"}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    other = json.dumps(dict(reversed(list(recipe.items()))), indent=3)
    (tmp_path / "other.yaml").write_text("# the same\n" + other)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stated.yaml").write_text(dump_recipe(load_recipe("r.yaml")))
    return tmp_path


def contents(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture
def no_processes(monkeypatch):
    """A run ends where it would start its processes: its folder is made, its recipe checked and written."""

    async def folder_alone(recipe, *_):
        RunFolder(recipe).close()
        return "as far as the folder"

    monkeypatch.setattr(training, "_train", folder_alone)


FIRST = "optimizer.lr=1e-4 engine.count=1"
AS_IT_IS = f"r.yaml {FIRST}"
SIZES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
WAYS = {
    "as it is": AS_IT_IS,
    "overrides in another order": "r.yaml engine.count=1 optimizer.lr=1e-4",
    "number written otherwise": "r.yaml optimizer.lr=0.0001 engine.count=1",
    "absolute output_dir": f"{AS_IT_IS} output_dir=PLACE/runs",
    "absolute policy": f"{AS_IT_IS} policy.path=PLACE/base_policy",
    "./held_out": f"{AS_IT_IS} prompts.held_out_path=./held_out.jsonl",
    "reformatted": f"other.yaml {FIRST}",
    "all defaults stated": f"stated.yaml {FIRST}",
    "sizes of 1 stated": " ".join([AS_IT_IS, *(f"megatron.parallel.{k}_parallel_size=1" for k in SIZES)]),
    "more steps": f"{AS_IT_IS} steps=4",
}


def train(place, words):
    return main(["train", *words.replace("PLACE", str(place)).split()])


@pytest.mark.parametrize("way", WAYS)
def test_train_goes_on(place, no_processes, way, capsys):
    assert train(place, AS_IT_IS) == 0
    assert train(place, WAYS[way]) == 0, capsys.readouterr().err
    attempts = read_jsonl(place / "runs/r/attempts.jsonl")
    assert len(attempts) == 2 and len({attempt["run_id"] for attempt in attempts}) == 1
    assert [item.name for item in (place / "runs").iterdir()] == ["r"]


def test_a_finished_run_starts_nothing(place, no_processes, monkeypatch, capsys):
    assert train(place, AS_IT_IS) == 0
    (place / "runs/r/validation.jsonl").write_text('{"step": 3}\n')
    monkeypatch.setattr(training, "resume_point", lambda _: ResumePoint(checkpoint=place, step=3))
    before = contents(place / "runs")
    assert train(place, AS_IT_IS) == 0
    assert "all 3 steps are made; nothing is left to do" in capsys.readouterr().out
    assert contents(place / "runs") == before


@pytest.mark.parametrize(
    "more, said",
    [
        ("optimizer.lr=2e-4", "optimizer.lr is 0.0001 in the run's recipe and 0.0002 here"),
        ("loss.name=dapo loss.clip_low=0.2 loss.clip_high=0.26", "loss.clip_high is None "),
        ("prompts.path=PLACE/another.jsonl", "prompts.path is 'prompts.jsonl' "),
        (
            # from elsewhere: what the run's relative paths were relative to is not known there
            "output_dir=PLACE/runs policy.path=PLACE/base_policy prompts.path=PLACE/prompts.jsonl "
            "prompts.held_out_path=PLACE/held_out.jsonl",
            "policy.path is 'base_policy' in the run's recipe and '/",
        ),
        ("megatron.ddp.use_distributed_optimizer=false", "use_distributed_optimizer is None "),
    ],
)
def test_train_refuses_another_recipe(place, no_processes, more, said, capsys, monkeypatch):
    (place / "another.jsonl").write_bytes((place / "prompts.jsonl").read_bytes() + b"\n")
    assert train(place, AS_IT_IS) == 0
    before = contents(place / "runs")
    capsys.readouterr()
    if more.startswith("output_dir"):
        monkeypatch.chdir("/")
    line = refusal(f"train {place}/{AS_IT_IS} {more}".replace("PLACE", str(place)).split(), capsys)
    assert said in line and "choose another name or output_dir" in line
    assert contents(place / "runs") == before


def test_evaluate_goes_on(place, monkeypatch, capsys):
    from megatron_scalerl.commands import evaluate

    monkeypatch.setattr(signals, "run_until_signal", lambda work, *_, **__: work.close())
    monkeypatch.setattr(evaluate, "_report", lambda *_: None)
    (place / "problems.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    words = ["--recipe", "r.yaml", "--data", "problems.jsonl:question,answer", "--k", "1", "--out", "scores"]
    assert main(["evaluate", "base_policy", *words]) == 0, capsys.readouterr().err
    before = contents(place / "scores")
    assert before.keys() >= {"completions.jsonl"}
    assert main(["evaluate", str(place / "base_policy"), *words]) == 0, capsys.readouterr().err
    assert contents(place / "scores") == before


@pytest.fixture
def run_folder(tmp_path):
    """A copy of the run that the package has."""
    with recorded_run() as recorded:
        shutil.copytree(recorded, tmp_path / "run")
        yield tmp_path / "run"


READERS = {
    "report": "report {run}",
    "report --html": "report {run} --html {out}/page.html",
    "fit": "fit {run} --json {out}/fit.json",
    "show": "show {run}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_readers_change_nothing(run_folder, name, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    before = contents(run_folder)
    for run in (str(run_folder), f"{run_folder}/", os.path.relpath(run_folder)):
        assert main(READERS[name].format(run=run, out=out).split()) == 0, capsys.readouterr().err
    left = contents(run_folder)
    assert {key: left[key] for key in before} == before and left.keys() - before.keys() <= {"forecast.png"}
