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
    """The working directory: a policy, prompts and the recipe r.yaml."""
    for name in ("base_policy", "prompts.jsonl", "held_out.jsonl", "sft.jsonl"):
        (tmp_path / name).symlink_to(tiny / name)
    recipe = yaml.safe_load((ROOT / "recipes" / "tiny_cpu.yaml").read_text())
    recipe |= {"name": "r", "output_dir": "runs", "steps": 3}
    recipe["policy"]["path"] = "base_policy"
    recipe["prompts"] |= {"path": "prompts.jsonl", "held_out_path": "held_out.jsonl"}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
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


FIRST = ("optimizer.lr=1e-4", "engine.count=1")


def as_it_is(place):
    return ["r.yaml", *FIRST]


def from_elsewhere(place):
    """What the run's relative paths were relative to is not known here."""
    os.chdir("/")
    absolute = (f"output_dir={place / 'runs'}", f"policy.path={place / 'base_policy'}")
    prompts = (f"prompts.path={place / 'prompts.jsonl'}", f"prompts.held_out_path={place / 'held_out.jsonl'}")
    return [str(place / "r.yaml"), *FIRST, *absolute, *prompts]


def reformatted(place):
    data = yaml.safe_load((place / "r.yaml").read_text())
    other = json.dumps(dict(reversed(list(data.items()))), indent=3)
    (place / "other.yaml").write_text("# the same\n" + other)
    return ["other.yaml", *FIRST]


def all_defaults_stated(place):
    (place / "stated.yaml").write_text(dump_recipe(load_recipe("r.yaml")))
    return ["stated.yaml", *FIRST]


SIZES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
WAYS = {
    "as it is": as_it_is,
    "absolute recipe": lambda place: [str(place / "r.yaml"), *FIRST],
    "overrides in another order": lambda place: ["r.yaml", *reversed(FIRST)],
    "number written otherwise": lambda place: ["r.yaml", "optimizer.lr=0.0001", "engine.count=1"],
    "output_dir/": lambda place: [*as_it_is(place), "output_dir=runs/"],
    "absolute output_dir": lambda place: [*as_it_is(place), f"output_dir={place / 'runs'}"],
    "policy/": lambda place: [*as_it_is(place), "policy.path=base_policy/"],
    "absolute policy": lambda place: [*as_it_is(place), f"policy.path={place / 'base_policy'}"],
    "absolute prompts": lambda place: [*as_it_is(place), f"prompts.path={place / 'prompts.jsonl'}"],
    "./held_out": lambda place: [*as_it_is(place), "prompts.held_out_path=./held_out.jsonl"],
    "reformatted": reformatted,
    "all defaults stated": all_defaults_stated,
    "sizes of 1 stated": lambda place: [*as_it_is(place), *(f"megatron.parallel.{k}_parallel_size=1" for k in SIZES)],
    "more steps": lambda place: [*as_it_is(place), "steps=4"],
}


@pytest.mark.parametrize("way", WAYS)
def test_train_goes_on(place, no_processes, way, capsys):
    assert main(["train", *as_it_is(place)]) == 0
    assert main(["train", *WAYS[way](place)]) == 0, capsys.readouterr().err
    attempts = read_jsonl(place / "runs" / "r" / "attempts.jsonl")
    assert len(attempts) == 2 and len({attempt["run_id"] for attempt in attempts}) == 1
    assert [item.name for item in (place / "runs").iterdir()] == ["r"]


def test_a_finished_run_starts_nothing(place, no_processes, monkeypatch, capsys):
    assert main(["train", *as_it_is(place)]) == 0
    (place / "runs" / "r" / "validation.jsonl").write_text('{"step": 3}\n')
    monkeypatch.setattr(training, "resume_point", lambda _: ResumePoint(checkpoint=place, step=3))
    before = contents(place / "runs")
    assert main(["train", *as_it_is(place)]) == 0
    assert "all 3 steps are made; nothing is left to do" in capsys.readouterr().out
    assert contents(place / "runs") == before


def another_file(place, name):
    """A copy with other content, under another path."""
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / name).write_bytes((place / name).read_bytes() + b"\n")
    return place / "elsewhere" / name


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (lambda place: ["optimizer.lr=2e-4"], "optimizer.lr is 0.0001 in the run's recipe and 0.0002 here"),
        (lambda place: ["loss.name=dapo", "loss.clip_low=0.2", "loss.clip_high=0.26"], "loss.clip_high is None "),
        (lambda place: [f"prompts.path={another_file(place, 'prompts.jsonl')}"], "prompts.path is 'prompts.jsonl' "),
        (lambda place: from_elsewhere(place)[1:], "policy.path is 'base_policy' in the run's recipe and '/"),
        (lambda place: ["megatron.ddp.use_distributed_optimizer=false"], "use_distributed_optimizer is None "),
    ],
)
def test_train_refuses_another_recipe(
    place,
    no_processes,
    more,
    said,
    capsys,
):
    assert main(["train", *as_it_is(place)]) == 0
    before = contents(place / "runs")
    capsys.readouterr()
    words = [*as_it_is(place), *more(place)]
    assert main(["train", str(place / words[0]), *words[1:]]) == 2
    error = capsys.readouterr().err
    assert said in error and "choose another name or output_dir" in error and error.count("\n") == 1
    assert contents(place / "runs") == before


@pytest.mark.parametrize("spelled", ["base_policy/", "absolute"])
def test_evaluate_goes_on_and_refuses_another_evaluation(place, spelled, monkeypatch, capsys):
    from megatron_scalerl.commands import evaluate

    monkeypatch.setattr(signals, "run_until_signal", lambda work, *_, **__: work.close())
    monkeypatch.setattr(evaluate, "_report", lambda *_: None)
    (place / "problems.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    policy = str(place / "base_policy") if spelled == "absolute" else spelled

    def words(policy, *more):
        data = "problems.jsonl:question,answer"
        return ["evaluate", policy, "--recipe", "r.yaml", "--data", data, "--k", "1", "--out", "scores", *more]

    assert main(words("base_policy")) == 0, capsys.readouterr().err
    before = contents(place / "scores")
    assert before.keys() >= {"completions.jsonl"}
    assert main(words(policy)) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(words(policy, "rollouts.temperature=0.5")) == 2
    error = capsys.readouterr().err
    assert "temperature" in error and error.count("\n") == 1 and contents(place / "scores") == before


@pytest.fixture
def run_folder(tmp_path):
    """A copy of the run that the package has."""
    with recorded_run() as recorded:
        shutil.copytree(recorded, tmp_path / "run")
        yield tmp_path / "run"


READERS = {
    "report": ["report", "{run}"],
    "report --html": ["report", "{run}", "--html", "{out}/page.html"],
    "fit": ["fit", "{run}", "--json", "{out}/fit.json"],
    "show": ["show", "{run}"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_readers_change_nothing(run_folder, name, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    before = contents(run_folder)
    for run in (str(run_folder), f"{run_folder}/", os.path.relpath(run_folder)):
        assert main([word.format(run=run, out=out) for word in READERS[name]]) == 0, capsys.readouterr().err
    left = contents(run_folder)
    assert {key: left[key] for key in before} == before and left.keys() - before.keys() <= {"forecast.png"}


@pytest.mark.slow
def test_what_writes_a_policy_refuses_its_own_result(place, capsys):
    commands = {
        "warm": ["sft", "r.yaml", "sft.path=sft.jsonl", "sft.steps=1", "sft.threads=1", "--out", "{}"],
        "megatron": ["convert", "to-megatron", "warm", "{}"],
        "hf": ["convert", "to-hf", "megatron", "{}", "--like", "warm"],
    }
    for out, words in commands.items():
        assert main([word.format(out) for word in words]) == 0, capsys.readouterr().err
        before = contents(place / out)
        for spelled in (out, f"./{out}", f"{out}/", str(place / out)):
            assert main([word.format(spelled) for word in words]) == 2
            said = capsys.readouterr().err
            lines = [line for line in said.splitlines() if line.startswith("megatron-scalerl: ")]
            assert len(lines) == 1 and "Traceback" not in said
            assert "a new or empty folder" in lines[0] or "nothing is overwritten" in lines[0]
            assert contents(place / out) == before
