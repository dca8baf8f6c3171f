"""The noise of points: what a run's records say on it, and what the fit makes of points of different sizes."""

from dataclasses import replace

import numpy as np
import pytest
from json_lines import append
from recipe_runs import curve_of

from megatron_scalerl.fit.forecast import fit, fit_curve
from megatron_scalerl.fit.inputs import curve_of_rows, read_curves
from megatron_scalerl.fit.observations import MOST_POINTS, pooled_points, validation_noise
from megatron_scalerl.fit.sigmoid import sigmoid

COMPUTE = np.linspace(0.1, 1.0, 10)
CURVE = sigmoid(COMPUTE, asymptote=0.8, exponent=1.8, midpoint=0.35, initial=0.4)


def test_share_of_the_noise_by_hand():
    curve = replace(
        curve_of([1.0, 2.0, 3.0], np.array([0.5, 0.5, 0.2]), initial=0.5, prompts=100),
        generations=np.array([2.0, 1.0, 4.0]),
        initial_generations=5,
        within_variance=np.array([0.2, np.nan, 0.08]),
        initial_within_variance=0.24,
    )
    noise = validation_noise(curve)
    # variance between prompts is no noise: 2 x 0.2 + 4 x 0.08 + 5 x 0.24 of 2 x 0.25 + 4 x 0.16 + 5 x 0.25
    assert noise.share == pytest.approx((0.4 + 0.32 + 1.2) / (0.5 + 0.64 + 1.25))
    assert noise.completions.tolist() == [200.0, 100.0, 400.0] and noise.initial_completions == 500.0


def test_share_is_not_known_without_measured_variances():
    curve = curve_of(COMPUTE, CURVE, prompts=200, generations=1)
    assert validation_noise(curve).share is None
    assert validation_noise(replace(curve, prompts=None)) is None
    assert validation_noise(replace(curve, generations=None)) is None


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


def test_measured_noise_narrows_the_forecast():
    known = {"initial": 0.4, "prompts": 100, "generations": 2, "draws": 1000}
    widths = []
    for variance in (0.05, 0.2):
        within = {"within_variance": np.full(10, variance), "initial_within_variance": variance}
        [forecast] = fit(COMPUTE, CURVE, **within, **known).predict([1.2])
        widths.append(forecast.hi - forecast.lo)
    assert widths[0] < 0.75 * widths[1]


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
    append(tmp_path / "validation.jsonl", *rows())
    [folder], memory = read_curves(tmp_path), curve_of_rows(rows(), name="run")
    for curve in (folder, memory):
        assert (curve.initial, curve.initial_generations, curve.initial_within_variance) == (0.4, 5, 0.2)
        assert curve.prompts == 120 and (curve.generations == 1).all() and (curve.completions == 120).all()
        assert curve.within_variance is None and curve.unit == "device_hours"
    first, second = (fit_curve(curve, draws=500) for curve in (folder, memory))
    assert first.parameters == second.parameters and first.intervals == second.intervals


def test_part_of_a_run_keeps_the_columns_together():
    curve = curve_of_rows(rows(), name="run")
    part = curve.part(curve.compute <= 0.5)
    assert len(part.compute) == len(part.pass_rate) == len(part.generations) == len(part.truncated_share) == 5
    assert part.initial == curve.initial and part.within_variance is None


def test_up_to_128_points_are_fitted_as_they_are():
    c, y, weights = np.arange(1.0, 129.0), np.linspace(0.1, 0.9, 128), np.full(128, 40.0)
    assert all(a is b for a, b in zip(pooled_points(c, y, weights), (c, y, weights), strict=True))


@pytest.mark.parametrize("n", [129, 1000, 20000])
@pytest.mark.parametrize("spacing", ["linear", "logarithmic", "one value"])
def test_many_points_are_pooled_without_losing_a_completion(n, spacing):
    c = {"linear": np.linspace(5, 5 * n, n), "logarithmic": np.geomspace(1, 1e5, n), "one value": np.full(n, 7.0)}
    compute, rng = c[spacing], np.random.default_rng(n)
    y, weights = rng.uniform(size=n), rng.integers(1, 5, size=n) * 100.0
    few, means, total = pooled_points(compute, y, weights)
    assert len(few) <= MOST_POINTS and len(few) == len(means) == len(total)
    assert total.sum() == pytest.approx(weights.sum())
    assert means @ total == pytest.approx(y @ weights)
    assert np.log(few) @ total == pytest.approx(np.log(compute) @ weights)
    assert np.all(np.diff(np.log(few)) > -1e-12)
    assert total.max() <= 400.0 * (n / 64 + 1)


def test_a_long_run_costs_no_more_and_is_forecast_as_by_all_of_its_points(monkeypatch):
    c = np.linspace(10, 1000, 300)
    truth = {"asymptote": 0.6, "exponent": 1.0, "midpoint": 400.0, "initial": 0.2}
    y = np.random.default_rng(0).binomial(800, sigmoid(c, **truth)) / 800
    forecasts = []
    for most in (MOST_POINTS, 300):
        monkeypatch.setattr("megatron_scalerl.fit.observations.MOST_POINTS", most)
        found = fit(c, y, initial=0.2, prompts=200, generations=4)
        assert len(found.posterior.observations.pass_rate) <= most and found.n_points == 300
        forecasts.append(found.predict([1000.0, 2000.0, 4000.0]))
    for few, all_points in zip(*forecasts, strict=True):
        assert few.pass_rate == pytest.approx(all_points.pass_rate, abs=0.005)
        assert (few.lo, few.hi) == pytest.approx((all_points.lo, all_points.hi), abs=0.01)
