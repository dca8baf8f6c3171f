"""Back-test: what the forecast of the last point would have been, had one stopped at every earlier point."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_scalerl.fit.forecast import fit
from megatron_scalerl.fit.inputs import Curve
from megatron_scalerl.fit.published import SAME_ASYMPTOTE

LEAST_POINTS = 4


@dataclass(frozen=True, kw_only=True)
class Hindsight:
    """The forecast of the last point from one prefix of the run."""

    compute: float
    """Where the prefix ends."""
    n_points: int
    forecast: float
    lo: float
    hi: float
    """90 % interval of the last measured point."""
    asymptote: float


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """How the forecast of a run's last point moved as the run went on."""

    name: str
    final_compute: float
    final_pass_rate: float
    """The last measured point, which no prefix contains."""
    history: tuple[Hindsight, ...]
    margin: float
    settled_from: float | None
    """Earliest compute from which every forecast stayed within the margin; None if it never did."""


def backtest(
    curve: Curve,
    *,
    initial: float | None,
    method: str = "robust",
    margin: float = SAME_ASYMPTOTE,
    most: int | None = None,
    fit_from: float | None = None,
    seed: int = 0,
    draws: int = 1000,
) -> Backtest:
    """Refit at every prefix of `curve` and forecast its last point from each.

    most: at most that many prefixes, evenly spread; None for all. A prefix with too few points in the window
    is left out. Raises ValueError if the run is too short for any.
    """
    c, y = curve.compute, curve.pass_rate
    usable = np.flatnonzero(c >= (fit_from or 0.0))
    ends = [int(n) for n in usable[LEAST_POINTS - 1 : -1] if c[n] < c[-1]]
    if not ends:
        need = f"expected at least {LEAST_POINTS + 1} points for a back-test"
        raise ValueError(f"{curve.name}: {need}, found {len(usable)}")
    if most is not None and len(ends) > most:
        ends = [ends[i] for i in np.unique(np.linspace(0, len(ends) - 1, most).round().astype(int))]
    history = []
    for end in ends:
        result = fit(
            c[: end + 1],
            y[: end + 1],
            initial=initial,
            method=method,
            prompts=curve.prompts,
            generations=curve.generations,
            fit_from=fit_from,
            seed=seed,
            draws=draws,
        )
        (forecast,) = result.predict([float(c[-1])])
        history.append(
            Hindsight(
                compute=float(c[end]),
                n_points=result.n_points,
                forecast=forecast.pass_rate,
                lo=forecast.lo,
                hi=forecast.hi,
                asymptote=result.asymptote,
            )
        )
    final = float(y[-1])
    return Backtest(
        name=curve.name,
        final_compute=float(c[-1]),
        final_pass_rate=final,
        history=tuple(history),
        margin=margin,
        settled_from=_settled(history, final, margin),
    )


def _settled(history: list[Hindsight], final: float, margin: float) -> float | None:
    settled = None
    for point in reversed(history):
        if abs(point.forecast - final) > margin:
            break
        settled = point.compute
    return settled
