"""The observation model of a run's points: measured pass rates, the noise of a measurement, and R_0.

The noise of a measured pass rate comes from the sampling of completions alone: every validation has the same prompts,
so the variance between prompts is no noise of the curve. The variance of a pass rate is the mean over prompts of one
completion's variance (`within_variance`), divided by the number of completions. `within_variance` is measured where a
prompt has several generations; its share of p (1 - p) is taken to be equal for all points of a run.
"""

import math
from dataclasses import field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.prior import FLAT_PRIOR, Discrepancy, Prior
from megatron_scalerl.fit.sigmoid import Array
from megatron_scalerl.record import record

SHARES = (0.2, 1.0)
"""Lowest and highest noise variance of one completion, as shares of p (1 - p) for a pass rate p. A measured variance
is clipped to this range."""
LEAST_BINOMIAL = 0.001
"""Lower bound of p (1 - p), so that a validation whose completions are all right by chance has noise."""
NEIGHBORS = 5
"""Number of points of the moving average of the pass rate from which the noise is computed."""
HIGHEST_VARIANCE = 0.5
"""Highest sample variance of one completion: the variance of one right and one wrong completion."""
MOST_COMPLETIONS = 1e9
"""Largest number of completions of a validation. With more, the noise would vanish in rounding errors."""
MOST_POINTS = 128
"""Largest number of points of a fit, which takes memory ~ n^2 and time ~ n^3. A run with more points is reduced to
averages of neighbors."""
NOISY = 0.01
"""Noise of the points (standard deviation, in pass rate) above which a given R_0 is taken to have the same noise.

This applies if the size of the validation that measured R_0 is unknown."""


@record
class ValidationNoise:
    """Sizes of a run's validations and the measured noise of one completion."""

    completions: Array = field(repr=False)
    """[n] prompts x generations of each point."""
    initial_completions: float
    """Prompts x generations of R_0."""
    share: float | None
    """Variance of one completion as a share of p (1 - p), measured on this run; None if not measured."""


def binomial(pass_rate: ArrayLike) -> Array:
    """Variance p (1 - p) of one completion at pass rate p, at least `LEAST_BINOMIAL`; in the shape of `pass_rate`."""
    p = np.clip(np.asarray(pass_rate, dtype=float), 0.0, 1.0)
    return np.asarray(np.maximum(p * (1.0 - p), LEAST_BINOMIAL))


def validation_noise(curve: Curve) -> ValidationNoise | None:
    """The noise of the points of a run; None if the size of the validations is unknown.

    Raises ValueError for a size outside of [1, `MOST_COMPLETIONS`], or a variance outside of [0, `HIGHEST_VARIANCE`].
    """
    for key in ("prompts", "generations", "initial_generations"):
        _check(key, getattr(curve, key), 1.0, MOST_COMPLETIONS)
    for key in ("within_variance", "initial_within_variance"):
        _check(key, getattr(curve, key), 0.0, HIGHEST_VARIANCE, allow_nan=True)
    if curve.prompts is None or curve.generations is None:
        return None
    first = float(curve.initial_generations or np.median(curve.generations))
    # None, for a run without measured variances, becomes nan
    within = np.broadcast_to(np.asarray(curve.within_variance, dtype=float), len(curve.pass_rate))
    values = np.array([*within, curve.initial_within_variance], dtype=float)
    rates = np.array([*curve.pass_rate, curve.initial], dtype=float)
    counts = np.append(curve.generations, first)
    is_measured = np.isfinite(values) & np.isfinite(rates)
    share = None
    if is_measured.any():
        measured = values[is_measured] @ counts[is_measured]
        full = (rates[is_measured] * (1.0 - rates[is_measured])) @ counts[is_measured]
        share = float(np.clip(measured / max(full, 1e-9), *SHARES))
    return ValidationNoise(
        completions=curve.prompts * curve.generations, initial_completions=curve.prompts * first, share=share
    )


def _check(key: str, numbers: ArrayLike | None, lowest: float, highest: float, *, allow_nan: bool = False) -> None:
    if numbers is None:
        return
    values = np.atleast_1d(np.asarray(numbers, dtype=float))
    valid = (values >= lowest) & (values <= highest) | (allow_nan & np.isnan(values))
    if not np.all(valid):
        raise ValueError(f"{key} is {first_invalid(values, valid)}; it has to be in [{lowest:g}, {highest:g}]")


def first_invalid(values: Array, valid: NDArray[np.bool_]) -> str:
    """Text with the first invalid value and the number of its point. values, valid: [n]."""
    index = int(np.flatnonzero(~valid)[0])
    text = f"{float(values[index])!r}"
    if len(values) > 1:
        text += f" at point {index + 1}"
    return text


def smoothed_rates(pass_rate: Array) -> Array:
    """[n] moving average of the pass rates [n] over `NEIGHBORS` points, fewer at the ends."""
    window = np.ones(NEIGHBORS)
    reach = NEIGHBORS // 2
    sums, counts = (np.convolve(values, window)[reach:-reach] for values in (pass_rate, np.ones(len(pass_rate))))
    return np.asarray(sums / counts)


def scatter(pass_rate: Array) -> float:
    """Standard deviation of a point's noise, estimated from the median second difference of successive points.

    pass_rate: [n], in the order of compute. 0 for fewer than four points.
    """
    if len(pass_rate) < 4:
        return 0.0
    # 0.6745 is the median of |N(0, 1)|; a second difference of noise has a variance of 1 + 4 + 1
    bend = np.abs(np.diff(pass_rate, n=2))
    return float(np.median(bend)) / (0.6745 * math.sqrt(6.0))


def pooled_points(c: Array, y: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Reduce points to at most `MOST_POINTS` means of neighbors, weighted by completions. Fewer points are unchanged.

    c, y, weights: [n] compute > 0, ascending, pass rate, completions. Neighbors are pooled over at most 1/64 of the
    points and 1/64 of the range of log compute, so that neither the early rise nor the end is blurred.
    Returns the geometric mean of c, the mean of y and the sum of weights, each [<= MOST_POINTS].
    """
    if len(c) <= MOST_POINTS:
        return c, y, weights
    log_c = np.log(c)
    ranks = np.arange(len(c)) / len(c)
    levels = (log_c - log_c[0]) / max(log_c[-1] - log_c[0], 1e-12)
    # a bin is the mean of rank and level, which both ascend: so each bin holds points that are neighbors
    bins = np.minimum(MOST_POINTS * (ranks + levels) / 2.0, MOST_POINTS - 1).astype(int)
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    total = np.add.reduceat(weights, starts)
    means = [np.add.reduceat(weights * values, starts) / total for values in (log_c, y)]
    return np.exp(means[0]), means[1], total


@record
class Observations:
    """The points of one fit. Compute is relative to `scale`, so the posterior does not depend on its unit."""

    log_compute: Array
    """[n] log(C / scale), ascending, at most 0."""
    pass_rate: Array
    """[n] measured pass rates in [0, 1]."""
    spread: Array
    """[n] variance of each point as a multiple of the common noise variance."""
    spread_unit: float
    """p (1 - p) / completions of a point whose `spread` is 1."""
    completions: float | None
    """Median of the points' completions; None if unknown."""
    scale: float
    """Largest fitted compute, in the user's unit."""
    initials: tuple[float, ...]
    """Values of R_0 to average over: one for an exact R_0, three for a measured R_0, more for an unknown R_0."""
    initial_weights: tuple[float, ...]
    """Prior weight of each value of R_0."""
    initial_given: bool
    """Whether R_0 is given. A given R_0 is the first of `initials`."""
    noise_variance: float
    """Center of the prior of the noise variance, in pass rate squared."""
    noise_shape: float
    """Shape of the inverse-gamma prior of the noise variance."""
    discrepancy_unit: float
    """Factor that converts a variance in shares of p (1 - p) to units of `noise_variance`: the mean p (1 - p) of the
    points divided by `noise_variance`."""

    @property
    def compute(self) -> Array:
        """[n] compute in the user's unit."""
        return np.exp(self.log_compute) * self.scale

    def deviation(self, rows: Array, columns: Array, hypothesis: Discrepancy) -> Array:
        """Covariance of the run's deviation from its sigmoid at log computes `rows` and `columns`.

        Returns [len(rows), len(columns)], in units of the noise variance.
        """
        return self.discrepancy_unit * deviation_covariance(rows, columns, hypothesis, float(self.log_compute[0]))


def deviation_covariance(rows: Array, columns: Array, hypothesis: Discrepancy, start: float) -> Array:
    """Covariance of a run's deviation from its sigmoid at log(C / fitted compute) `rows` and `columns`.

    start: log compute of the first point, at which the random walk starts.
    Returns [len(rows), len(columns)], as shares of p (1 - p).
    """
    # a random walk has the covariance min(s, t); a turn is one random slope, so the turn's part has rank one
    walked = np.minimum(rows[:, None], columns[None, :]) - start
    turned = [np.maximum(x - np.log(hypothesis.turn_from), 0.0) for x in (rows, columns)]
    walk = hypothesis.walk**2 * np.maximum(walked, 0.0)
    return hypothesis.level**2 + walk + hypothesis.turn**2 * np.outer(*turned)


def covariance(observations: Observations, hypothesis: Discrepancy) -> Array:
    """[n, n] covariance of the measured points around the sigmoid, in units of the noise variance."""
    x = observations.log_compute
    return np.diag(observations.spread) + observations.deviation(x, x, hypothesis)


def observe(curve: Curve, prior: Prior, *, highest: float | None = None) -> Observations:
    """The observation model of a run's points under `prior`; more than `MOST_POINTS` points are pooled.

    highest: largest A that the fit allows; only values of R_0 below this A are averaged over.
    Raises ValueError for sizes or variances out of range, and if no R_0 is below `highest`.
    """
    noise = validation_noise(curve)
    completions_of_points = np.ones(len(curve.pass_rate))
    usual = None
    share = prior.noise_share
    share_of_initial = 0.0
    if noise is not None:
        completions_of_points = noise.completions
        usual = float(np.median(completions_of_points))
        share = noise.share or share
        share_of_initial = share / noise.initial_completions
    c, y, completions = pooled_points(curve.compute, curve.pass_rate, completions_of_points)
    # the rates are smoothed, since eight completions that are all wrong by chance would have no noise
    variance_of_one = binomial(smoothed_rates(y))
    spread = variance_of_one / completions
    variance = prior.unknown_noise**2 / float(completions.mean())
    shape = prior.unknown_noise_shape
    if noise is not None:
        variance = share * float(spread.mean())
        shape = prior.noise_shape
    initials, weights = _initials(curve, share_of_initial, exact=prior is FLAT_PRIOR)
    if highest is not None:
        nodes = [node for node in zip(initials, weights) if node[0] < highest]
        if not nodes:
            raise ValueError(f"fixed asymptote: {highest!r} is not above R_0 ({min(initials):.3f})")
        initials, weights = zip(*nodes)
    return Observations(
        log_compute=np.log(c) - np.log(c.max()),
        pass_rate=y,
        spread=spread / spread.mean(),
        spread_unit=float(spread.mean()),
        completions=usual,
        scale=float(c.max()),
        initials=initials,
        initial_weights=weights,
        initial_given=curve.initial is not None,
        noise_variance=variance,
        noise_shape=shape,
        discrepancy_unit=float(variance_of_one.mean()) / variance,
    )


def _initials(curve: Curve, share: float, *, exact: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(values of R_0, their weights). share: variance of a measured R_0 as a share of p (1 - p); 0: not known.

    exact: whether a given R_0 is taken to have no noise. An R_0 from a validation of unknown size has the noise of
    the run's points, if this noise is above `NOISY`.
    """
    if curve.initial is None:
        candidates = initial_candidates(curve.pass_rate)
        return tuple(candidates), tuple(1.0 / len(candidates) for _ in candidates)
    scatter_of_points = 0.0
    if share == 0.0:
        scatter_of_points = scatter(curve.pass_rate)
    if exact or (share == 0.0 and scatter_of_points <= NOISY):
        return (curve.initial,), (1.0,)
    # three Gauss-Hermite nodes average over R_0, which was measured with noise as well
    error = float(np.sqrt(3.0) * max(scatter_of_points, np.sqrt(share * binomial(curve.initial))))
    # R_0 is below 1: the gain is a share of the room above R_0, and an R_0 of 1 leaves no room
    nodes = (curve.initial, max(curve.initial - error, 0.0), min(curve.initial + error, 0.999))
    return nodes, (2.0 / 3.0, 1.0 / 6.0, 1.0 / 6.0)


def initial_candidates(y: Array) -> list[float]:
    """Candidates for an unknown R_0, at most five: from the mean of the first points down to half of the run's rise
    below.

    The low end is lowered by 1.5 standard errors of the first points' mean. If 1.5 standard errors exceed 15 % of the
    rise, the high end is raised as much.
    """
    width = min(3, max(len(y) // 4, 1))
    means = np.convolve(y, np.ones(width) / width, mode="valid")
    first = min(float(means[0]), 0.999)
    rise = max(float(means.max() - means[0]), 0.02)
    error = 1.5 * scatter(y) / np.sqrt(width)
    highest = first
    if error > 0.15 * rise:
        highest += error
    return sorted({float(np.clip(r, 0.0, 0.999)) for r in np.linspace(highest, first - 0.5 * rise - error, 5)})
