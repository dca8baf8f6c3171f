"""Fit and forecast a run's compute-performance curve: the entry point of `megatron_scalerl.fit`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_scalerl.fit import checks
from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.observations import first_invalid, initial_candidates, observe
from megatron_scalerl.fit.paper import ASYMPTOTES, FIT_FROM, fit_paper
from megatron_scalerl.fit.posterior import Posterior, sample
from megatron_scalerl.fit.prior import DEFAULT_BOUNDS, DEFAULT_PRIOR, FLAT_PRIOR, Bounds, Prior
from megatron_scalerl.fit.result import TAIL, FitResult
from megatron_scalerl.fit.sigmoid import PARAMETERS, Array, sigmoid

METHODS = ("robust", "paper")


def fit(
    compute: Sequence[float] | Array,
    pass_rate: Sequence[float] | Array,
    *,
    initial: float | None,
    prompts: int | None = None,
    generations: ArrayLike | None = None,
    initial_generations: int | None = None,
    within_variance: Sequence[float] | Array | None = None,
    initial_within_variance: float | None = None,
    truncated_share: Sequence[float] | Array | None = None,
    name: str = "run",
    unit: str = "gpu_hours",
    **options: Any,
) -> FitResult:
    """Fit eq. 1 of Khatri et al. (2025, arXiv 2510.13786) to a run's validation points.

    compute:     [n] training compute of each point, any positive unit, any order.
    pass_rate:   [n] validation pass rate (mean@k) in [0, 1].
    initial:     R_0, the run's own pass rate before RL. None: the point at compute 0; without such a point R_0 is
                 averaged over a range below the first point, with a warning.
    prompts, generations: size of a validation, which determines the noise; generations: one number or [n].
    initial_generations: generations per prompt of R_0; default: the median of `generations`.
    within_variance: [n] mean over prompts of one completion's variance, NaN where not measured;
                 initial_within_variance: the same variance at R_0. Both are as in validation.jsonl.
    truncated_share: [n] share of truncated completions of each point; more than 10 % gives a warning.
    name, unit:  copied to the result.
    options:     keyword arguments of `fit_curve`.
    Raises ValueError, one line, for input that cannot be fitted.
    """
    c = np.asarray(compute, dtype=float)
    y = np.asarray(pass_rate, dtype=float)
    if c.ndim != 1 or c.shape != y.shape:
        raise ValueError(f"compute has shape {c.shape} and pass_rate {y.shape}; both need the same length")
    valid = np.isfinite(c) & (c >= 0)
    if not np.all(valid):
        raise ValueError(f"compute is {first_invalid(c, valid)}; it has to be finite and at least 0")
    inside = (y >= 0) & (y <= 1)
    if not np.all(inside):
        raise ValueError(f"pass_rate is {first_invalid(y, inside)}; it has to be in [0, 1]")
    if initial is None and np.any(c == 0):
        initial = float(y[c == 0].mean())
    curve = Curve(
        name=name,
        source=Path(name),
        compute=c,
        pass_rate=y,
        initial=initial,
        prompts=prompts,
        generations=_column("generations", generations, len(c)),
        initial_generations=initial_generations,
        within_variance=_column("within_variance", within_variance, len(c)),
        initial_within_variance=initial_within_variance,
        truncated_share=_column("truncated_share", truncated_share, len(c)),
        unit=unit,
    )
    order = np.argsort(c, kind="stable")
    return fit_curve(curve.part(order[c[order] > 0]), **options)


def _column(name: str, column: ArrayLike | None, n: int) -> Array | None:
    """[n] values of a column, given as [n] or as one number. Raises ValueError for any other shape."""
    if column is None:
        return None
    values = np.asarray(column, dtype=float)
    if values.shape not in ((), (n,)):
        raise ValueError(f"{name} has shape {values.shape}; give one value, or one for each of the {n} points")
    return np.broadcast_to(values, n)


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
    """Fit the points of a curve, such as `inputs.read_curves` reads.

    method:      "robust" (posterior over weak unit-free priors, correlated residuals) or "paper" (A.5).
    seed, draws: seed and number of the posterior's draws; the same data and seed give the same bits.
    fit_from, fit_until: window of compute. Default of fit_from for "paper": 1500, if four points lie beyond.
    fixed_asymptote: A is held at this value in (R_0, 1].
    prior:       prior distribution of the robust method.
    Raises ValueError, one line with the name of the file, for points that cannot be fitted.
    """
    try:
        if curve.initial is not None and not 0.0 <= curve.initial < 1.0:
            raise ValueError(f"initial is {curve.initial!r}; R_0 has to be at least 0 and below 1")
        if method not in METHODS:
            raise ValueError(f"method is {method!r}; choose {' or '.join(METHODS)}")
        if fixed_asymptote is not None and not (curve.initial or 0.0) < fixed_asymptote <= 1.0:
            raise ValueError(f"fixed asymptote: {fixed_asymptote!r} is not above R_0, or exceeds 1")
        in_window, notes = _window(curve.compute, method, fit_from, fit_until)
        if np.count_nonzero(in_window) < 3:
            number = np.count_nonzero(in_window)
            raise ValueError(
                f"{curve.name}: {number} points with compute > 0 are in the window; a fit needs at least 3"
            )
        return _fit(
            curve.part(in_window), notes, method, prior, fixed_asymptote=fixed_asymptote, draws=draws, seed=seed
        )
    except ValueError as error:
        if not curve.read:
            raise
        raise ValueError(f"{curve.source}: {error} ({curve.read})") from None


def _fit(
    curve: Curve, notes: list[str], method: str, prior: Prior, *, fixed_asymptote: float | None, draws: int, seed: int
) -> FitResult:
    c = curve.compute
    y = curve.pass_rate
    if curve.initial is None:
        notes = [_assumed_start(y), *notes]
    highest = fixed_asymptote
    bounds = DEFAULT_BOUNDS
    if method == "paper":
        prior = FLAT_PRIOR
        if fixed_asymptote is None:
            highest = float(ASYMPTOTES[-1])
            start = float(y[0]) if curve.initial is None else curve.initial
            if start >= highest:
                raise ValueError(f"method paper: R_0 is {start:.3f}; A's grid ends at {highest:g}: use method robust")
    observations = observe(curve, prior, highest=highest)
    if method == "paper":
        points = (observations.compute, observations.pass_rate)
        initial = observations.initials[0]
        parameters, midpoint_range = fit_paper(*points, initial=initial, fixed_asymptote=fixed_asymptote)
        parameters["initial"] = initial
        bounds = Bounds(
            asymptote=(float(ASYMPTOTES[0]), float(ASYMPTOTES[-1])),
            # `fit_paper` tabulates exponents in this range
            exponent=(0.1, 20.0),
            midpoint=(midpoint_range[0] / observations.scale, midpoint_range[1] / observations.scale),
        )
    if fixed_asymptote is not None:
        bounds = replace(bounds, asymptote=(fixed_asymptote, fixed_asymptote))
    posterior = sample(observations, prior=prior, bounds=bounds, draws=draws, seed=seed)
    if method == "paper":
        asymptote = parameters["asymptote"]
        if fixed_asymptote is None and asymptote in ASYMPTOTES[[0, -1]]:
            notes.append(f"A is on the edge of the paper's grid ({asymptote:g}): the ceiling is not determined")
    else:
        parameters = _central_parameters(posterior)
        notes += checks.bound_warnings(posterior, fixed=fixed_asymptote is not None)
    notes += checks.truncation_warnings(c, curve.truncated_share)
    intervals = _intervals(posterior, parameters)
    reached = checks.highest_level(y)
    lower, upper = intervals["asymptote"]
    if lower < upper < reached and checks.falling_tail(c, y) is None:  # lower equals upper if A is fixed
        intervals["asymptote"] = (lower, reached)
        notes.append(f"the sigmoid does not describe this run: A lies below the measured level {reached:.3f}")
    notes += checks.curve_warnings(
        c, y, exponent=parameters["exponent"], midpoint=parameters["midpoint"], posterior=posterior
    )
    return FitResult(
        name=curve.name,
        method=method,
        **parameters,
        intervals=intervals,
        n_points=len(c),
        rmse=float(np.sqrt(np.mean((y - sigmoid(c, **parameters)) ** 2))),
        warnings=(*curve.notes, *dict.fromkeys(notes)),
        compute=c,
        pass_rate=y,
        posterior=posterior,
        unit=curve.unit,
    )


def _assumed_start(y: Array) -> str:
    candidates = initial_candidates(y)
    assumed = f"the fit averages over R_0 = {candidates[0]:.3f} to {candidates[-1]:.3f}, near or below early points"
    return f"R_0 is missing: no pass rate at compute 0 was given; {assumed}"


def _window(
    c: Array, method: str, lower_bound: float | None, upper_bound: float | None
) -> tuple[NDArray[np.bool_], list[str]]:
    """(bool [n], True for a point whose compute lies in the window; notes for the user on the window)."""
    notes = []
    in_window = c >= (lower_bound or 0.0)
    if upper_bound is not None:
        in_window &= c <= upper_bound
    if lower_bound is None and method == "paper":
        later = in_window & (c >= FIT_FROM)
        if np.count_nonzero(later) >= 4:
            return later, []
        notes.append(
            f"fewer than 4 points lie beyond compute {FIT_FROM:g}: unlike in the paper, earlier points were fitted"
        )
    return in_window, notes


def _central_parameters(posterior: Posterior) -> dict[str, float]:
    """A, B, C_mid and R_0 of the reported sigmoid. A is the median of the draws. B and C_mid are geometric means over
    the tenth of the draws whose A is nearest to the median. R_0 is the given R_0, or else the median of the draws."""
    a = float(np.median(posterior.asymptote))
    near = np.argsort(np.abs(posterior.asymptote - a), kind="stable")[: max(len(posterior.asymptote) // 10, 1)]
    initial = float(np.median(posterior.initial))
    if posterior.observations.initial_given:
        initial = posterior.observations.initials[0]
    return {
        "asymptote": a,
        "exponent": float(np.exp(np.mean(np.log(posterior.exponent[near])))),
        "midpoint": float(np.exp(np.mean(np.log(posterior.midpoint[near])))),
        "initial": initial,
    }


def _intervals(posterior: Posterior, parameters: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    out = {}
    for key in PARAMETERS[:-1]:
        # widened to the fitted values: the grid's best cell, or the mean B and C_mid, may lie outside the quantiles
        lo, hi = np.quantile(posterior.parameters[key], [TAIL, 1.0 - TAIL])
        out[key] = (float(min(lo, parameters[key])), float(max(hi, parameters[key])))
    return out
