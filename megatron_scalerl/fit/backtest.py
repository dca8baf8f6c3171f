"""Backtest: the forecast of the level on which a run ends, made from every shorter prefix of the run.

The level is the mean pass rate of the last three points, at the mean compute of the three points: the pass rate of a
single validation may be far off.
"""

import numpy as np

from megatron_scalerl.fit.checks import Fall, falling_tail
from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.forecast import fit_curve
from megatron_scalerl.fit.formatting import short_number
from megatron_scalerl.fit.result import Prediction
from megatron_scalerl.record import record

MARGIN = 0.02
"""Error, in pass rate, up to which a forecast counts as right."""
MIN_POINTS = 4
"""Number of points of the shortest prefix that is fitted."""
LAST_POINTS = 3
"""Number of points at the end of a run whose mean pass rate is forecast."""


@record
class BacktestPoint:
    """The forecast of the level on which a run ends, made from one prefix of the run."""

    compute: float
    """Compute at the end of the prefix, in the run's unit."""
    n_points: int
    """Number of the prefix's points that were fitted."""
    forecast: Prediction
    """Forecast of the mean pass rate of the run's last `LAST_POINTS` points."""
    asymptote: float
    """Asymptote A of the sigmoid that was fitted to the prefix."""


@record
class Backtest:
    """The forecasts of a run's last points, from prefixes of growing length."""

    name: str
    """Name of the run."""
    final_compute: float
    """Mean compute of the last `LAST_POINTS` points, in the run's unit."""
    final_pass_rate: float
    """Mean of the measured pass rates of the last `LAST_POINTS` points, which no prefix contains."""
    points: tuple[BacktestPoint, ...]
    """One forecast for each prefix, the shortest prefix first."""
    fall: Fall | None = None
    """The fall of the pass rate after a peak, found in all points of the run; None if the run does not fall."""

    @property
    def settled_from(self) -> float | None:
        """Compute at the end of the first prefix from which on every forecast is right within `MARGIN`; None if the
        last forecast is wrong."""
        settled = None
        for point in reversed(self.points):
            if abs(point.forecast.pass_rate - self.final_pass_rate) > MARGIN:
                break
            settled = point.compute
        return settled

    def summary(self) -> str:
        """One sentence: which forecasts were right, and the error of the wrong forecasts."""
        errors = [abs(point.forecast.pass_rate - self.final_pass_rate) for point in self.points]
        computes = [point.compute for point in self.points]
        text = f"{self.name}: the forecast of the mean of the last {LAST_POINTS} points, {self.final_pass_rate:.4f} "
        text += f"at {short_number(self.final_compute)}, "
        settled_from = self.settled_from
        if settled_from is None:
            text += f"never stayed within {MARGIN:g} of that mean: the largest error was {max(errors):.3f}"
        else:
            unsettled = computes.index(settled_from)
            text += f"stayed within {MARGIN:g} from {short_number(settled_from)} on "
            text += f"({len(errors) - unsettled} of {len(errors)} forecasts)"
            if unsettled:
                text += f"; earlier forecasts were up to {max(errors[:unsettled]):.3f} off"
        if self.fall is not None:
            errors_before_fall = [error for compute, error in zip(computes, errors) if compute <= self.fall.compute]
            if errors_before_fall and min(errors_before_fall) > MARGIN:
                text += f"; {self.fall}, which no forecast from before the fall predicted"
        return f"{text}."


def backtest(
    curve: Curve,
    *,
    method: str = "robust",
    fit_from: float | None = None,
    draws: int = 1000,
) -> Backtest:
    """From every prefix of `curve` that ends before the last `LAST_POINTS` points, forecast the mean of the last
    points.

    Points of less compute than `fit_from` are not fitted. A prefix with fewer than `MIN_POINTS` fitted points is
    skipped. Raises ValueError if no prefix is long enough.
    """
    compute = curve.compute
    usable = np.flatnonzero(compute >= (fit_from or 0.0))
    # the comparison is strict: no compute of the last points, whose mean is forecast, may be in a prefix
    ends = [int(n) for n in usable[MIN_POINTS - 1 : -LAST_POINTS] if compute[n] < compute[-LAST_POINTS]]
    if not ends:
        raise ValueError(
            f"{curve.name}: {len(usable)} points are in the window; a backtest needs {MIN_POINTS + LAST_POINTS}"
        )
    final_compute = float(compute[-LAST_POINTS:].mean())
    # the mean is over the completions of all last points, so the interval is computed for this number of completions
    size = None if curve.completions is None else [curve.completions[-LAST_POINTS:].sum()]
    points = []
    for end in ends:
        prefix = curve.part(np.arange(end + 1))
        result = fit_curve(prefix, method=method, fit_from=fit_from, draws=draws)
        [forecast] = result.predict([final_compute], completions=size)
        reached = float(compute[end])
        points.append(
            BacktestPoint(compute=reached, n_points=result.n_points, forecast=forecast, asymptote=result.asymptote)
        )
    return Backtest(
        name=curve.name,
        final_compute=final_compute,
        final_pass_rate=float(curve.pass_rate[-LAST_POINTS:].mean()),
        points=tuple(points),
        fall=falling_tail(compute, curve.pass_rate),
    )
