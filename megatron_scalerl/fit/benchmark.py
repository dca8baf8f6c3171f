"""How well each method forecasts the published curves: fitted on what the authors fitted, judged on the rest.

The same run appears in several figures, so everything is left out by physical run (data/runs.csv). What the robust
fit's prior learns from runs, where B lies and how far it spreads, is learned anew for each left-out run from the
others: neither the points nor the legend of a run inform the prior that forecasts it. What it does not learn, but
was set by hand (`structures`), is varied to show how little hangs on it.

    python -m megatron_scalerl.fit.benchmark
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from .forecast import fit
from .forms import fit_least_squares_sigmoid, fit_log_linear, fit_power_law
from .paper import FIT_FROM
from .prior import DEFAULT_PRIOR, Discrepancy, Prior
from .published import GENERATIONS, PROMPTS, PublishedSeries, published_series
from .result import FitResult
from .sigmoid import Array

COLLAPSING = "DeepSeek-GRPO"
"""The run whose training became unstable while it was being forecast; no curve that only rises follows it."""
NO_WANDER = (Discrepancy(ratio=0.0, length=0.5, weight=1.0),)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One series, forecast beyond what was fitted."""

    run: str
    series: str
    errors: Array
    """[unseen] measured minus forecast pass rate."""
    covered: Array
    """[unseen] whether the measured point lies in its 90 % interval; nan where a method has none."""
    half_width: float
    """Mean half width of those intervals; nan where a method has none."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Outcomes pooled over points."""

    points: int
    error: float
    """Mean absolute error over all unseen points."""
    by_run: float
    """Mean over physical runs of their mean absolute error."""
    coverage: float
    half_width: float


Method = Callable[[PublishedSeries], Outcome]


def forecastable() -> list[PublishedSeries]:
    """The published series that show points beyond the fitted ones."""
    return [series for series in published_series() if series.predicted]


def outcome(series: PublishedSeries, result: FitResult) -> Outcome:
    """Judge a fit of the series' fitted part on its unseen part."""
    unseen = ~series.fitted
    forecast = result.predict(series.compute[unseen])
    measured = series.pass_rate[unseen]
    return Outcome(
        run=series.run,
        series=series.name,
        errors=measured - np.array([p.pass_rate for p in forecast]),
        covered=np.array([float(p.lo <= y <= p.hi) for p, y in zip(forecast, measured)]),
        half_width=float(np.mean([p.hi - p.lo for p in forecast])) / 2,
    )


def fit_train(series: PublishedSeries, *, method: str = "robust", prior: Prior = DEFAULT_PRIOR) -> FitResult:
    """Fit what the authors fitted of a series."""
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

    def judge(series: PublishedSeries) -> Outcome:
        kept = series.fitted & (series.compute >= FIT_FROM)
        curve = form(series, series.compute[kept], series.pass_rate[kept])
        errors = series.pass_rate[~series.fitted] - curve(series.compute[~series.fitted])
        nothing = np.full(len(errors), math.nan)
        return Outcome(run=series.run, series=series.name, errors=errors, covered=nothing, half_width=math.nan)

    return judge


def last_value(series: PublishedSeries) -> Outcome:
    """Forecast the mean of the last three fitted points, for ever."""
    level = float(series.pass_rate[series.fitted][-3:].mean())
    errors = series.pass_rate[~series.fitted] - level
    nothing = np.full(len(errors), math.nan)
    return Outcome(run=series.run, series=series.name, errors=errors, covered=nothing, half_width=math.nan)


METHODS: dict[str, Method] = {
    "last value": last_value,
    "log-linear": by_form(lambda s, c, y: fit_log_linear(c, y)),
    "power law": by_form(lambda s, c, y: fit_power_law(c, y)),
    "sigmoid, least squares": by_form(lambda s, c, y: fit_least_squares_sigmoid(c, y, initial=s.initial)),
    "paper": by_fit("paper"),
    "robust without wander": by_fit(prior=replace(DEFAULT_PRIOR, discrepancies=NO_WANDER)),
    "robust, flat in B and C_mid": by_fit(
        prior=replace(DEFAULT_PRIOR, log_exponent_sd=1.5, log_midpoint_sd=3.0, late_share=0.0)
    ),
    "robust": by_fit(),
}


def learned_prior(without: str | None = None, base: Prior = DEFAULT_PRIOR) -> Prior:
    """`base` with the prior of B learned from the published legends of all physical runs but `without`.

    Location and scale are the median and the scaled median absolute deviation of log B, one value a run.
    """
    legends: dict[str, list[float]] = {}
    for series in published_series():
        if series.run != without:
            legends.setdefault(series.run, []).append(math.log(series.exponent))
    values = np.array([np.mean(each) for each in legends.values()])
    centre = float(np.median(values))
    scale = 1.4826 * float(np.median(np.abs(values - centre)))
    return replace(base, log_exponent_mean=centre, log_exponent_sd=scale)


def leave_one_run_out(base: Prior = DEFAULT_PRIOR) -> Method:
    """The robust fit whose prior knows nothing of the run that it forecasts."""
    return lambda series: outcome(series, fit_train(series, prior=learned_prior(series.run, base)))


def structures() -> dict[str, Prior]:
    """Other choices for what the prior does not learn: the room above R_0, the midpoint and the wander."""
    wanders = {
        "wander 0, 2, 10": DEFAULT_PRIOR.discrepancies,
        "wander 0, 2, 8, the last one longer": (
            Discrepancy(ratio=0.0, length=0.5, weight=0.30),
            Discrepancy(ratio=2.0, length=0.5, weight=0.35),
            Discrepancy(ratio=8.0, length=0.8, weight=0.35),
        ),
        "wander 0, 2": (
            Discrepancy(ratio=0.0, length=0.5, weight=0.50),
            Discrepancy(ratio=2.0, length=0.5, weight=0.50),
        ),
    }
    out = {
        f"Beta(1, {gain:g}), {name}": replace(DEFAULT_PRIOR, gain_beta=gain, discrepancies=wander)
        for (name, wander), gain in product(wanders.items(), (1.0, 2.0))
    }
    for centre, sd in ((0.3, 0.7), (0.4, 0.5), (0.4, 0.7)):
        moved = replace(DEFAULT_PRIOR, log_midpoint_mean=math.log(centre), log_midpoint_sd=sd)
        out[f"midpoint {centre:g}, spread {sd:g}"] = moved
    return out


def summarise(outcomes: Sequence[Outcome]) -> Summary:
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
    """Print the comparison of methods, the leave-one-run-out result by series, and the structures."""
    series = forecastable()
    methods = {**METHODS, "robust, prior learned without the run": leave_one_run_out()}
    outcomes = {name: [method(s) for s in series] for name, method in methods.items()}
    for found, paper in zip(outcomes["robust, prior learned without the run"], outcomes["paper"]):
        _print(found.series, summarise([found]))
        _print("   paper", summarise([paper]))
    for name, base in structures().items():
        outcomes[name] = [leave_one_run_out(base)(s) for s in series]
    for without in ((), (COLLAPSING,)):
        print(f"without {', '.join(without) or 'nothing'}")
        for name, judged in outcomes.items():
            _print(name, summarise([o for o in judged if o.run not in without]))


def _print(name: str, summary: Summary) -> None:
    print(
        f"{name:52s} points {summary.points:3d}  error {summary.error:.5f}  by run {summary.by_run:.5f}  "
        f"coverage {summary.coverage:.3f}  half width {summary.half_width:.4f}"
    )


if __name__ == "__main__":
    main()
