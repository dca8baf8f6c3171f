"""The noise of points: what a run's records say on it, and what the fit makes of points of different sizes."""

import numpy as np
import pytest

from megatron_scalerl.fit.forecast import fit, fit_curve
from megatron_scalerl.fit.inputs import curve_of_rows, read_curves
from megatron_scalerl.fit.noise import validation_noise
from megatron_scalerl.fit.sigmoid import sigmoid

COMPUTE = np.linspace(0.1, 1.0, 10)
CURVE = sigmoid(COMPUTE, asymptote=0.8, exponent=1.8, midpoint=0.35, initial=0.4)


def test_share_of_the_noise_by_hand():
    noise = validation_noise(
        np.array([0.5, 0.5, 0.2]),
        initial=0.5,
        prompts=100,
        generations=[2, 1, 4],
        initial_generations=5,
        within_variance=[0.2, np.nan, 0.08],
        initial_within_variance=0.24,
    )
    # variance between prompts is no noise: 2 x 0.2 + 4 x 0.08 + 5 x 0.24 of 2 x 0.25 + 4 x 0.16 + 5 x 0.25
    assert noise.share == pytest.approx((0.4 + 0.32 + 1.2) / (0.5 + 0.64 + 1.25))
    assert noise.completions.tolist() == [200.0, 100.0, 400.0] and noise.initial_completions == 500.0


def test_share_is_not_known_without_measured_variances():
    assert validation_noise(CURVE, initial=0.4, prompts=200, generations=1).share is None
    assert validation_noise(CURVE, initial=0.4, prompts=None, generations=4) is None
    assert validation_noise(CURVE, initial=0.4, prompts=200, generations=None) is None


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"prompts": 0, "generations": 4}, "prompts: expected a whole number >= 1, found 0"),
        ({"prompts": 200, "generations": np.array([4.0, 0.0])}, "generations"),
        ({"prompts": 200, "generations": 4, "initial_generations": 0}, "initial_generations"),
    ],
)
def test_sizes_below_one_are_refused(sizes, named):
    with pytest.raises(ValueError, match=named):
        validation_noise(np.array([0.5, 0.6]), initial=0.4, **sizes)


def test_a_large_validation_counts_for_more_than_a_small_one():
    """The same deviating point moves the forecast further where it averages more completions."""
    moved = CURVE.copy()
    moved[-1] += 0.06
    ends = []
    for last in (1, 64):
        generations = np.array([4.0] * 9 + [float(last)])
        result = fit(COMPUTE, moved, initial=0.4, prompts=200, generations=generations, initial_generations=4)
        ends.append(result.predict([2.0])[0].pass_rate)
    plain = fit(COMPUTE, CURVE, initial=0.4, prompts=200, generations=4).predict([2.0])[0].pass_rate
    assert ends[1] - plain > 2 * abs(ends[0] - plain) > 0


def test_a_large_measurement_is_forecast_more_exactly():
    result = fit(COMPUTE, CURVE, initial=0.4, prompts=100, generations=1)
    usual, large = (result.predict([1.2], completions=[n])[0] for n in (100, 10_000))
    assert large.hi - large.lo < 0.75 * (usual.hi - usual.lo)
    assert result.predict([1.2])[0] == usual


def test_the_order_of_points_does_not_matter_to_their_sizes():
    generations, within = np.arange(1.0, 11.0), np.linspace(0.2, 0.1, 10)
    known = {"initial": 0.4, "prompts": 100, "draws": 500}
    forward = fit(COMPUTE, CURVE, generations=generations, within_variance=within, **known)
    backward = fit(COMPUTE[::-1], CURVE[::-1], generations=generations[::-1], within_variance=within[::-1], **known)
    assert forward.parameters == backward.parameters and forward.intervals == backward.intervals


def rows():
    row = {"prompts": 120, "unit": "device_hours", "truncated_share": 0.0}
    start = {**row, "step": 0, "compute": 0.0, "pass_rate": 0.4, "generations": 5, "within_variance": 0.2}
    later = [
        {**row, "step": 4 * n, "compute": float(c), "pass_rate": float(y), "generations": 1, "within_variance": None}
        for n, (c, y) in enumerate(zip(COMPUTE, CURVE), start=1)
    ]
    return [start, *later]


def test_rows_in_memory_are_read_as_those_of_a_run_folder(tmp_path):
    import json

    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    [folder], memory = read_curves(tmp_path), curve_of_rows(rows(), name="run")
    for curve in (folder, memory):
        assert (curve.initial, curve.initial_generations, curve.initial_within_variance) == (0.4, 5, 0.2)
        assert curve.prompts == 120 and (curve.generations == 1).all() and (curve.completions == 120).all()
        assert curve.within_variance is None and curve.unit == "device_hours"
    first, second = (fit_curve(curve, draws=500) for curve in (folder, memory))
    assert first.parameters == second.parameters and first.intervals == second.intervals


def test_a_size_that_is_no_number_is_refused_with_its_row(tmp_path):
    (tmp_path / "a.csv").write_text("compute,pass_rate,prompts,generations\n1,0.5,200,4\n2,0.6,200,four\n")
    with pytest.raises(ValueError, match=r"a.csv: row 3: generations: expected a finite number, found 'four'"):
        read_curves(tmp_path / "a.csv")


def test_part_of_a_run_keeps_the_columns_together():
    curve = curve_of_rows(rows(), name="run")
    part = curve.part(curve.compute <= 0.5)
    assert len(part.compute) == len(part.pass_rate) == len(part.generations) == len(part.truncated_share) == 5
    assert part.initial == curve.initial and part.within_variance is None
