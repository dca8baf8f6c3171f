"""Fit a run's compute-performance curve and forecast it: the entry point of `megatron_scalerl.fit`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_scalerl.fit import checks
from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.noise import first_invalid
from megatron_scalerl.fit.observations import Observations, initial_candidates, observe
from megatron_scalerl.fit.paper import ASYMPTOTES, FIT_FROM, fit_paper
from megatron_scalerl.fit.posterior import Posterior, sample
from megatron_scalerl.fit.prior import DEFAULT_PRIOR, FLAT_PRIOR, Bounds, Prior
from megatron_scalerl.fit.result import TAIL, FitResult
from megatron_scalerl.fit.sigmoid import Array, sigmoid

METHODS = ("robust", "paper")
Window = tuple[float | None, float | None]
"""(first, last) compute that is fitted; None: without a limit."""


def fit(
    compute: Sequence[float] | Array,
    pass_rate: Sequence[float] | Array,
    *,
    initial: float | None,
    method: str = "robust",
    prompts: int | None = None,
    generations: ArrayLike | None = None,
    initial_generations: int | None = None,
    within_variance: Sequence[float] | Array | None = None,
    initial_within_variance: float | None = None,
    seed: int = 0,
    name: str = "run",
    unit: str = "gpu_hours",
    fit_from: float | None = None,
    fit_until: float | None = None,
    fixed_asymptote: float | None = None,
    truncated_share: Sequence[float] | Array | None = None,
    prior: Prior = DEFAULT_PRIOR,
    draws: int = 4000,
) -> FitResult:
    """Fit eq. 1 of Khatri et al. (2025, arXiv 2510.13786) to a run's validation points.

    compute:     [n] training compute of each point, any positive unit, any order.
    pass_rate:   [n] validation pass rate (mean@k) in [0, 1].
    initial:     R_0, the run's own pass rate before RL. None: a point at compute 0 if there is one, else R_0 is
                 averaged over a range below the first point, with a warning.
    method:      "robust" (posterior over weak unit-free priors, correlated residuals) or "paper" (A.5).
    prompts, generations: validation size, generations as one number or [n]; gives the noise of a point.
    initial_generations: of R_0; default: the median of `generations`.
    within_variance: [n] mean over prompts of one completion's variance, NaN where it was not measured;
                 initial_within_variance: at R_0. Both as in validation.jsonl.
    seed, draws: of and from the posterior; the same data and seed give the same bits.
    name, unit:  copied to the result.
    fit_from, fit_until: window of compute. Default of fit_from for "paper": 1.5k, if four points lie beyond.
    fixed_asymptote: A is held at this value in (R_0, 1].
    truncated_share: [n] share of truncated completions of each point, for the warning.
    prior:       of the robust method.
    Raises ValueError, one line, for input that cannot be fitted.
    """
    columns = {"generations": generations, "within_variance": within_variance, "truncated_share": truncated_share}
    c, y, checked = _checked(compute, pass_rate, columns)
    if initial is None and np.any(c == 0):
        initial = float(y[c == 0].mean())
    curve = Curve(
        name=name,
        source=Path(name),
        compute=c,
        pass_rate=y,
        initial=initial,
        prompts=prompts,
        initial_generations=initial_generations,
        initial_within_variance=initial_within_variance,
        **checked,
        unit=unit,
    ).part(c > 0)
    return _fit(curve, method, (fit_from, fit_until), fixed_asymptote, prior, draws, seed)


def fit_curve(
    curve: Curve,
    *,
    method: str = "robust",
    seed: int = 0,
    fit_from: float | None = None,
    fit_until: float | None = None,
    fixed_asymptote: float | None = None,
    prior: Prior = DEFAULT_PRIOR,
    draws: int = 4000,
) -> FitResult:
    """Fit a run that was read from a file; the options are those of `fit`. Raises ValueError naming the file."""
    try:
        result = _fit(curve, method, (fit_from, fit_until), fixed_asymptote, prior, draws, seed)
    except ValueError as error:
        raise ValueError(f"{curve.source}: {error}" + (f" ({curve.read})" if curve.read else "")) from None
    return replace(result, warnings=(*curve.notes, *result.warnings))


def _fit(
    curve: Curve, method: str, window: Window, fixed_asymptote: float | None, prior: Prior, draws: int, seed: int
) -> FitResult:
    _check_options(method, fixed_asymptote, curve.initial)
    kept, notes = _window(curve.compute, method, window)
    curve = curve.part(kept)
    if len(curve.compute) < 3:
        found = len(curve.compute)
        raise ValueError(f"{curve.name}: expected at least 3 points with compute > 0 in the window, found {found}")
    prior, solve = (prior, _solve_robust) if method == "robust" else (FLAT_PRIOR, _solve_paper)
    start = float(curve.pass_rate[0]) if curve.initial is None else curve.initial
    if method == "paper" and fixed_asymptote is None and start >= ASYMPTOTES[-1]:
        raise ValueError(f"method paper: expected R_0 below its highest A, {ASYMPTOTES[-1]:g}, found {start:.3f}")
    highest = ASYMPTOTES[-1] if method == "paper" and fixed_asymptote is None else fixed_asymptote
    observations = observe(curve, prior, highest=highest)
    solution = solve(observations, prior, fixed_asymptote, draws, seed)
    notes = _initial_notes(curve) + notes + solution[2]
    return _result(curve, solution, notes + checks.truncation_warnings(curve.compute, curve.truncated_share), method)


Solution = tuple[tuple[float, float, float, float], Posterior, list[str]]
"""A, B, C_mid and R_0; the posterior; warnings of the method."""


def _result(curve: Curve, solution: Solution, notes: list[str], method: str) -> FitResult:
    c, y, ((a, b, m, r0), posterior, _) = curve.compute, curve.pass_rate, solution
    residual = y - sigmoid(c, asymptote=a, exponent=b, midpoint=m, initial=r0)
    intervals, reached = _intervals(posterior, a, b, m), checks.highest_level(y)
    low, high = intervals["asymptote"]
    if low < high < reached and checks.falling_tail(c, y) is None:  # A is not held
        intervals["asymptote"] = (low, reached)
        notes = [*notes, f"the sigmoid does not describe this run: A lies below {reached:.3f}, which was measured"]
    notes = notes + checks.curve_warnings(c, y, exponent=b, midpoint=m, posterior=posterior)
    return FitResult(
        name=curve.name,
        method=method,
        asymptote=a,
        exponent=b,
        midpoint=m,
        initial=r0,
        intervals=intervals,
        n_points=len(c),
        rmse=float(np.sqrt(np.mean(residual**2))),
        warnings=tuple(dict.fromkeys(notes)),
        compute=c,
        pass_rate=y,
        posterior=posterior,
        unit=curve.unit,
    )


def _solve_robust(obs: Observations, prior: Prior, fixed_asymptote: float | None, draws: int, seed: int) -> Solution:
    posterior = sample(obs, prior=prior, fixed_asymptote=fixed_asymptote, draws=draws, seed=seed)
    notes = checks.bound_warnings(posterior, fixed=fixed_asymptote is not None)
    return _central(posterior), posterior, notes


def _solve_paper(obs: Observations, prior: Prior, fixed_asymptote: float | None, draws: int, seed: int) -> Solution:
    initial = obs.initials[0]
    grid = fit_paper(obs.compute, obs.pass_rate, initial=initial, fixed_asymptote=fixed_asymptote)
    bounds = Bounds(
        asymptote=(float(ASYMPTOTES[0]), float(ASYMPTOTES[-1])),
        exponent=(0.1, 20.0),
        midpoint=(grid.midpoint_range[0] / obs.scale, grid.midpoint_range[1] / obs.scale),
    )
    posterior = sample(obs, prior=prior, bounds=bounds, fixed_asymptote=fixed_asymptote, draws=draws, seed=seed)
    parameters = (grid.asymptote, grid.exponent, grid.midpoint, initial)
    return parameters, posterior, checks.grid_warnings(grid)


def _check_options(method: str, fixed_asymptote: float | None, initial: float | None) -> None:
    if initial is not None and not 0.0 <= initial < 1.0:
        raise ValueError(f"initial: expected R_0 in [0, 1), found {initial!r}")
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, found {method!r}")
    if fixed_asymptote is not None and not (initial or 0.0) < fixed_asymptote <= 1.0:
        raise ValueError(f"fixed asymptote: expected a value in (R_0, 1], found {fixed_asymptote!r}")


def _checked(
    compute: ArrayLike, pass_rate: ArrayLike, columns: dict[str, ArrayLike | None]
) -> tuple[Array, Array, dict[str, Any]]:
    """The points as arrays, sorted by compute; columns: one value a point, one for all, or None.

    Raises ValueError for shapes and values out of range.
    """
    c, y = np.asarray(compute, dtype=float), np.asarray(pass_rate, dtype=float)
    if c.ndim != 1 or c.shape != y.shape:
        raise ValueError(f"expected compute and pass_rate of one length, found shapes {c.shape} and {y.shape}")
    valid = np.isfinite(c) & (c >= 0)
    if not np.all(valid):
        raise ValueError("compute: expected finite values >= 0, found " + first_invalid(c, valid))
    inside = np.isfinite(y) & (y >= 0) & (y <= 1)
    if not np.all(inside):
        raise ValueError("pass_rate: expected values in [0, 1], found " + first_invalid(y, inside))
    order, found = np.argsort(c, kind="stable"), {}
    for name, column in columns.items():
        values = None if column is None else np.asarray(column, dtype=float)
        if values is not None and values.shape not in ((), c.shape):
            raise ValueError(f"{name}: expected one value or {len(c)}, one a point, found shape {values.shape}")
        found[name] = None if values is None else np.broadcast_to(values, c.shape)[order]
    return c[order], y[order], found


def _initial_notes(curve: Curve) -> list[str]:
    if curve.initial is not None:
        return []
    candidates = initial_candidates(curve.pass_rate)
    return [
        "R_0 is missing: no pass rate at compute 0 was given; assumed between "
        f"{candidates[0]:.3f} and {candidates[-1]:.3f}, at or below the first point"
    ]


def _window(c: Array, method: str, window: Window) -> tuple[NDArray[np.bool_], list[str]]:
    notes, (low, high) = [], window
    kept = c > 0
    if high is not None:
        kept &= c <= high
    if low is None and method == "paper":
        if np.count_nonzero(kept & (c >= FIT_FROM)) >= 4:
            low = FIT_FROM
        else:
            notes.append(f"fewer than 4 points beyond {FIT_FROM:g}: the paper's window was not applied")
    if low is not None:
        kept &= c >= low
    return kept, notes


def _central(posterior: Posterior) -> tuple[float, float, float, float]:
    """(A, B, C_mid, R_0): the median A, and the B and C_mid of the draws near it, so that they form one curve."""
    a = float(np.median(posterior.asymptote))
    near = np.argsort(np.abs(posterior.asymptote - a), kind="stable")[: max(len(posterior.asymptote) // 10, 1)]
    b = float(np.exp(np.mean(np.log(posterior.exponent[near]))))
    m = float(np.exp(np.mean(np.log(posterior.midpoint[near]))))
    obs = posterior.observations
    return a, b, m, float(obs.initials[0] if obs.initial_given else np.median(posterior.initial))


def _intervals(posterior: Posterior, a: float, b: float, m: float) -> dict[str, tuple[float, float]]:
    out = {}
    for key, point in (("asymptote", a), ("exponent", b), ("midpoint", m)):
        lo, hi = np.quantile(posterior.parameters[key], [TAIL, 1.0 - TAIL])
        out[key] = (float(min(lo, point)), float(max(hi, point)))
    return out
