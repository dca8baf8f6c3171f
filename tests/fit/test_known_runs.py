"""The recorded tiny runs: the split is a rule of the table, and every file is complete and consistent."""

import csv
import json

import numpy as np
import pytest
from known_runs import tiny_runs
from published import CURVES

TINY = CURVES / "tiny"


def table():
    with open(TINY / "table.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_every_regime_has_learning_and_held_back_runs():
    rows = table()
    assert len(rows) >= 24 and len(rows) % 3 == 0
    blocks = [rows[i : i + 3] for i in range(0, len(rows), 3)]
    assert all(len({row["regime"] for row in block}) == 1 for block in blocks)
    assert len({row["name"] for row in rows}) == len({row["seed"] for row in rows}) == len(rows)


def test_the_third_of_each_block_is_held_back(tmp_path):
    names = [row["name"] for row in table()]
    assert [run.run for run in tiny_runs(TINY, held_back=True)] == [n for n in names[2::3] if made(n)]
    learned = [name for number, name in enumerate(names) if number % 3 < 2 and made(name)]
    assert [run.run for run in tiny_runs(TINY, held_back=False)] == learned
    for path in TINY.iterdir():
        if path.stem != names[1]:
            (tmp_path / path.name).symlink_to(path)
    assert [run.run for run in tiny_runs(tmp_path, held_back=True)] == [n for n in names[2::3] if made(n)]


def made(name):
    return (TINY / f"{name}.json").exists()


@pytest.mark.parametrize("row", [row for row in table() if made(row["name"])], ids=lambda row: row["name"])
def test_a_recorded_run_is_whole(row):
    """Its outcomes, a bit of each completion in hexadecimal digits, give its pass rates."""
    run = json.loads((TINY / f"{row['name']}.json").read_text())
    points = run["validations"]
    assert len({len(column) for column in points.values()}) == 1
    assert points["step"][0] == points["compute"][0] == 0
    assert (np.diff(points["step"]) > 0).all() and (np.diff(points["compute"]) > 0).all()
    counted = [digits and int(digits, 16).bit_count() for digits in points["outcomes"]]
    sizes = run["prompts"] * np.array(points["generations"])
    kept = [n for n, correct in enumerate(counted) if correct is not None]
    assert len(kept) >= 0.9 * len(counted)
    rates = [counted[n] / sizes[n] for n in kept]
    assert np.allclose(rates, np.array(points["pass_rate"])[kept], atol=1e-5)
    assert (run["name"], run["overrides"]["seed"], run["overrides"]["optimizer.lr"]) == (
        row["name"],
        row["seed"],
        row["lr"],
    )
