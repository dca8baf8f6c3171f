"""The list of runs below a folder: what is found, what a row says, and damage."""

import json
import os
import time

import pytest
from page_runs import step_record, write_plain_run

from megatron_scalerl.page.find_runs import find_runs
from megatron_scalerl.page.growing_file import last_row
from megatron_scalerl.page.runs_index import run_row


def test_runs_are_found_at_any_depth_and_nothing_is_searched_inside_one(tmp_path):
    for path in ("a", "study/runs/b", "a/checkpoints/no", "1/2/3/4", "1/2/3/4x/5", ".hidden/c"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "recipe.yaml").write_text("{}")
    (tmp_path / "half").mkdir()
    (tmp_path / "half/attempts.jsonl").touch()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "again").symlink_to(tmp_path)
    found = find_runs(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in found.runs] == ["1/2/3/4", "a", "half", "study/runs/b"]
    assert found.left_out == ""


def test_a_row_says_state_step_and_validation(tmp_path):
    run = write_plain_run(tmp_path / "a", steps=12)
    (run / "metrics.jsonl").write_text(json.dumps(step_record(60)) + "\n")
    row = run_row(run, "a\x1b[2J\u202e")
    assert (row.state, row.step, row.validation) == ("running", "60", "0.751 at step 60")
    assert row.name == "a\\x1b[2J\\u202e" and row.problem == ""


@pytest.mark.parametrize(
    "files, age, state",
    [
        ({}, 0, "running"),
        ({}, 3600, "stopped"),
        ({"end.json": {"reason": "all steps", "incarnation": "local.0"}}, 0, "finished: all steps"),
        (  # of the attempt before
            {"end.json": {"reason": "all", "incarnation": "local.0"}, "attempts.jsonl": {"incarnation": "local.1"}},
            0,
            "running",
        ),
    ],
)
def test_the_state_of_a_run(tmp_path, files, age, state):
    run = write_plain_run(tmp_path / "a")
    (run / "attempts.jsonl").write_text('{"incarnation": "local.0"}\n')
    for name, row in files.items():
        (run / name).write_text(json.dumps(row) + "\n")
    then = time.time() - age
    os.utime(run / "ledger.jsonl", (then, then))
    assert run_row(run, "a").state == state


def test_a_run_that_has_only_a_recipe_is_not_started(tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: a\n")
    row = run_row(tmp_path, "a")
    assert (row.state, row.step, row.validation, row.problem) == ("not started", "", "", "")


DAMAGE = {
    "odd numbers": ("validation.jsonl", b'{"step": 1, "compute": 1e999, "pass_rate": 2}\n', "expected a validation"),
    "no steps": ("metrics.jsonl", b"\xff\n", "metrics.jsonl: last line: expected a JSON object"),
    "no end": ("end.json", b"[]\n", "end.json: last line: expected a JSON object"),
    "torn": ("metrics.jsonl", b'{"step": ', ""),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_a_row_with_one_line(tmp_path, name):
    run = write_plain_run(tmp_path / "bad")
    file, data, said = DAMAGE[name]
    (run / file).write_bytes(data)
    problem = run_row(run, "bad").problem
    assert said in problem and "\n" not in problem and bool(problem) == bool(said)


@pytest.mark.parametrize("file", ["validation.jsonl", "metrics.jsonl", "attempts.jsonl", "end.json"])
def test_a_folder_in_the_place_of_a_file_does_not_stop_the_list(tmp_path, file):
    run = write_plain_run(tmp_path / "bad")
    (run / file).unlink(missing_ok=True)
    (run / file).mkdir()
    assert file in run_row(run, "bad").problem


def test_the_newest_row_is_the_last_complete_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert last_row(path) is None
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3')
    assert last_row(path) == {"a": 2}
    path.write_text('{"a": 1')
    assert last_row(path) is None
