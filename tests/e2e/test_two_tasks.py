"""A mixture of tasks, each with its own file and verifier, trained with a real engine."""

import json
from collections import Counter

import pytest
from whole_runs import ROOT, overrides, run

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.controller.preflight import check_inputs
from megatron_scalerl.recipe.file import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.full]
WEIGHTS = {"math": 2, "printed": 1, "code": 1}


def split(tiny, folder):
    """Every third row of the tiny task for each task; the answers of two of them become unit tests."""
    for name in ("prompts", "held_out"):
        rows = read_jsonl(tiny / f"{name}.jsonl")
        for first, task in enumerate(WEIGHTS):
            mine = [row | {"answer": answer(task, row["answer"])} for row in rows[first::3]]
            (folder / f"{task}_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mine))


def answer(task, number):
    return number if task == "math" else json.dumps([{"input": "", "output": f"{number}\n"}])


def test_tasks_are_drawn_by_weight_and_measured_apart(tiny_dense, tmp_path, monkeypatch):
    """`code` is right for programs only, of which this policy writes none; the others are equally hard."""
    split(tiny_dense, tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests' / 'e2e'}:{ROOT}")
    files = {
        task: {
            "path": str(tmp_path / f"{task}_prompts.jsonl"),
            "held_out_path": str(tmp_path / f"{task}_held_out.jsonl"),
            "weight": weight,
        }
        for task, weight in WEIGHTS.items()
    }
    files["printed"]["verifier"] = "printed_answer:verify"
    files["code"] |= {"verifier": "code", "memory_mb": 512}
    settings = overrides(tiny_dense, tmp_path, "mixed", "prompts.path=null", "prompts.held_out_path=null")
    settings = [each for each in settings if not each.startswith(("prompts.path=/", "prompts.held_out_path=/"))]
    run("-m", "megatron_scalerl", "train", "recipes/tiny_cpu.yaml", *settings, f"prompts.tasks={json.dumps(files)}")

    folder = tmp_path / "mixed"
    prompts = check_inputs(load_recipe(folder / "recipe.yaml")).prompts.training
    tasks = {prompt.prompt_id: prompt.task for prompt in prompts}
    drawn = [tasks[e["prompt_id"]] for e in read_jsonl(folder / "journal.jsonl") if e["event"] == "admit"]
    assert len(drawn) >= 12
    for first in range(0, len(drawn) - 3, 4):
        assert Counter(drawn[first : first + 4]) == WEIGHTS
    validations = read_jsonl(folder / "validation.jsonl")
    assert [row["step"] for row in validations] == [0, 3]
    for row in validations:
        assert [row[f"prompts/{task}"] for task in WEIGHTS] == [20, 20, 20]
        rates = {task: row[f"pass_rate/{task}"] for task in WEIGHTS}
        assert rates["code"] == 0
        assert row["step"] == 3 or min(rates["math"], rates["printed"]) > 0  # three steps may make it worse
        assert sum(rates.values()) / 3 == pytest.approx(row["pass_rate"])
    records = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in records] == [1, 2, 3]
    for row in records:
        parts = {task: row.get(f"batch/groups/{task}", 0) / 4 for task in WEIGHTS}
        assert sum(parts.values()) == 1
        parts = [part * row[f"train_pass_rate/{task}"] for task, part in parts.items() if part]
        assert sum(parts) == pytest.approx(row["train_pass_rate"])
        assert row["probe_mismatch_max"] <= 1e-4
