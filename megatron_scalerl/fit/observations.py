"""The observation model of a run's points: what is measured, how noisy it is, and which R_0 it starts from."""

import numpy as np

from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.noise import binomial, pooled, scatter, smoothed, validation_noise
from megatron_scalerl.fit.prior import FLAT_PRIOR, Discrepancy, Prior
from megatron_scalerl.fit.sigmoid import Array
from megatron_scalerl.record import record

NOISY = 0.01
"""Scatter of the points (standard deviation, in pass rate) from which a given R_0 of unknown size is not exact."""


@record
class Observations:
    """The points of one fit. Compute is relative to `scale`, so the posterior does not depend on its unit."""

    log_compute: Array
    """[n] log(C / scale), ascending, at most 0."""
    pass_rate: Array
    """[n] in [0, 1]."""
    spread: Array
    """[n] variance of each point as a multiple of the common noise variance."""
    spread_unit: float
    """p (1 - p) / completions of a point whose `spread` is 1."""
    completions: float | None
    """Completions of a usual point: their median; None if unknown."""
    scale: float
    """Largest fitted compute, in the user's unit."""
    initials: tuple[float, ...]
    """Values of R_0 to average over: one if it is exact, three if it was measured, more if it is unknown."""
    initial_weights: tuple[float, ...]
    """Prior weight of each."""
    initial_given: bool
    """Whether R_0 is known: the first of `initials`."""
    noise_variance: float
    """Center of the prior of the noise variance, in pass rate squared."""
    noise_shape: float
    """Shape of that inverse-gamma prior."""
    discrepancy_unit: float
    """Mean p (1 - p) of the points over `noise_variance`: converts a discrepancy's deviation to noise variances."""

    @property
    def compute(self) -> Array:
        """[n] in the user's unit."""
        return np.exp(self.log_compute) * self.scale

    def deviation(self, left: Array, right: Array, hypothesis: Discrepancy) -> Array:
        """[len(left), len(right)] covariance of the deviation at two log computes, in units of the noise variance."""
        return self.discrepancy_unit * deviation_covariance(left, right, hypothesis, float(self.log_compute[0]))


def deviation_covariance(left: Array, right: Array, hypothesis: Discrepancy, start: float) -> Array:
    """[len(left), len(right)] covariance of the deviation at two log(C / fitted compute), as a share of p (1 - p).

    start: log compute of the first point, from which the walk goes on.
    """
    walked = np.minimum(left[:, None], right[None, :]) - start
    turned = [np.maximum(x - np.log(hypothesis.turn_from), 0.0) for x in (left, right)]
    walk = hypothesis.walk**2 * np.maximum(walked, 0.0)
    return hypothesis.level**2 + walk + hypothesis.turn**2 * np.outer(*turned)


def covariance(observations: Observations, hypothesis: Discrepancy) -> Array:
    """[n, n] covariance of the measured points around the sigmoid, in units of the noise variance."""
    x = observations.log_compute
    return np.diag(observations.spread) + observations.deviation(x, x, hypothesis)


def observe(curve: Curve, prior: Prior, *, highest: float | None = None) -> Observations:
    """The observation model of a run's points under `prior`; many points are pooled.

    highest: A, if it is held: only values of R_0 below it are averaged over.
    Raises ValueError for sizes that cannot be, and where no R_0 is below `highest`.
    """
    noise = validation_noise(curve)
    each = np.ones(len(curve.pass_rate))
    usual = None
    share = prior.noise_share
    share_of_initial = 0.0
    if noise is not None:
        each = noise.completions
        usual = float(np.median(each))
        share = noise.share or share
        share_of_initial = share / noise.initial_completions
    c, y, completions = pooled(curve.compute, curve.pass_rate, each)
    # not that of y itself: of eight completions that are all wrong by chance the noise would be none
    variance_of_one = binomial(smoothed(y))
    spread = variance_of_one / completions
    if noise is None:
        variance = prior.unknown_noise**2 / float(completions.mean())
    else:
        variance = share * float(spread.mean())
    initials, weights = _initials(curve, share_of_initial, exact=prior is FLAT_PRIOR)
    if highest is not None:
        kept = [node for node in zip(initials, weights) if node[0] < highest]
        if not kept:
            raise ValueError(f"fixed asymptote: expected a value above R_0, {min(initials):.3f}, found {highest!r}")
        initials, weights = zip(*kept)
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
        noise_shape=prior.noise_shape,
        discrepancy_unit=float(variance_of_one.mean()) / variance,
    )


def _initials(curve: Curve, share: float, *, exact: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(values of R_0, their weights). share: variance of a measured R_0 as a share of p (1 - p); 0: not known.

    exact: whether a given R_0 is taken to have no noise. An R_0 whose size is not known has the noise that the run
    shows, where it shows much.
    """
    if curve.initial is None:
        candidates = initial_candidates(curve.pass_rate)
        return tuple(candidates), tuple(1.0 / len(candidates) for _ in candidates)
    shown = 0.0
    if share == 0.0:
        shown = scatter(curve.pass_rate)
    if exact or (share == 0.0 and shown <= NOISY):
        return (curve.initial,), (1.0,)
    # Gauss-Hermite: R_0 was measured with noise, too
    error = float(np.sqrt(3.0) * max(shown, np.sqrt(share * binomial(curve.initial))))
    nodes = (curve.initial, max(curve.initial - error, 0.0), min(curve.initial + error, 0.999))
    return nodes, (2.0 / 3.0, 1.0 / 6.0, 1.0 / 6.0)


def initial_candidates(y: Array) -> list[float]:
    """Five candidates for an unknown R_0: from the first points' mean down by half of the rise seen so far.

    Noise of the first points moves the range to either side by 1.5 standard errors, where it is not small.
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
