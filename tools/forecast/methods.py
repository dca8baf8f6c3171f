"""The methods of forecasting that the benchmark compares, and their scores."""

import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from forms import fit_power_law, fit_random_walk, least_squares_sigmoid, log_linear
from known_runs import PUBLISHED

from megatron_scalerl.fit.paper import ASYMPTOTES, FIT_FROM, MIDPOINT_REFERENCE, best_cell
from megatron_scalerl.fit.prior import DEFAULT_PRIOR
from megatron_scalerl.fit.result import TAIL
from megatron_scalerl.fit.sigmoid import Array, sigmoid

LEAST_SCORE = 0.001
"""Interval score, in pass rate, below which a ratio of two says nothing."""
COVERED = 0.8
"""Share of a curve's unseen points that has to be inside, for the curve to count as covered."""
NORMAL_90 = 1.6449
"""Half of the 90 % interval of a standard normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The forecast of one task compared with its unseen points."""

    run: str
    """The physical run."""
    name: str
    """figure/series, or the tiny run."""
    errors: Array = field(repr=False)
    """[unseen] measured minus forecast pass rate."""
    covered: Array = field(repr=False)
    """[unseen] 1.0 where the measured point lies inside its 90 % interval, else 0.0."""
    winkler: Array = field(repr=False)
    """[unseen] interval score of that interval (Gneiting and Raftery 2007, eq. 43), in pass rate: its width, and 20
    times the distance of a point outside of it. Lower is better."""
    half_widths: Array = field(repr=False)
    """[unseen] half widths of those intervals."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Outcomes pooled over points."""

    points: int
    """Unseen points."""
    error: float
    """Mean absolute error over all unseen points."""
    signed: float
    """Mean error: measured minus forecast."""
    by_run: float
    """Mean over physical runs of their mean absolute error."""
    coverage: float
    """Share of the unseen points inside their 90 % interval."""
    winkler: float
    """Mean interval score."""
    half_width: float
    """Mean over tasks of the half width."""
    covered_runs: float
    """Share of the curves of which at least `COVERED` of the unseen points are inside."""


def by_fit(method="robust", prior=DEFAULT_PRIOR):
    """A method of `forecast.fit`."""

    def forecast(task):
        found = task.evaluate(task.fit(method=method, prior=prior))
        low, high = (np.array([getattr(p, end) for p in found.predictions]) for end in ("lo", "hi"))
        return outcome(task, found.measured - found.errors, low, high)

    return forecast


def by_form(form, parameters):
    """A form fitted by least squares; its intervals are those of its residuals.

    Of a published run the points before the paper's 1.5k GPU-hours are left out, as in the paper.
    """

    def method(task):
        known = task.known.curve.part(task.fitted)
        late = known.compute >= FIT_FROM
        if task.known.world == PUBLISHED and np.count_nonzero(late) > parameters:
            known = known.part(late)
        curve = form(task, known.compute, known.pass_rate)
        residual = known.pass_rate - curve(known.compute)
        spread = math.sqrt(float(residual @ residual) / max(len(residual) - parameters, 1))
        forecast = np.asarray(curve(task.known.curve.compute[task.unseen]), dtype=float)
        return outcome(task, forecast, forecast - NORMAL_90 * spread, forecast + NORMAL_90 * spread)

    return method


def random_walk(task):
    """A random walk in log compute, of the run's own rate and noise."""
    known = task.known.curve.part(task.fitted)
    mean, spread = fit_random_walk(known.compute, known.pass_rate)(task.known.curve.compute[task.unseen])
    return outcome(task, mean, mean - NORMAL_90 * spread, mean + NORMAL_90 * spread)


def damped_walk(task):
    """The random walk with half of the last slope, damped, which only rises, and with the walk's width.

    The slope is that of the points in the last factor of two of compute, three at least.
    """
    walk = random_walk(task)
    known = task.known.curve.part(task.fitted)
    compute = task.known.curve.compute[task.unseen]
    last = known.compute[-1]
    late = known.compute >= last / 2
    slope = np.polyfit(np.log(known.compute[late]), known.pass_rate[late], 1)[0] if late.sum() >= 3 else 0.0
    measured = task.known.curve.pass_rate[task.unseen]
    mean = np.clip(measured - walk.errors + 0.5 * max(slope, 0.0) * (1.0 - last / compute), 0.0, 1.0)
    return outcome(task, mean, mean - walk.half_widths, mean + walk.half_widths)


def paper_or_last_value(task):
    """The paper's procedure; the last value where it does not apply, because R_0 is above its highest A."""
    try:
        return by_fit("paper")(task)
    except ValueError:
        return OTHERS["last value"](task)


def _printed_grid(task, c, y):
    """The paper's procedure with the grid of C_mid as printed: 100 values on 100..40000 (A.5), rescaled."""
    initial = float(y[0] if task.known.curve.initial is None else task.known.curve.initial)
    grid = np.linspace(100.0, 40000.0, 100) * (1.0 if task.known.world == PUBLISHED else c.max() / MIDPOINT_REFERENCE)
    _, asymptote, midpoint, exponent = best_cell(c, y, initial, ASYMPTOTES, grid)
    return partial(sigmoid, asymptote=asymptote, exponent=exponent, midpoint=midpoint, initial=initial)


def _last_value(task, c, y):
    return lambda compute: np.full(np.shape(compute), float(y[-3:].mean()))


OTHERS = {
    "last value": by_form(_last_value, 1),
    "log-linear": by_form(lambda task, c, y: log_linear(c, y), 2),
    "power law": by_form(lambda task, c, y: fit_power_law(c, y), 3),
    "sigmoid, least squares": by_form(
        lambda task, c, y: least_squares_sigmoid(c, y, initial=float(task.known.curve.initial or 0.0)), 3
    ),
    "random walk": random_walk,
    "damped walk": damped_walk,
    "paper": paper_or_last_value,
    "paper, printed grid": by_form(_printed_grid, 3),
}
"""What `robust` is compared with."""


def outcome(task, forecast, low, high):
    """Compare a forecast and its 90 % intervals [unseen] with what was measured."""
    measured = task.known.curve.pass_rate[task.unseen]
    outside = np.maximum(low - measured, 0.0) + np.maximum(measured - high, 0.0)
    return Outcome(
        run=task.known.run,
        name=task.known.curve.name,
        errors=measured - forecast,
        covered=(outside == 0.0).astype(float),
        winkler=high - low + outside / TAIL,
        half_widths=(high - low) / 2,
    )


def summarize(outcomes):
    """Pool outcomes over their points."""
    runs = list(dict.fromkeys(o.run for o in outcomes))
    errors = np.concatenate([o.errors for o in outcomes])
    per_run = [np.abs(np.concatenate([o.errors for o in outcomes if o.run == run])).mean() for run in runs]
    return Summary(
        points=len(errors),
        error=float(np.abs(errors).mean()),
        signed=float(errors.mean()),
        by_run=float(np.mean(per_run)),
        coverage=float(np.concatenate([o.covered for o in outcomes]).mean()),
        winkler=float(np.concatenate([o.winkler for o in outcomes]).mean()),
        half_width=float(np.mean([o.half_widths.mean() for o in outcomes])),
        covered_runs=float(np.mean([o.covered.mean() >= COVERED for o in outcomes])),
    )


def ratio(outcomes, reference):
    """Geometric mean over curves of the interval score as a multiple of that of `reference`, curve by curve.

    A score below `LEAST_SCORE`, as on a run of zeros alone, counts as that.
    """
    scores = [[max(float(o.winkler.mean()), LEAST_SCORE) for o in column] for column in (outcomes, reference)]
    return math.exp(float(np.mean(np.log(scores[0]) - np.log(scores[1]))))


def bootstrap(outcomes, draws=4000):
    """90 % intervals of coverage and signed error where physical runs are drawn with replacement."""
    runs = list(dict.fromkeys(o.run for o in outcomes))
    own = [[(len(o.errors), o.covered.sum(), o.errors.sum()) for o in outcomes if o.run == run] for run in runs]
    sums = np.array([np.sum(rows, axis=0) for rows in own])
    drawn = sums[np.random.default_rng(0).integers(0, len(runs), (draws, len(runs)))].sum(axis=1)
    out = {}
    for column, name in ((1, "coverage"), (2, "signed")):
        low, high = np.quantile(drawn[:, column] / drawn[:, 0], [TAIL, 1.0 - TAIL])
        out[name] = (float(low), float(high))
    return out
