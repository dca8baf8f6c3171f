"""Decision and backtest."""

import numpy as np
import pytest
from published import published_run
from recipe_runs import curve_of

from megatron_scalerl.fit.backtest import Backtest, BacktestPoint, backtest
from megatron_scalerl.fit.decide import decide
from megatron_scalerl.fit.forecast import fit
from megatron_scalerl.fit.result import Prediction
from megatron_scalerl.fit.sigmoid import sigmoid


def run(*, asymptote=0.62, exponent=2.0, midpoint=0.3, n=24, name="run", noise=0.001, seed=0):
    compute = np.linspace(1 / n, 1.0, n)
    curve = sigmoid(compute, asymptote=asymptote, exponent=exponent, midpoint=midpoint, initial=0.4)
    measured = curve + np.random.default_rng(seed).normal(0, noise, n)

    def again(fixed=None):
        return fit(compute, measured, initial=0.4, prompts=4000, generations=16, name=name, fixed_asymptote=fixed)

    return again


@pytest.mark.parametrize(
    "n, shape, verdict",
    [
        (6, {"midpoint": 0.8, "asymptote": 0.8}, "go on"),
        (6, {"midpoint": 0.05}, "stop"),
        (3, {"midpoint": 0.2}, "too early to say"),
        (8, {"midpoint": 0.05}, "stop"),
    ],
)
def test_few_points_are_decided_by_the_probability_and_counted(n, shape, verdict):
    decision = decide(run(n=n, **shape)())
    assert decision.verdict == verdict
    assert (f"only {n} points were measured" in decision.reason) == (n < 8)
    assert verdict != "go on" or decision.probability >= 0.8
    assert verdict != "stop" or decision.probability <= 0.2


def test_a_gain_ends_where_everything_is_right():
    """The last third still rises, to 0.985: no forecast of a gain is above what is left."""
    compute = np.arange(1.0, 31.0)
    measured = 0.4 + 0.585 / (1.0 + (5.0 / compute) ** 2)
    measured[-10:] = np.linspace(0.955, 0.985, 10)
    gain = decide(fit(compute, measured, initial=0.4, prompts=200, generations=4)).gain
    assert 0.01 < gain.value <= gain.hi < 0.02


def test_a_falling_run_is_stopped():
    series = published_run("DeepSeek-GRPO")
    result = fit(series.compute, series.pass_rate, initial=series.initial, prompts=1000, generations=16)
    decision = decide(result)
    assert decision.verdict == "stop" and "instability" in decision.reason


def test_a_fall_stops_a_run_once_it_has_lasted_a_third_of_it():
    """From 0.6 at 20 to 0.5: up to 27 a dip, since dips, as of a curriculum, recover."""
    compute = np.arange(1.0, 41.0)
    measured = np.where(compute <= 20, 0.4 + 0.2 * np.minimum(compute / 18, 1.0), 0.5)
    verdicts = {}
    for last in (26, 40):
        decision = decide(fit(compute[:last], measured[:last], initial=0.4, prompts=500, generations=4))
        assert "the pass rate has fallen from" in decision.reason
        verdicts[last] = decision.verdict
    assert verdicts == {26: "too early to say", 40: "stop"}


def test_gain_and_target_against_the_true_curve():
    truth = {"asymptote": 0.62, "exponent": 2.0, "midpoint": 0.3, "initial": 0.4}
    decision = decide(run(noise=0.0005)(), budget=1.0, target=0.61, worth=0.005)
    true_gain = float(sigmoid(2.0, **truth) - sigmoid(1.0, **truth))
    assert decision.gain.lo <= true_gain <= decision.gain.hi
    # (0.61 - 0.4) / (0.62 - 0.61) = 21 = (C / 0.3)^2
    assert decision.compute_to_target.lo <= 0.3 * 21**0.5 <= decision.compute_to_target.hi
    # 0.95 * 0.62 = 0.589: (0.189 / 0.031)^(1/2) * 0.3
    assert decision.compute_to_95_percent_of_asymptote.value == pytest.approx(0.3 * (0.189 / 0.031) ** 0.5, rel=0.08)
    assert decide(run()(), target=0.9).compute_to_target.value == np.inf


def test_the_budget_has_to_be_positive():
    with pytest.raises(ValueError, match=r"^budget is 0.0;"):
        decide(run()(), budget=0.0)


def width(point):
    return point.forecast.hi - point.forecast.lo


@pytest.mark.slow
def test_backtest_settles_and_narrows():
    series = published_run("fig2_recipes/ScaleRL")
    curve = curve_of(series.compute, series.pass_rate, initial=series.initial)
    test = backtest(curve, draws=500)
    assert [p.n_points for p in test.points] == list(range(4, 31))  # of 33 points
    assert [p.compute for p in test.points] == series.compute[3:30].tolist()
    assert (test.final_compute, test.final_pass_rate) == (series.compute[-3:].mean(), series.pass_rate[-3:].mean())
    assert test.settled_from is not None and test.settled_from <= 8000
    assert width(test.points[0]) > 2 * width(test.points[-1])


@pytest.mark.slow
def test_a_prefix_is_fitted_alone():
    """Later points, those forecast included, do not reach it; each forecast is that of a fit of the prefix."""
    series = published_run("fig2_recipes/ScaleRL")
    test = backtest(curve_of(series.compute[:11], series.pass_rate[:11]), draws=200)
    for end in (5, 7):
        altered = series.pass_rate[:11].copy()
        altered[end:] = 0.1
        again = backtest(curve_of(series.compute[:11], altered), draws=200)
        assert [p.n_points for p in test.points] == [4, 5, 6, 7, 8]
        assert [a == b for a, b in zip(test.points, again.points)] == [n <= end for n in (4, 5, 6, 7, 8)]
    point = test.points[2]
    prefix = fit(series.compute[:6], series.pass_rate[:6], initial=0.4, prompts=1000, generations=16, draws=200)
    assert [point.forecast] == prefix.predict([series.compute[8:11].mean()], completions=[3 * 16_000])


def test_backtest_counts_points_in_the_window_only():
    compute, measured = np.arange(1.0, 13.0), np.linspace(0.42, 0.5, 12)
    test = backtest(curve_of(compute, measured), fit_from=4.0, draws=100)
    assert [(p.compute, p.n_points) for p in test.points] == [(7.0, 4), (8.0, 5), (9.0, 6)]
    with pytest.raises(ValueError, match=r"^run: 6 points .* 7$"):
        backtest(curve_of(compute, measured), fit_from=7.0)


def test_settled_from_is_the_start_of_the_last_run_of_right_forecasts():
    def forecast(value):
        return Prediction(compute=9.0, pass_rate=value, lo=0, hi=1)

    def settled(*forecasts):
        points = [
            BacktestPoint(compute=float(n), n_points=n, forecast=forecast(value), asymptote=1)
            for n, value in enumerate(forecasts, start=1)
        ]
        return Backtest(name="run", final_compute=9.0, final_pass_rate=0.60, points=tuple(points)).settled_from

    assert settled(0.50, 0.60, 0.56, 0.61) == 4.0
    assert settled(0.50, 0.60, 0.59, 0.61) == 2.0
    assert settled(0.60, 0.50) is None


def test_one_bad_last_point_hardly_moves_what_a_backtest_forecasts():
    compute = np.linspace(1.0, 12.0, 12)
    rates = np.r_[np.full(11, 0.5), 0.41]
    test = backtest(curve_of(compute, rates), draws=100)
    assert (test.final_compute, test.final_pass_rate) == (11.0, pytest.approx(0.47))
