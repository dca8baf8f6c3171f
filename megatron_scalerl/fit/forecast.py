"""Fit a run's compute-performance curve and forecast it: the front door of `megatron_scalerl.fit`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_scalerl.fit import checks
from megatron_scalerl.fit.paper import ASYMPTOTES, FIT_FROM, PaperFit, fit_paper
from megatron_scalerl.fit.posterior import Observations, Posterior, covariance, sample
from megatron_scalerl.fit.prior import DEFAULT_PRIOR, FLAT_PRIOR, Bounds, Prior
from megatron_scalerl.fit.result import TAIL, FitResult
from megatron_scalerl.fit.sigmoid import Array, sigmoid

METHODS = ("robust", "paper")
SUSPICIOUS = 3.0
"""Standardised leave-one-out residual from which a point is taken for an outlier and weighs less."""
TAIL_FREEDOM = 4.0
"""Degrees of freedom of the Student t whose weights outliers get."""


def fit(
    compute: Sequence[float] | Array,
    pass_rate: Sequence[float] | Array,
    *,
    initial: float | None,
    method: str = "robust",
    prompts: int | None = None,
    generations: int | None = None,
    seed: int = 0,
    name: str = "run",
    unit: str = "gpu_hours",
    fit_from: float | None = None,
    fit_until: float | None = None,
    fixed_asymptote: float | None = None,
    truncated_share: Sequence[float] | Array | None = None,
    prior: Prior = DEFAULT_PRIOR,
    bounds: Bounds | None = None,
    draws: int = 4000,
) -> FitResult:
    """Fit eq. 1 of Khatri et al. (2025) to a run's validation points.

    compute:     [n] training compute of each point, any positive unit, any order.
    pass_rate:   [n] validation pass rate (mean@k) in [0, 1].
    initial:     R_0, the run's own pass rate before RL. None: a point at compute 0 if there is one, else a
                 range below the first point is averaged over, and a warning says so.
    method:      "robust" (posterior over weak unit-free priors, correlated residuals) or "paper" (A.5).
    prompts, generations: validation size; the binomial noise of a point follows from it.
    fit_from, fit_until: window of compute that is fitted. `paper` leaves out what comes before 1.5k unless
                 told otherwise or the run is too short for it.
    truncated_share: [n] share of truncated completions of each point, for the warning.
    Raises ValueError for what cannot be fitted, in one line.
    """
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, found {method!r}")
    c, y, truncated = _clean(compute, pass_rate, truncated_share)
    notes: list[str] = []
    initial, notes = _known_initial(c, y, initial)
    if fixed_asymptote is not None and not (initial or 0.0) < fixed_asymptote <= 1.0:
        raise ValueError(f"fixed asymptote: expected a value in (R_0, 1], found {fixed_asymptote!r}")
    kept, window_notes = _window(c, method, fit_from, fit_until)
    notes += window_notes
    c, y, truncated = c[kept], y[kept], None if truncated is None else truncated[kept]
    if len(c) < 3:
        raise ValueError(f"{name}: expected at least 3 points with compute > 0 in the window, found {len(c)}")
    prior = prior if method == "robust" else FLAT_PRIOR
    obs = observe(c, y, initial, prompts=prompts, generations=generations, prior=prior)
    solve = _solve_robust if method == "robust" else _solve_paper
    solution = solve(obs, prior, bounds or Bounds(), fixed_asymptote, draws, seed)
    notes += solution.notes
    notes += checks.truncation_warning(c, truncated)
    return _result(c, y, solution, notes, name=name, method=method, unit=unit)


@dataclass(frozen=True, kw_only=True)
class _Solution:
    """What either method finds."""

    parameters: tuple[float, float, float, float]
    """A, B, C_mid, R_0."""
    posterior: Posterior
    notes: list[str]


def _result(
    c: Array, y: Array, solution: _Solution, notes: list[str], *, name: str, method: str, unit: str
) -> FitResult:
    a, b, m, r0 = solution.parameters
    fitted = sigmoid(c, asymptote=a, exponent=b, midpoint=m, initial=r0)
    notes = notes + checks.curve_warnings(c, y, exponent=b, midpoint=m, posterior=solution.posterior)
    return FitResult(
        name=name,
        method=method,
        asymptote=a,
        exponent=b,
        midpoint=m,
        initial=r0,
        intervals=_intervals(solution.posterior, a, b, m),
        n_points=len(c),
        rmse=float(np.sqrt(np.mean((y - fitted) ** 2))),
        warnings=tuple(dict.fromkeys(notes)),
        compute=c,
        pass_rate=y,
        posterior=solution.posterior,
        unit=unit,
    )


def _solve_robust(
    obs: Observations, prior: Prior, bounds: Bounds, fixed_asymptote: float | None, draws: int, seed: int
) -> _Solution:
    options = {"fixed_asymptote": fixed_asymptote, "draws": draws, "seed": seed}
    posterior = robust_posterior(obs, prior, bounds, options)
    notes = checks.posterior_edges(posterior, bounds, fixed=fixed_asymptote is not None)
    return _Solution(parameters=_central(posterior), posterior=posterior, notes=notes)


def _solve_paper(
    obs: Observations, prior: Prior, bounds: Bounds, fixed_asymptote: float | None, draws: int, seed: int
) -> _Solution:
    del prior, bounds  # the paper's grid is its own box, and it has no opinion
    (initial,) = obs.initials[:1]
    if initial >= ASYMPTOTES[-1] and fixed_asymptote is None:
        raise ValueError(f"method paper: expected R_0 below its highest A, {ASYMPTOTES[-1]:g}, found {initial:.3f}")
    compute = np.exp(obs.log_compute) * obs.scale
    grid = fit_paper(compute, obs.pass_rate, initial=initial, fixed_asymptote=fixed_asymptote)
    box = _paper_bounds(grid, obs.scale)
    posterior = sample(obs, prior=FLAT_PRIOR, bounds=box, fixed_asymptote=fixed_asymptote, draws=draws, seed=seed)
    parameters = (grid.asymptote, grid.exponent, grid.midpoint, initial)
    return _Solution(parameters=parameters, posterior=posterior, notes=checks.grid_edges(grid))


def _clean(
    compute: ArrayLike, pass_rate: ArrayLike, truncated_share: ArrayLike | None
) -> tuple[Array, Array, Array | None]:
    c, y = np.asarray(compute, dtype=float), np.asarray(pass_rate, dtype=float)
    if c.ndim != 1 or c.shape != y.shape:
        raise ValueError(f"expected compute and pass_rate of one length, found shapes {c.shape} and {y.shape}")
    if not (np.all(np.isfinite(c)) and np.all(c >= 0)):
        raise ValueError("compute: expected finite values >= 0, found " + _first(c, np.isfinite(c) & (c >= 0)))
    inside = np.isfinite(y) & (y >= 0) & (y <= 1)
    if not np.all(inside):
        raise ValueError("pass_rate: expected values in [0, 1], found " + _first(y, inside))
    order = np.argsort(c, kind="stable")
    truncated = None if truncated_share is None else np.asarray(truncated_share, dtype=float)[order]
    return c[order], y[order], truncated


def _first(values: Array, good: NDArray[np.bool_]) -> str:
    index = int(np.flatnonzero(~good)[0])
    return f"{values[index]!r} at point {index + 1}"


def _known_initial(c: Array, y: Array, initial: float | None) -> tuple[float | None, list[str]]:
    if initial is not None:
        if not 0.0 <= initial < 1.0:
            raise ValueError(f"initial: expected R_0 in [0, 1), found {initial!r}")
        return float(initial), []
    if np.any(c == 0):
        return float(y[c == 0].mean()), []
    return None, [
        "R_0 is missing: no pass rate at compute 0 was given; assumed between "
        f"{_assumed(y)[0]:.3f} and {_assumed(y)[-1]:.3f}, at or below the first point"
    ]


def _assumed(y: Array) -> list[float]:
    """Candidates for an unknown R_0: from the first point down by half of the rise seen so far."""
    first, rise = min(float(y[0]), 0.999), max(float(y.max() - y[0]), 0.02)
    return sorted({max(first - share * rise, 0.0) for share in (0.0, 0.125, 0.25, 0.375, 0.5)})


def _window(c: Array, method: str, low: float | None, high: float | None) -> tuple[NDArray[np.bool_], list[str]]:
    notes = []
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


def observe(
    c: Array, y: Array, initial: float | None, *, prompts: int | None, generations: int | None, prior: Prior
) -> Observations:
    """What `prior` makes of points with compute > 0, ascending, before it is fitted."""
    for key, number in (("prompts", prompts), ("generations", generations)):
        if number is not None and number < 1:
            raise ValueError(f"{key}: expected a whole number >= 1, found {number!r}")
    size = None if prompts is None or generations is None else prompts * generations
    binomial = np.clip(y * (1.0 - y), 0.01, None)
    if size is not None:
        variance = prior.noise_share * float(binomial.mean()) / size
        shape = prior.noise_shape
    else:
        variance, shape = prior.unknown_noise**2, prior.unknown_noise_shape
    if initial is None:
        initials = tuple(_assumed(y))
        weights = tuple(1.0 / len(initials) for _ in initials)
    elif size is not None and prior is not FLAT_PRIOR:
        error = math.sqrt(3.0 * prior.noise_share * initial * (1.0 - initial) / size)
        initials = (initial, max(initial - error, 0.0), min(initial + error, 0.999))
        weights = (2.0 / 3.0, 1.0 / 6.0, 1.0 / 6.0)  # Gauss-Hermite: R_0 was measured, with the same noise
    else:
        initials, weights = (initial,), (1.0,)
    return Observations(
        log_compute=np.log(c) - np.log(c.max()),
        pass_rate=y,
        spread=binomial / binomial.mean(),
        scale=float(c.max()),
        initials=initials,
        initial_weights=weights,
        noise_variance=variance,
        noise_shape=shape,
        wander_unit=float(binomial.mean()) / variance,
    )


def robust_posterior(obs: Observations, prior: Prior, bounds: Bounds, options: dict) -> Posterior:
    """Sample, lower the weight of points that their neighbours disown, and sample again."""
    first = sample(obs, prior=prior, bounds=bounds, **{**options, "draws": 500})
    residual = obs.pass_rate - np.median(first.curves(np.exp(obs.log_compute) * obs.scale), axis=0)
    distance = np.zeros(len(residual))
    for weight, hypothesis in zip(first.weights(), prior.discrepancies):
        inverse = np.linalg.inv(covariance(obs, hypothesis))
        distance += weight * (inverse @ residual) / np.sqrt(np.diag(inverse))
    # an outlier inflates the fitted noise, so the typical distance limits it; the known noise limits that
    typical = max(1.4826 * float(np.median(np.abs(distance))), math.sqrt(obs.noise_variance))
    z = distance / min(math.sqrt(float(np.median(first.noise_variance))), typical)
    excess = (TAIL_FREEDOM + z**2) / (TAIL_FREEDOM + 1.0)
    spread = np.where(np.abs(z) > SUSPICIOUS, obs.spread * np.maximum(excess, 1.0), obs.spread)
    weighted = Observations(**{**obs.__dict__, "spread": spread})
    return sample(weighted, prior=prior, bounds=bounds, **options)


def _central(posterior: Posterior) -> tuple[float, float, float, float]:
    """(A, B, C_mid, R_0): the median A, and the B and C_mid that go with it, so that they form one curve."""
    a = float(np.median(posterior.asymptote))
    near = np.argsort(np.abs(posterior.asymptote - a), kind="stable")[: max(len(posterior.asymptote) // 10, 1)]
    b = float(np.exp(np.mean(np.log(posterior.exponent[near]))))
    m = float(np.exp(np.mean(np.log(posterior.midpoint[near]))))
    initials = posterior.observations.initials
    given = len(initials) == 3
    return a, b, m, float(initials[0] if given or len(initials) == 1 else np.median(posterior.initial))


def _intervals(posterior: Posterior, a: float, b: float, m: float) -> dict[str, tuple[float, float]]:
    out = {}
    for key, draws, point in (
        ("asymptote", posterior.asymptote, a),
        ("exponent", posterior.exponent, b),
        ("midpoint", posterior.midpoint, m),
    ):
        lo, hi = np.quantile(draws, [TAIL, 1.0 - TAIL])
        out[key] = (float(min(lo, point)), float(max(hi, point)))
    return out


def _paper_bounds(grid: PaperFit, scale: float) -> Bounds:
    low, high = grid.midpoint_range
    return Bounds(
        asymptote=(float(ASYMPTOTES[0]), float(ASYMPTOTES[-1])),
        exponent=(0.1, 20.0),
        midpoint=(low / scale, high / scale),
    )
