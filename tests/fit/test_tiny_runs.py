"""The shipped tiny runs: the split is a rule of the table, and every file is complete and consistent."""

import csv
import json
from collections import Counter

import numpy as np
import pytest

from megatron_scalerl.fit.tiny_runs import DATA, tiny_runs


def table():
    with open(DATA / "table.csv", encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_regime_has_learning_and_held_back_runs():
    rows = table()
    assert len(rows) >= 24 and len(rows) % 3 == 0
    blocks = [rows[i : i + 3] for i in range(0, len(rows), 3)]
    assert all(len({row["regime"] for row in block}) == 1 for block in blocks)
    assert len({row["name"] for row in rows}) == len({row["seed"] for row in rows}) == len(rows)


def test_the_third_of_each_block_is_held_back(tmp_path):
    names = ["a", "b", "c", "d", "e", "f"]
    write_runs(tmp_path, names)
    assert [run.name for run in tiny_runs(held_back=True, data=tmp_path)] == ["c", "f"]
    assert [run.name for run in tiny_runs(held_back=False, data=tmp_path)] == ["a", "b", "d", "e"]
    (tmp_path / "b.json").unlink()
    assert [run.name for run in tiny_runs(data=tmp_path)] == ["a", "c", "d", "e", "f"], "it changes no side"
    assert [run.name for run in tiny_runs(held_back=True, data=tmp_path)] == ["c", "f"]


def test_outcomes_unfold_prompt_after_prompt(tmp_path):
    write_runs(tmp_path, ["a"])
    [run] = tiny_runs(data=tmp_path)
    assert run.correct(0).tolist() == [[False, False], [True, True], [False, True]]
    assert run.correct(1).tolist() == [[True], [False], [True]]
    assert run.correct(2) is None
    assert np.isnan(run.within_variance[1]) and np.isnan(run.training["trained_tokens"][1])


@pytest.mark.parametrize("broken", ["prompts", "training", "unequal", "not from 0"])
def test_a_broken_file_is_refused_in_one_line(tmp_path, broken):
    write_runs(tmp_path, ["a"])
    found = json.loads((tmp_path / "a.json").read_text())
    if broken == "unequal":
        found["validations"]["pass_rate"].pop()
    elif broken == "not from 0":
        found["validations"]["step"][0] = 1
    else:
        del found[broken]
    (tmp_path / "a.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"a\.json: expected .*, found") as refused:
        tiny_runs(data=tmp_path)
    assert "\n" not in str(refused.value)


def test_shipped_runs_are_whole():
    for run in tiny_runs():
        assert run.step[0] == 0 and run.compute[0] == 0.0
        assert (np.diff(run.step) > 0).all() and (np.diff(run.compute) > 0).all(), run.name
        counted = [run.correct(i) for i in range(len(run.step))]
        known = [i for i, found in enumerate(counted) if found is not None]
        assert len(known) >= 0.9 * len(counted)
        assert np.allclose([counted[i].mean() for i in known], run.pass_rate[known], atol=1e-5), run.name
        assert run.overrides["seed"] == run.row["seed"] and run.overrides["optimizer.lr"] == run.row["lr"]
    assert not Counter(run.name for run in tiny_runs(held_back=True)) & Counter(
        run.name for run in tiny_runs(held_back=False)
    )


def write_runs(folder, names):
    (folder / "table.csv").write_text("name,regime\n" + "".join(f"{name},x\n" for name in names))
    for name in names:
        found = {
            "name": name,
            "overrides": {},
            "ended": "all 6 steps are made",
            "prompts": 3,
            "validations": {
                "step": [0, 3, 6],
                "compute": [0, 1.5, 3.0],
                "device_hours": [0, 0.1, 0.2],
                "pass_rate": [0.5, 2 / 3, 1.0],
                "within_variance": [1 / 6, None, 0.0],
                "truncated_share": [0, 0, 0],
                "generations": [2, 1, 2],
                "outcomes": ["0d", "5", None],
            },
            "training": {"step": [1, 1], "trained_tokens": [100, None]},
        }
        (folder / f"{name}.json").write_text(json.dumps(found))
