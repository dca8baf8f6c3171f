"""Console logs as other trainers print them, and several starts in one log: which lines are rows."""

from pathlib import Path

import pytest
from json_lines import lines
from other_tools import RATES, STEPS, write

from megatron_scalerl.fit.inputs import read_curves

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("path", sorted(DATA.glob("consoles/*")), ids=lambda path: path.name)
def test_step_lines_alone_are_read_however_a_console_breaks_them(path):
    """A printed configuration, then verl's lines: one a step, glued, wrapped, between those of other processes."""
    (curve,) = read_curves(path)
    assert curve.pass_rate.tolist() == RATES and curve.initial == 0.1
    assert "10 points of val-core/math_dapo/acc/mean@32 over step (10 to 100 steps), R_0" in curve.read
    assert "further scores: critic/score/mean (--score)" in curve.read


def test_of_a_second_run_in_one_console_log_the_last_is_read():
    (curve,) = read_curves(DATA / "two_runs.log")
    assert curve.compute.tolist() == STEPS[:5] and curve.pass_rate.tolist() == [0.7] * 5
    assert len(curve.notes) == 2 and "5 rows were left out, because a resumed run" in curve.notes[1]


def test_a_log_without_metrics_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"other\.log: .* step:5 - reward:0.1 or "):
        read_curves(write(tmp_path, "other.log", "[06:01] done\n"))


@pytest.mark.parametrize(
    "steps, points",
    [
        ([*range(1, 10), *range(1, 20)], 19),
        ([0, *range(10, 60, 10), *range(10, 90, 10)], 8),
        ([*range(1, 10), *range(6, 20)], 19),
        ([1, 2, *range(1, 20)], 19),
        ([*range(1, 10), 1, 2], 2),
        ([*range(100, 130, 10), *range(20, 100, 10)], 11),
        ([3, 1, 2, 0.5, 6, 5, 4], 7),
    ],
    ids=["again", "no step 0 again", "resumed", "began too short", "begun", "sorted as text", "unsorted"],
)
def test_the_last_of_several_starts_counts(tmp_path, steps, points):
    rows = [{"step": step, "loss": 0.1, "reward": 0.2 + n / 100} for n, step in enumerate(steps)]
    (curve,) = read_curves(write(tmp_path, "a.jsonl", lines(rows)))
    assert len(curve.compute) == points and len(curve.notes) == (1 if points != 2 else 2)
