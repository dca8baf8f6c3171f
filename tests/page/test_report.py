"""The closing report on a synthetic run: gain, ledger, and the forecast compared with points that it did not fit."""

import numpy as np
import pytest
from report_runs import CURVE, printed_report, write_run
from rich.console import Console

from megatron_scalerl.checkpoints.jsonl import read_jsonl, rewrite
from megatron_scalerl.page.report import evaluate, gain, gains_by_task, report, split


def test_a_noiseless_sigmoid_is_forecast(tmp_path):
    write_run(tmp_path)
    rows = read_jsonl(tmp_path / "validation.jsonl")
    fitted, unseen = split(rows, {"fit_from_steps": 0, "fit_until_share": 0.5})
    assert [r["step"] for r in fitted] == list(range(5, 55, 5))
    assert [r["step"] for r in unseen] == list(range(55, 105, 5))
    for method in ("robust", "paper"):
        evaluation = evaluate(rows[0], fitted, unseen, method=method, name="r")
        assert (evaluation.fit.method, evaluation.fit.n_points) == (method, 10)
        assert evaluation.predictions[-1].compute == pytest.approx(0.4)
        np.testing.assert_allclose(evaluation.measured, CURVE[10:])
        assert np.abs(evaluation.errors).max() < 0.02
        assert evaluation.covered.tolist() == [1.0] * 10


def test_rows_without_sizes_are_forecast(tmp_path):
    """Validations of another program: what a point is worth is not known."""
    write_run(tmp_path)
    rows = read_jsonl(tmp_path / "validation.jsonl")
    for row in rows[3:]:
        del row["prompts"], row["generations"]
    evaluation = evaluate(rows[0], rows[1:11], rows[11:], method="robust", name="r")
    assert len(evaluation.predictions) == 10


@pytest.mark.parametrize(
    "section, fitted, unseen",
    [
        ({"fit_from_steps": 20, "fit_until_share": 0.5}, 7, 10),
        ({"fit_from_steps": 45, "fit_until_share": 0.5}, 0, 0),  # two points are too few
        ({"fit_from_steps": 0, "fit_until_share": 1.0}, 20, 0),
    ],
)
def test_the_recipe_selects_the_rows_to_fit(section, fitted, unseen):
    rows = [{"step": 5 * n} for n in range(21)]
    assert [len(part) for part in split(rows, section)] == [fitted, unseen]
    assert split(rows[1:], section) == ([], [])  # no validation before training: no R_0


def test_gain_is_paired(tmp_path):
    write_run(tmp_path)
    found = gain(tmp_path)
    # half of the prompts rise from 0.4 to the last value, the others stand at 0.5
    assert found.last - found.first == pytest.approx((CURVE[-1] - 0.4) / 2)
    assert found.low < found.last - found.first < found.high
    # unpaired, the spread between the two halves would widen it; paired, only which half is drawn matters
    assert found.high - found.low < 0.2 * (CURVE[-1] - 0.4)


@pytest.mark.slow
def test_the_report_prints_gain_ledger_forecast_and_what_came(tmp_path):
    write_run(tmp_path, noise=0.01)
    with (tmp_path / "recipe.yaml").open("a") as recipe:
        recipe.write("steps: 100\n")
    text = printed_report(tmp_path)
    assert "held-out pass rate 0.450 at step 0" in text
    assert "device-hours: 4 in total: trainer 3 (75%), engine 1 (25%)" in text
    assert "robust: error of the forecast: mean" in text and "paper: error of the forecast: mean" in text
    assert (tmp_path / "forecast.png").read_bytes().startswith(b"\x89PNG")
    came = read_jsonl(tmp_path / "validation.jsonl")[-1]["pass_rate"]
    assert f"Forecasts of step 100 after each validation; measured at the end: {came:.3f}" in text
    assert "the forecast of the run's end moved by " in text
    assert f" from the first forecast to the last; measured at the end: {came:.3f}, inside " in text
    assert "of 16 forecast intervals" in text


def rewrite_validations(folder, changed):
    """changed: gives the columns that become others of a row."""
    path = folder / "validation.jsonl"
    rewrite(path, [row | changed(row) for row in read_jsonl(path)])


def test_a_run_that_begins_at_one_has_the_rest_of_its_report(tmp_path):
    write_run(tmp_path)
    rewrite_validations(tmp_path, lambda _: {"pass_rate": 1.0})
    out = printed_report(tmp_path)
    assert "device-hours: 4 in total" in out and out.endswith("No forecast: the pass rate at step 0 is already 1.\n")


@pytest.mark.slow
@pytest.mark.parametrize("start", [0.85, 0.97])
def test_a_run_that_begins_above_the_papers_asymptotes_has_the_rest_of_its_report(tmp_path, start):
    write_run(tmp_path, noise=0.01)
    rewrite_validations(tmp_path, lambda row: {"pass_rate": start + (1 - start) * (row["pass_rate"] - 0.4)})
    out = printed_report(tmp_path)
    assert "device-hours: 4 in total" in out and "robust: error of the forecast: mean" in out
    [line] = [line for line in out.splitlines() if line.startswith("the method paper has no forecast: ")]
    assert f"method paper: R_0 is {start:.3f}; " in line and "(read r: run folder" in line, line
    assert out.rstrip().endswith("forecast.png") and (tmp_path / "forecast.png").is_file()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"validation.jsonl does not exist"):
        report(tmp_path, Console())


@pytest.mark.slow
def test_the_gain_of_each_task_is_over_its_own_prompts(tmp_path):
    write_run(tmp_path)
    last = read_jsonl(tmp_path / "validation.jsonl")[-1]
    tasks = {"prompts/code": 100, "pass_rate/code": 0.4, "prompts/math": 100, "pass_rate/math": 0.5}
    rewrite_validations(tmp_path, lambda _: tasks)
    found = gains_by_task(tmp_path, last | tasks)
    assert (found["math"].first, found["math"].last, found["math"].high) == (0.5, 0.5, 0.0)
    assert found["code"].first == pytest.approx(0.4) and found["code"].last > 0.7
    assert gains_by_task(tmp_path, last) == {}
    out = printed_report(tmp_path)
    assert "\ncode: held-out pass rate 0.400 at step 0" in out and "\nmath: held-out pass rate 0.500" in out
