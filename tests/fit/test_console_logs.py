"""Console logs as other trainers print them, and several runs in one log: which lines are rows, and what is said."""

import json
from pathlib import Path

import pytest
from other_tools import RATES, STEPS, write

from megatron_scalerl.fit.inputs import ColumnOptions, read_curves

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("path", sorted(DATA.glob("consoles/*")), ids=lambda path: path.name)
def test_step_lines_alone_are_read_however_a_console_breaks_them(path):
    """A printed configuration, then verl's lines: one a step, glued, wrapped, between those of other processes."""
    (curve,) = read_curves(path)
    assert curve.pass_rate.tolist() == RATES and curve.initial == 0.1
    assert "10 points of val-core/math_dapo/acc/mean@32 over step (10 to 100 steps), R_0" in curve.read
    assert "also there: critic/score/mean (--score)" in curve.read


def test_a_second_run_in_one_console_log():
    one, two = read_curves(DATA / "two_runs.log")
    assert (one.name, one.initial, one.compute.tolist()) == ("two_runs#1", 0.1, STEPS)
    assert (two.name, two.initial, two.compute.tolist()) == ("two_runs#2", None, STEPS[:5])
    assert two.pass_rate.tolist() == [0.7] * 5


def test_a_log_without_metrics_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"other\.log: .* step:5 - reward:0.1 or "):
        read_curves(write(tmp_path, "other.log", "[06:01] done\n"))


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_runs_that_were_logged_one_after_another_are_several_runs(tmp_path):
    rows = [{"step": 10 * n, "reward": at + n / 50} for at in (0.2, 0.5) for n in range(10)]
    path = write(tmp_path, "a.jsonl", lines(rows))
    one, two = read_curves(path)
    assert (one.name, one.initial, two.name, two.initial) == ("a#1", 0.2, "a#2", 0.5)
    assert one.compute.tolist() == two.compute.tolist() == list(range(10, 100, 10))
    assert len(one.notes) == 1 and "--series run=a#1 " in one.notes[0]
    (chosen,) = read_curves(path, ColumnOptions(series=(("run", "a#2"),)))
    assert (chosen.name, chosen.initial) == ("a#2", 0.5)
    with pytest.raises(ValueError, match=r"a.jsonl: .*'b'.* a#1, a#2"):
        read_curves(path, ColumnOptions(series=(("run", "b"),)))


@pytest.mark.parametrize(
    ("steps", "runs"),
    [
        ([*range(1, 10), *range(1, 20)], [9, 19]),
        ([0, *range(10, 60, 10), *range(10, 90, 10)], [5, 8]),
        ([*range(10, 60, 10), *range(5, 45, 5), *range(5, 25, 5)], [5, 8, 4]),
        ([*range(1, 10), *range(6, 20)], [19]),
        ([1, 2, *range(1, 20)], [19]),
        ([*range(1, 10), 1, 2], [2]),
        ([*range(100, 130, 10), *range(20, 100, 10)], [11]),
        ([3, 1, 2, 0.5, 6, 5, 4], [7]),
    ],
    ids=["again", "no step 0 again", "three", "resumed", "began too short", "begun", "sorted as text", "unsorted"],
)
def test_a_second_run_begins_at_the_start_and_a_resume_does_not(tmp_path, steps, runs):
    rows = [{"step": step, "loss": 0.1, "reward": 0.2 + n / 100} for n, step in enumerate(steps)]
    curves = read_curves(write(tmp_path, "a.jsonl", lines(rows)))
    assert [len(curve.compute) for curve in curves] == runs
    assert [curve.name for curve in curves] == (["a"] if len(runs) == 1 else [f"a#{n + 1}" for n in range(len(runs))])


def test_text_on_the_axis_of_a_second_run_is_refused_with_its_row(tmp_path):
    rows = [{"step": step, "loss": 0.1, "reward": 0.5} for step in (1, 2, 3, 4, "x", 1, 2, 3)]
    with pytest.raises(ValueError, match=r"row 5: step: 'x'"):
        read_curves(write(tmp_path, "a.jsonl", lines(rows)))


def test_single_answers_and_kinds_of_rows_are_no_runs(tmp_path):
    answers = [{"step": 10 * n, "correct": i < n} for i in range(20) for n in range(1, 11)]
    (curve,) = read_curves(write(tmp_path, "answers.jsonl", lines(answers)))
    assert curve.pass_rate == pytest.approx([n / 20 for n in range(1, 11)])
    rows = [{"step": s, "type": kind, "acc": r} for kind in ("train", "eval") for s, r in zip(STEPS, RATES)]
    (curve,) = read_curves(write(tmp_path, "kinds.jsonl", lines(rows)))
    assert curve.name == "kinds" and curve.notes == ()
