"""How well each method forecasts the published curves: fitted to the authors' fitted part, evaluated on the rest.

The same run appears in several figures, so cross-validation leaves out by physical run (data/runs.csv). For each
left-out run the prior of the robust fit, its settings included, is learned again from the other runs (`learning`):
neither the points nor the legend of a run inform the prior that forecasts it. The results with every other setting,
and with other values of the constants that are not learned (`varied`), are printed as well.

    python -m megatron_scalerl.fit.study.benchmark
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_scalerl.fit.forecast import fit
from megatron_scalerl.fit.forms import fit_least_squares_sigmoid, fit_log_linear, fit_power_law
from megatron_scalerl.fit.paper import FIT_FROM
from megatron_scalerl.fit.prior import DEFAULT_PRIOR, Discrepancy, Prior
from megatron_scalerl.fit.published import GENERATIONS, PROMPTS, PublishedSeries, published_series
from megatron_scalerl.fit.result import FitResult
from megatron_scalerl.fit.sigmoid import Array
from megatron_scalerl.fit.study.learning import Setting, choose, learn, settings

COLLAPSING = "DeepSeek-GRPO"
"""The run that became unstable in its unseen part; no monotonic curve follows it."""
LEFT_OUT = "robust, all learned without the run"
NO_DISCREPANCY = (Discrepancy(deviation=0.0, length=0.5, weight=1.0),)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The forecast of one series compared with its unseen points."""

    run: str
    """The physical run."""
    series: str
    """figure/series."""
    errors: Array
    """[unseen] measured minus forecast pass rate."""
    covered: Array
    """[unseen] 1.0 where the measured point lies inside its 90 % interval, else 0.0; nan for a method without one."""
    half_width: float
    """Mean half width of those intervals, in pass rate; nan for a method without one."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Outcomes pooled over points."""

    points: int
    """Unseen points."""
    error: float
    """Mean absolute error over all unseen points."""
    by_run: float
    """Mean over physical runs of their mean absolute error."""
    coverage: float
    """Share of the unseen points inside their 90 % interval."""
    half_width: float
    """Mean over series of the half width."""


Method = Callable[[PublishedSeries], Outcome]
"""A method of forecasting, applied to one series."""


def forecastable() -> list[PublishedSeries]:
    """The published series with points beyond the authors' fitted part."""
    return [series for series in published_series() if series.predicted]


def outcome(series: PublishedSeries, result: FitResult) -> Outcome:
    """Evaluate a fit of the series' fitted part on its unseen part."""
    evaluation = result.evaluate(series.compute[~series.fitted], series.pass_rate[~series.fitted])
    return Outcome(
        run=series.run,
        series=series.name,
        errors=evaluation.errors,
        covered=evaluation.covered,
        half_width=float(np.mean([p.hi - p.lo for p in evaluation.predictions])) / 2,
    )


def _without_intervals(series: PublishedSeries, forecast: Array | float) -> Outcome:
    errors = series.pass_rate[~series.fitted] - forecast
    covered = np.full(len(errors), math.nan)
    return Outcome(run=series.run, series=series.name, errors=errors, covered=covered, half_width=math.nan)


def fit_train(series: PublishedSeries, *, method: str = "robust", prior: Prior = DEFAULT_PRIOR) -> FitResult:
    """Fit the part of a series that the authors fitted."""
    return fit(
        series.compute[series.fitted],
        series.pass_rate[series.fitted],
        initial=series.initial,
        method=method,
        prompts=PROMPTS,
        generations=GENERATIONS,
        prior=prior,
        name=series.name,
        draws=2000,
    )


def by_fit(method: str = "robust", prior: Prior = DEFAULT_PRIOR) -> Method:
    """A method of `forecast.fit`."""
    return lambda series: outcome(series, fit_train(series, method=method, prior=prior))


def by_form(form: Callable[[PublishedSeries, Array, Array], Callable[[Array], Array]]) -> Method:
    """A form fitted by least squares from the paper's 1.5k GPU-hours on; it has no intervals."""

    def method(series: PublishedSeries) -> Outcome:
        kept = series.fitted & (series.compute >= FIT_FROM)
        curve = form(series, series.compute[kept], series.pass_rate[kept])
        return _without_intervals(series, curve(series.compute[~series.fitted]))

    return method


def last_value(series: PublishedSeries) -> Outcome:
    """Forecast the mean of the last three fitted points, constant."""
    return _without_intervals(series, float(series.pass_rate[series.fitted][-3:].mean()))


METHODS: dict[str, Method] = {
    "last value": last_value,
    "log-linear": by_form(lambda s, c, y: fit_log_linear(c, y)),
    "power law": by_form(lambda s, c, y: fit_power_law(c, y)),
    "sigmoid, least squares": by_form(lambda s, c, y: fit_least_squares_sigmoid(c, y, initial=s.initial)),
    "paper": by_fit("paper"),
    "robust without discrepancy": by_fit(prior=replace(DEFAULT_PRIOR, discrepancies=NO_DISCREPANCY)),
    "robust, flat in B and C_mid": by_fit(
        prior=replace(DEFAULT_PRIOR, log_exponent_sd=1.5, log_midpoint_sd=3.0, late_share=0.0)
    ),
    "robust": by_fit(),
}


def leave_one_run_out(grid: tuple[Setting, ...] | None = None) -> Method:
    """The robust fit with a prior, settings included, that is learned without the run that it forecasts."""
    return lambda series: outcome(series, fit_train(series, prior=learn((series.run,), grid)))


def varied() -> dict[str, Method]:
    """Other values of the constants that are not learned; everything else is learned without the run."""

    def changed(**changes: Any) -> Method:
        return lambda series: outcome(series, fit_train(series, prior=replace(learn((series.run,)), **changes)))

    return {
        "noise at a quarter of the binomial one": changed(noise_share=0.25),
        "noise as binomial": changed(noise_share=1.0),
        "noise less certain": changed(noise_shape=3.0),
        "late midpoint at the end of the data": changed(late_mean=0.0),
    }


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Pool outcomes over their points."""
    runs = list(dict.fromkeys(o.run for o in outcomes))
    error = np.abs(np.concatenate([o.errors for o in outcomes]))
    per_run = [np.abs(np.concatenate([o.errors for o in outcomes if o.run == run])).mean() for run in runs]
    return Summary(
        points=len(error),
        error=float(error.mean()),
        by_run=float(np.mean(per_run)),
        coverage=float(np.concatenate([o.covered for o in outcomes]).mean()),
        half_width=float(np.mean([o.half_width for o in outcomes])),
    )


def main() -> None:
    """Print the results by series, by method, and with other settings."""
    series = forecastable()
    methods = {**METHODS, LEFT_OUT: leave_one_run_out()}
    outcomes = {name: [method(s) for s in series] for name, method in methods.items()}
    for ours, paper in zip(outcomes[LEFT_OUT], outcomes["paper"]):
        _print(ours.series, summarize([ours]))
        _print("   paper", summarize([paper]))
    others = {f"left out, {setting}": leave_one_run_out((setting,)) for setting in settings()}
    for name, method in {**varied(), **others}.items():
        outcomes[name] = [method(s) for s in series]
    for without in ((), (COLLAPSING,)):
        print(f"without {', '.join(without) or 'nothing'}")
        for name, found in outcomes.items():
            _print(name, summarize([o for o in found if o.run not in without]))
    for run in dict.fromkeys(s.run for s in series):
        print(f"chosen without {run}: {choose(frozenset((run,)), settings())}")


def _print(name: str, summary: Summary) -> None:
    print(
        f"{name:104s} points {summary.points:3d}  error {summary.error:.5f}  by run {summary.by_run:.5f}  "
        f"coverage {summary.coverage:.3f}  half width {summary.half_width:.4f}"
    )


if __name__ == "__main__":
    main()
