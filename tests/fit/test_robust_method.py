"""The robust fit: invariances, recovery, uncertainty."""

from dataclasses import replace

import numpy as np
import pytest
from published import published_run, published_series
from recipe_runs import curve_of
from refusals import refused
from remembered_fits import MADE

from megatron_scalerl.fit.checks import falling_tail
from megatron_scalerl.fit.forecast import fit
from megatron_scalerl.fit.observations import observe
from megatron_scalerl.fit.posterior import sample
from megatron_scalerl.fit.prior import DEFAULT_PRIOR
from megatron_scalerl.fit.sigmoid import sigmoid


def synthetic(n=24, *, asymptote=0.62, midpoint=0.3, size=16000, seed=0):
    """(compute, measured pass rate) of a run with binomial noise; compute ends at 1."""
    compute = np.linspace(1 / n, 1.0, n)
    truth = sigmoid(compute, asymptote=asymptote, exponent=1.8, midpoint=midpoint, initial=0.4)
    return compute, np.random.default_rng(seed).binomial(size, truth) / size


def test_the_unit_of_compute_changes_only_the_midpoint():
    compute, measured = synthetic()
    hours = fit(compute * 0.3, measured, initial=0.4, prompts=1000, generations=16)
    large = fit(compute * 1e5, measured, initial=0.4, prompts=1000, generations=16)
    assert large.asymptote == pytest.approx(hours.asymptote, abs=1e-9)
    assert large.exponent == pytest.approx(hours.exponent, rel=1e-9)
    assert large.midpoint / 1e5 == pytest.approx(hours.midpoint / 0.3, rel=1e-9)
    near, far = hours.predict([0.6])[0], large.predict([2e5])[0]
    assert (near.pass_rate, near.lo, near.hi) == pytest.approx((far.pass_rate, far.lo, far.hi), abs=1e-9)


def test_same_seed_same_draws_other_seed_nearly_the_same():
    compute, measured = synthetic(n=12)
    one, other = (fit(compute, measured, initial=0.4, seed=seed) for seed in (5, 6))
    MADE.clear()
    again = fit(compute, measured, initial=0.4, seed=5)
    assert one.intervals == again.intervals and one.predict([2.0]) == again.predict([2.0])
    assert one.intervals != other.intervals
    assert other.asymptote == pytest.approx(one.asymptote, abs=0.004)


def test_many_exact_points_determine_the_parameters():
    compute = np.linspace(0.02, 1.0, 60)
    curve = sigmoid(compute, asymptote=0.62, exponent=1.8, midpoint=0.12, initial=0.4)
    result = fit(compute, curve, initial=0.4, prompts=10**6, generations=100)
    assert result.asymptote == pytest.approx(0.62, abs=2e-3)
    assert result.exponent == pytest.approx(1.8, abs=0.03)
    assert result.midpoint == pytest.approx(0.12, abs=2e-3)
    lo, hi = result.intervals["asymptote"]
    assert lo < 0.62 < hi and hi - lo < 0.01


def test_one_outlier_hardly_moves_the_forecast():
    compute, measured = synthetic()
    outlying = measured.copy()
    outlying[15] -= 0.10
    before, after = (fit(compute, y, initial=0.4, prompts=1000, generations=16) for y in (measured, outlying))
    moved = abs(before.predict([2.0])[0].pass_rate - after.predict([2.0])[0].pass_rate)
    assert moved < 0.01


def test_missing_r0_is_averaged_over_with_a_warning():
    compute, measured = synthetic()
    unknown = fit(compute, measured, initial=None, prompts=1000, generations=16)
    known = fit(compute, measured, initial=0.4, prompts=1000, generations=16)
    assert any("R_0 is missing" in warning for warning in unknown.warnings)
    assert unknown.asymptote == pytest.approx(known.asymptote, abs=0.04)
    with_start = fit([0.0, *compute], [0.4, *measured], initial=None)
    assert with_start.initial == 0.4 and with_start.n_points == len(compute)
    assert not any("R_0 is missing" in warning for warning in with_start.warnings)


@pytest.mark.parametrize("series", [s for s in published_series() if not s.fitted.all()], ids=lambda s: s.name)
def test_fitted_until_4k_the_interval_of_the_ceiling_contains_the_final_one(series):
    early = series.compute <= 4000
    if np.count_nonzero(early) < 3:
        early = series.compute <= 8000
    result = fit(series.compute[early], series.pass_rate[early], initial=series.initial, prompts=1000, generations=16)
    lo, hi = result.intervals["asymptote"]
    assert lo - 0.02 <= series.asymptote <= hi + 0.02


def test_an_early_stop_is_wider_than_a_late_one():
    run = published_run("fig2_recipes/ScaleRL")
    widths = []
    for until in (4000, 8000, 16000):
        result = fit(run.compute, run.pass_rate, initial=run.initial, fit_until=until, prompts=1000, generations=16)
        lo, hi = result.intervals["asymptote"]
        widths.append(hi - lo)
    assert widths[0] > 3 * widths[1] > 3 * widths[2]


def test_few_points_and_no_curvature_are_warnings():
    compute, measured = synthetic(n=5, midpoint=4.0, asymptote=0.9)
    result = fit(compute, measured, initial=0.4, prompts=1000, generations=16)
    assert any("only 5 points" in warning for warning in result.warnings)
    assert any("no curvature yet" in warning for warning in result.warnings)
    lo, hi = result.intervals["asymptote"]
    assert hi - lo > 0.15


def test_a_falling_tail_is_found_where_it_starts():
    run = published_run("DeepSeek-GRPO")
    result = fit(run.compute, run.pass_rate, initial=run.initial, prompts=1000, generations=16)
    (warning,) = [w for w in result.warnings if w.startswith("falling tail")]
    assert "5.22k" in warning
    compute, measured = synthetic(midpoint=0.1)
    assert not any("falling" in w for w in fit(compute, measured, initial=0.4).warnings)


def test_a_long_noisy_rising_run_does_not_fall():
    compute = np.arange(1.0, 801.0)
    rng = np.random.default_rng(0)
    measured = 0.4 + 0.2 * compute / (compute + 200) + rng.normal(0, 0.01, 800)
    assert falling_tail(compute, measured) is None
    assert falling_tail(compute, np.where(compute > 700, measured - 0.03, measured)) is not None


@pytest.mark.parametrize(
    "level, method", [(0.0, "robust"), (0.3, "robust"), (1.0, "robust"), (0.0, "paper"), (0.3, "paper")]
)
def test_degenerate_runs_are_fitted_without_numerical_errors(level, method):
    with np.errstate(all="raise", under="ignore"):
        flat = np.full(10, level)
        result = fit(np.arange(1.0, 11.0), flat, initial=None, method=method, prompts=200, generations=4)
    assert np.isfinite([result.asymptote, result.exponent, result.midpoint]).all()
    assert result.warnings


def test_an_unknown_r0_near_the_papers_highest_ceiling_is_fitted():
    measured = np.random.default_rng(3).binomial(8, 0.78, 20) / 8
    measured[:3] = 0.75
    result = fit(np.arange(1.0, 21.0), measured, initial=None, method="paper")
    assert np.all(result.posterior.initial < 0.8) and result.asymptote <= 0.8


def test_points_below_r0_are_a_warning():
    result = fit(np.arange(1.0, 11.0), np.full(10, 0.3), initial=0.4)
    assert any("below R_0" in warning for warning in result.warnings)


def test_truncations_above_ten_percent_are_a_warning():
    compute, measured = synthetic(n=10)
    shares = np.linspace(0.0, 0.18, 10)
    result = fit(compute, measured, initial=0.4, truncated_share=shares)
    (warning,) = [w for w in result.warnings if "truncated" in w]
    assert "18 %" in warning and "first at 0.7" in warning
    half = fit(compute, measured, initial=0.4, truncated_share=shares / 2)
    assert not any("truncated" in w for w in half.warnings)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pass_rate": [0.5, 0.6, 1.2]}, r"^pass_rate is 1.2 at point 3;"),
        ({"compute": [1.0, -2.0, 3.0]}, "^compute is -2.0 at point 2;"),
        ({"method": "magic"}, "^method is 'magic'; .*robust"),
        ({"fit_from": 2.5}, "1 points .* in the window; .* 3$"),
        ({"fixed_asymptote": 0.3}, r"^fixed asymptote: 0.3 is"),
        ({"pass_rate": [0.9, 0.9, 0.9], "initial": 0.9, "method": "paper"}, "^method paper: R_0 is 0.900"),
        ({"prompts": 0, "generations": 4}, r"^prompts is 0.0; .*\[1, 1e\+09\]"),
        ({"within_variance": [0.1, 9, -1]}, r"^within_variance is 9.0 at point 2; .*\[0, 0.5\]"),
        ({"initial": None, "fixed_asymptote": 0.3}, "fixed asymptote: 0.3 is not above R_0"),
    ],
)
def test_invalid_input_is_one_line(change, message):
    arguments = {"compute": [1.0, 2.0, 3.0], "pass_rate": [0.5, 0.55, 0.58], "initial": 0.4, **change}
    with refused(message):
        fit(**arguments)


SIZES = {"prompts": 200, "generations": 4}


def rising(asymptote, midpoint, *, n=12, seed=0):
    return synthetic(n, asymptote=asymptote, midpoint=midpoint, size=800, seed=seed)


@pytest.mark.slow
def test_the_points_decide_between_the_kinds_of_runs():
    """A run past its midpoint ends where its own points say, close to 1 or far below it."""
    for asymptote in (0.58, 0.95):
        found = [fit(*rising(asymptote, 0.25, seed=s), initial=0.4, **SIZES).predict([4.0])[0] for s in range(6)]
        truth = sigmoid([4.0], asymptote=asymptote, exponent=1.8, midpoint=0.25, initial=0.4)[0]
        assert np.mean([p.pass_rate for p in found]) == pytest.approx(truth, abs=0.025)
        assert sum(p.lo <= truth <= p.hi for p in found) >= 5


def test_before_the_midpoint_the_interval_holds_both_ends():
    """Points that a ceiling of 0.6 and one of 0.95 explain alike: neither is left out."""
    compute, measured = rising(0.95, 2.5, n=10)
    [forecast] = fit(compute, measured, initial=0.4, **SIZES).predict([4.0])
    assert forecast.lo < 0.58 and forecast.hi > 0.70


def test_the_record_of_the_run_widens_its_next_interval():
    compute, measured = rising(0.6, 0.25, n=20)
    jumps = measured + 0.06 * np.sin(3.0 * np.log(compute))
    widths = [p.hi - p.lo for y in (measured, jumps) for p in fit(compute, y, initial=0.4, **SIZES).predict([1.5])]
    assert widths[1] > 1.3 * widths[0]


def test_after_a_collapse_the_run_may_go_anywhere():
    compute, measured = rising(0.8, 0.2, n=12)
    measured[-3:] = (0.5, 0.3, 0.2)
    [forecast] = fit(compute, measured, initial=0.4, **SIZES).predict([1.5])
    assert forecast.lo < 0.05 and forecast.hi > 0.35 and forecast.pass_rate < 0.3


def test_a_dead_run_does_not_return_to_its_sigmoid():
    """From step 30 on nothing is right: at ten times the compute nothing is expected to be."""
    compute = np.arange(10.0, 270.0, 10.0)
    measured = np.where(compute < 30.0, 0.016, 0.0)
    for forecast in fit(compute, measured, initial=0.505).predict([270.0, 520.0, 2600.0]):
        assert forecast.pass_rate < 0.01 and forecast.hi < 0.15


def test_a_run_past_its_peak_is_forecast_to_go_on_falling():
    """0.90 at half of the run, and 0.03 lower for every doubling of compute from there on."""
    compute = np.linspace(1.0, 30.0, 30)
    plateau = 0.9 - 0.5 / (1.0 + (compute / 4.0) ** 2.0)
    fall = np.where(compute > 20.0, 0.05 * np.log2(compute / 20.0), 0.0)
    noise = np.random.default_rng(3).normal(0.0, 0.003, 30)
    flat, falling = (fit(compute, y + noise, initial=0.4).predict([45.0])[0] for y in (plateau, plateau - fall))
    assert falling.lo < 0.842 < falling.hi
    assert flat.lo < 0.895 < flat.hi and falling.pass_rate < flat.pass_rate - 0.03


def test_a_batch_that_is_wrong_by_chance_has_the_noise_of_its_neighbors():
    """Eight completions a point: 0 of 8 is no more exact than 4 of 8."""
    measured = np.random.default_rng(1).binomial(8, 0.25, 40) / 8
    assert np.any(measured == 0.0)
    result = fit(np.arange(1.0, 41.0), measured, initial=None)
    [forecast] = result.predict([60.0])
    assert forecast.pass_rate == pytest.approx(0.25, abs=0.06) and forecast.lo <= 0.0 and forecast.hi > 0.45


def test_the_size_of_a_validation_does_not_widen_a_quiet_run():
    """The same few prompts, decoded greedily, differ less from step to step than independent samples."""
    compute = np.arange(1.0, 16.0)
    quiet = 0.53 + 0.01 * compute / (compute + 4.0) + np.random.default_rng(0).normal(0.0, 0.002, 15)
    [forecast] = fit(compute, quiet, initial=None, prompts=500, generations=1).predict([22.0])
    binomial = 2 * 1.645 * np.sqrt(0.25 / 500)
    assert forecast.hi - forecast.lo < 0.4 * binomial


def test_a_run_without_gain_is_forecast_to_stay():
    rng = np.random.default_rng(4)
    measured = rng.binomial(800, 0.4, 12) / 800
    [forecast] = fit(np.linspace(0.1, 1.2, 12), measured, initial=0.4, **SIZES).predict([2.4])
    assert forecast.pass_rate == pytest.approx(0.4, abs=0.025) and forecast.lo < 0.4 < forecast.hi


def test_points_that_say_nothing_leave_the_values_of_r0_as_likely_as_they_were():
    points = curve_of([0.998, 0.999, 1.0], np.full(3, 0.5), initial=None, prompts=2, generations=1)
    told = observe(points, DEFAULT_PRIOR)
    told = replace(told, initials=(0.2, 0.8), initial_weights=(0.5, 0.5), noise_variance=1e6, noise_shape=1e6)
    posterior = sample(told, prior=replace(DEFAULT_PRIOR, discrepancies=DEFAULT_PRIOR.discrepancies[:1]), seed=1)
    assert np.mean(posterior.initial == 0.2) == pytest.approx(0.5, abs=0.03)


def test_a_measured_r0_is_not_exact():
    """Of 20 completions it is uncertain; of many it is what was measured."""
    compute, measured = rising(0.6, 0.01)  # no point is near R_0
    few, many = (
        fit(compute, measured, initial=0.4, initial_generations=n, prompts=20, generations=40) for n in (1, 999)
    )
    assert np.std(few.posterior.initial) > 0.05 and np.std(many.posterior.initial) < 0.01


def test_a_fixed_asymptote_is_above_every_r0():
    known = {"initial": 0.4, "prompts": 30, "generations": 1, "fixed_asymptote": 0.405}
    draws = fit([1.0, 2.0, 3.0, 4.0], [0.41, 0.4, 0.42, 0.4], **known).posterior
    assert np.all(draws.initial < 0.405)


def test_an_unknown_r0_near_zero_is_the_mean_of_its_draws():
    compute = np.linspace(1.0, 7.0, 7)
    found = fit(compute, np.linspace(0.01, 0.07, 7), initial=None)
    assert found.initial == np.median(found.posterior.initial) and not found.posterior.observations.initial_given


@pytest.mark.parametrize(
    "compute, completions, message",
    [
        ([2.0, 3.0], [800, np.nan], "nan at point 2"),
        ([2.0], [800, 80, 8], r"\(3,\)"),
    ],
)
def test_sizes_of_new_measurements_are_checked(compute, completions, message):
    found = fit(*rising(0.6, 0.25), initial=0.4, draws=200, **SIZES)
    with refused("^predict: completions: .*" + message):
        found.predict(compute, completions=completions)


def test_what_a_forecast_is_compared_with_is_checked():
    found = fit(*rising(0.6, 0.25), initial=0.4, draws=200)
    with refused("^predict: completions require a fit with prompts"):
        found.predict([2.0], completions=[800])
    with refused(r"^evaluate: 1 pass rates .* 2 computes"):
        found.evaluate([2.0, 3.0], [0.7])
