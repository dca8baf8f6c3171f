"""A mixture through the whole controller in virtual time: its draws, its records by task, killed and resumed."""

from dataclasses import replace

import pytest
from fakes import run as run_module
from fakes.run import attempt, recipe
from sampling import sampled

from megatron_scalerl.checkpoints.jsonl import read_jsonl

TASKS = {"math": {"path": "m", "weight": 3}, "code": {"path": "c", "weight": 1, "verifier": "code"}}


def task_of(number):
    return "code" if number % 2 else "math"


@pytest.fixture(autouse=True)
def two_tasks(monkeypatch):
    """Twenty prompts of each task, two of each held out."""
    made = run_module.prompts()

    def mixed(prompts):
        return tuple(replace(p, task=task_of(int(p.text))) for p in prompts)

    both = replace(made, training=mixed(made.training), held_out=mixed(made.held_out))
    monkeypatch.setattr(run_module, "prompts", lambda: both)


def mixture(folder):
    rollouts = {"groups_per_batch": 4, "max_staleness_steps": 0}
    return recipe(folder, prompts={"path": None, "tasks": TASKS}, rollouts=rollouts)


def drawn(folder):
    return [(e["group_id"], e["prompt_id"]) for e in read_jsonl(folder / "r/journal.jsonl") if e["event"] == "admit"]


def test_a_run_draws_by_weight_and_records_by_task(tmp_path):
    assert attempt(mixture(tmp_path)).reason == "all 6 steps are made"
    rows = read_jsonl(tmp_path / "r/metrics.jsonl")
    assert {(row["batch/groups/math"], row["batch/groups/code"]) for row in rows} == {(3.0, 1.0)}
    by_task = [0.75 * row["train_pass_rate/math"] + 0.25 * row["train_pass_rate/code"] for row in rows]
    assert by_task == pytest.approx([row["train_pass_rate"] for row in rows])
    for row in read_jsonl(tmp_path / "r/validation.jsonl"):
        assert (row["prompts/math"], row["prompts/code"], row["prompts"]) == (2, 2, 4)
        assert (row["pass_rate/math"] + row["pass_rate/code"]) / 2 == pytest.approx(row["pass_rate"])


@pytest.mark.slow
@pytest.mark.parametrize("write", sampled("killed at a write", range(3, 60, 8), 3))
def test_a_killed_run_goes_on_with_the_same_draws(tmp_path, write):
    whole, killed = mixture(tmp_path / "whole"), mixture(tmp_path / "killed")
    attempt(whole)
    assert attempt(killed, kill_at_write=write).reason is None
    assert attempt(killed).reason == "all 6 steps are made"
    assert drawn(tmp_path / "killed") == drawn(tmp_path / "whole")
    columns = ("step", "batch/groups/math", "train_pass_rate/math", "train_pass_rate/code")

    def records(name):
        return [[row[c] for c in columns] for row in read_jsonl(tmp_path / name / "r/metrics.jsonl")]

    assert records("killed") == records("whole")
