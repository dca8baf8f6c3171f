"""The list of runs below a folder: what is found, what a row says, damage, and where recipes differ."""

import json
import os
import time

import pytest
from json_lines import append
from page_runs import HOSTILE, step_record, write_plain_run

from megatron_scalerl.page import find_runs as find_module
from megatron_scalerl.page.find_runs import find_runs
from megatron_scalerl.page.growing_file import end_row
from megatron_scalerl.page.runs_data import RunsData, RunSummary


def fitted(folder):
    runs = RunsData(folder)
    runs.update()
    while (number := runs.next_without_fit()) is not None:
        runs.add_fit(number, *runs.runs[number].made_fit())
    return runs


def by_name(payload):
    return {row["name"]: row for row in payload["runs"].values()}


def test_runs_are_found_at_any_depth_and_nothing_is_searched_inside_one(tmp_path):
    for path in ("a", "study/runs/b", "a/checkpoints/no", "1/2/3/4", "1/2/3/4x/5", ".hidden/c"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "recipe.yaml").write_text("{}")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "attempts.jsonl").touch()
    (tmp_path / "foreign").mkdir()
    for name in "vwxyz":
        (tmp_path / "foreign" / name).touch()
    (tmp_path / "again").symlink_to(tmp_path)
    found = find_runs(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in found.runs] == ["1/2/3/4", "a", "half", "study/runs/b"]
    assert [(path.name, text) for path, text in found.others] == [
        ("foreign", "it is no run (recipe.yaml) and holds v, w, x, y and 1 more")
    ]


def test_a_search_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(find_module, "MOST_RUNS", 3)
    for number in range(5):
        (tmp_path / f"run{number}").mkdir()
        (tmp_path / f"run{number}" / "recipe.yaml").write_text("{}")
    found = find_runs(tmp_path)
    assert len(found.runs) == 3 and found.left_out == "only the first 4 folders and 3 runs are shown"


def test_a_row_says_state_step_validation_ceiling_and_hours(tmp_path):
    write_plain_run(tmp_path / "a", steps=12)
    (tmp_path / "a" / "metrics.jsonl").write_text(json.dumps(step_record(60, device_hours_total=0.31)) + "\n")
    row = by_name(fitted(tmp_path).payload())["a"]
    assert (row["state"], row["step"], row["steps"], row["hours"]) == ("running", 60, 100, 0.31)
    assert row["validation"][-1] == [60, 0.24, 0.75137] and row["unit"] == "device-hours"
    ceiling, low, high = row["fit"]["ceiling"]
    assert low < 0.8 < high and low < ceiling < high
    assert row["fit"]["end"] == pytest.approx(0.4) and row["fit"]["forecast"].startswith("at step 100: 0.7")
    path = row["fit"]["path"]
    assert path[0][0] == pytest.approx(0.24) and path[-1][0] == pytest.approx(0.5)  # a power of two
    assert any(point[0] == pytest.approx(0.4) for point in path)


@pytest.mark.parametrize(
    ("files", "age", "state"),
    [
        ({}, 0, "running"),
        ({}, 3600, "stopped"),
        ({"end.json": {"reason": "all steps", "incarnation": "local.0"}}, 0, "finished"),
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
    summary = RunSummary(run, "a")
    summary.update()
    assert summary.row()["state"] == state


DAMAGE = {
    "no recipe": ("recipe.yaml", None, "recipe.yaml: there is no such file; it should be a recipe file"),
    "half a recipe": ("recipe.yaml", b"name: [", "recipe.yaml: line 1: not valid YAML"),
    "no text": ("recipe.yaml", b"\xff\xfe\x00", "recipe.yaml: the file is not UTF-8"),
    "odd numbers": ("validation.jsonl", b'{"step": 1, "compute": 1e999, "pass_rate": 2}\n', "expected a validation"),
    "no steps": ("metrics.jsonl", b"\xff\n", "metrics.jsonl: last line: expected a JSON object"),
    "no end": ("end.json", b"[]\n", "end.json byte 0: expected a JSON object"),
    "torn": ("metrics.jsonl", b'{"step": ', ""),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_a_row_with_one_line(tmp_path, name):
    write_plain_run(tmp_path / "good")
    run = write_plain_run(tmp_path / "bad")
    file, data, said = DAMAGE[name]
    if data is None:
        (run / file).unlink()
    else:
        (run / file).write_bytes(data)
    rows = by_name(fitted(tmp_path).payload())
    assert said in rows["bad"]["problem"] and "\n" not in rows["bad"]["problem"]
    assert bool(rows["bad"]["problem"]) == bool(said)
    assert rows["good"]["problem"] == "" and rows["good"]["fit"] is not None


@pytest.mark.parametrize("file", ["recipe.yaml", "validation.jsonl", "metrics.jsonl", "ledger.jsonl", "end.json"])
def test_a_folder_in_the_place_of_a_file_does_not_stop_the_list(tmp_path, file):
    run = write_plain_run(tmp_path / "bad")
    (run / file).unlink(missing_ok=True)
    (run / file).mkdir()
    assert by_name(fitted(tmp_path).payload())["bad"]["problem"]


def test_a_file_that_is_mended_is_no_problem_any_more(tmp_path):
    run = write_plain_run(tmp_path / "a")
    whole = (run / "validation.jsonl").read_bytes()
    (run / "validation.jsonl").write_bytes(whole + b"garbage\n")
    summary = RunSummary(run, "a")
    assert summary.update() and len(summary.rows) == 7 and summary.row()["problem"]
    assert not summary.update()
    (run / "validation.jsonl").write_bytes(whole)
    assert summary.update() and len(summary.rows) == 7 and summary.row()["problem"] == ""


def test_only_what_changed_is_sent(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.page.runs_data.SEARCH_S", 0.0)
    for name in "ab":
        write_plain_run(tmp_path / name)
    runs = fitted(tmp_path)
    known = runs.payload()["version"]
    assert not runs.update() and runs.payload(known)["runs"] == {} and runs.payload(known)["recipes"] is None
    append(tmp_path / "b" / "metrics.jsonl", step_record(33))
    assert runs.update() and [row["step"] for row in runs.payload(known)["runs"].values()] == [33]
    known = runs.payload()["version"]
    write_plain_run(tmp_path / "c", seed=7)
    runs._search_at = 0.0
    assert runs.update()
    new = runs.payload(known)
    assert list(by_name(new)) == ["c"] and new["order"] == [0, 1, 2] and ["seed", True] in new["recipes"]["keys"]


def test_recipes_differ_in_effect_not_in_what_is_written(tmp_path):
    """A key that one file lacks has the value that was in effect; order and names make no difference."""
    write_plain_run(tmp_path / "a", loss={"name": "cispo"}, seed=1)
    write_plain_run(tmp_path / "b", loss={"name": "dapo"}, seed=1, advantages={"normalize": "batch"})
    recipes = fitted(tmp_path).payload()["recipes"]
    assert recipes["keys"] == [["loss.name", False], ["name", True]]
    assert recipes["values"] == {"0": ["cispo", "a"], "1": ["dapo", "b"]}


def test_hostile_names_are_shown_escaped(tmp_path):
    write_plain_run(tmp_path / "\x1b[2J\u202ea\udcff", name="r")
    write_plain_run(tmp_path / "b", name=HOSTILE[2])
    payload = fitted(tmp_path).payload()
    text = json.dumps(payload, ensure_ascii=False)
    assert "\x1b" not in text and "\u202e" not in text and "\udcff" not in text
    assert "\\x1b[2J\\u202ea\\udcff" in by_name(payload)


def test_first_and_newest_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert end_row(path, -1) is None and end_row(path, 0) is None
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3')
    assert end_row(path, -1) == {"a": 2} and end_row(path, 0) == {"a": 1}
    path.write_text('{"a": 1')
    assert end_row(path, -1) is None and end_row(path, 0) is None
