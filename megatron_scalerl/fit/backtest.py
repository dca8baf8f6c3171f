"""Backtest: the forecast of a run's last point, made from every shorter prefix of the run."""

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
"""Points of the shortest prefix."""


@record
class BacktestPoint:
    """The forecast of the run's last point from one prefix."""

    compute: float
    """Compute at the end of the prefix, in the run's unit."""
    n_points: int
    """Points fitted."""
    forecast: Prediction
    """Of the last measured point."""
    asymptote: float
    """A of the prefix's fit."""


@record
class Backtest:
    """How the forecast of a run's last point changed as the run went on."""

    name: str
    """The run."""
    final_compute: float
    """Compute of the last point, in the run's unit."""
    final_pass_rate: float
    """Measured pass rate of the last point. No prefix contains it."""
    points: tuple[BacktestPoint, ...]
    """One per prefix, shortest first."""
    settled_from: float | None
    """Smallest compute from which every forecast is right within `MARGIN`; None if the longest prefix's is not."""
    fall: Fall | None = None
    """The fall of the pass rate in the whole run."""

    def summary(self) -> str:
        """Which forecasts were right and how wrong the others were, in one sentence."""
        right = [p for p in self.points if self.settled_from is not None and p.compute >= self.settled_from]
        errors = [
            abs(p.forecast.pass_rate - self.final_pass_rate) for p in self.points[: len(self.points) - len(right)]
        ]
        off = f"{', before it' if right else ':'} up to {max(errors):.3f} off" if errors else ""
        before = [p for p in self.points if self.fall is not None and p.compute <= self.fall.compute]
        unseen = before and all(abs(p.forecast.pass_rate - self.final_pass_rate) > MARGIN for p in before)
        fell = f"; {self.fall}, which no forecast before it foresaw" if unseen else ""
        what = f"{self.name}: the forecast of the last point, {self.final_pass_rate:.4f} at "
        what += f"{short_number(self.final_compute)}, "
        if self.settled_from is None:
            return f"{what}never settled within {MARGIN:g}{off}{fell}."
        count = f"{len(right)} of {len(self.points)} forecasts"
        return f"{what}stayed within {MARGIN:g} from {short_number(self.settled_from)} on ({count}){off}{fell}."


def backtest(
    curve: Curve,
    *,
    method: str = "robust",
    fit_from: float | None = None,
    seed: int = 0,
    draws: int = 1000,
) -> Backtest:
    """Fit every prefix of `curve` and forecast its last point from each.

    A prefix with fewer than `MIN_POINTS` points in the window is skipped.
    Raises ValueError if the run is too short for any prefix.
    """
    c = curve.compute
    usable = np.flatnonzero(c >= (fit_from or 0.0))
    ends = [int(n) for n in usable[MIN_POINTS - 1 : -1] if c[n] < c[-1]]
    if not ends:
        expected = f"expected at least {MIN_POINTS + 1} points for a backtest"
        raise ValueError(f"{curve.name}: {expected}, found {len(usable)}")
    points = []
    for end in ends:
        known = curve.part(np.arange(end + 1))
        result = fit_curve(known, method=method, fit_from=fit_from, seed=seed, draws=draws)
        last = None if curve.completions is None else curve.completions[-1:]
        (forecast,) = result.predict([float(c[-1])], completions=last)
        at, number, asymptote = float(c[end]), result.n_points, result.asymptote
        points.append(BacktestPoint(compute=at, n_points=number, forecast=forecast, asymptote=asymptote))
    final = float(curve.pass_rate[-1])
    return Backtest(
        name=curve.name,
        final_compute=float(c[-1]),
        final_pass_rate=final,
        points=tuple(points),
        settled_from=_settled_from(points, final),
        fall=falling_tail(c, curve.pass_rate),
    )


def _settled_from(points: list[BacktestPoint], final: float) -> float | None:
    settled = None
    for point in reversed(points):
        if abs(point.forecast.pass_rate - final) > MARGIN:
            break
        settled = point.compute
    return settled
