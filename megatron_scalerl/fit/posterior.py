"""Posterior of a run's sigmoid by summing over a grid: no chain, no starting value, nothing to converge.

Given (B, C_mid) the sigmoid is linear in A, so the likelihood is a bell in A whose centre and width are known:
only (log B, log C_mid) needs a grid, and A gets nodes of its own in every cell, where its bell is. The noise
variance is integrated out in closed form (inverse-gamma prior); the discrepancy hypotheses are summed. The grid
is laid again over the region that holds the mass until that region stops shrinking. The same data and seed give
the same draws, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_scalerl.fit.prior import Bounds, Discrepancy, Prior
from megatron_scalerl.fit.sigmoid import Array

Index = NDArray[np.integer[Any]]

COARSE, FINE = (24, 30), (56, 72)
"""Nodes along B and C_mid: of the grids that find the region, and of the one that is drawn from."""
ASYMPTOTE_NODES = 17
REACH = 5.0
"""Standard deviations of A on either side of its conditional best value that its nodes span."""
NEGLIGIBLE = 1e-5
"""Marginal mass below which a node lies outside the region that the next grid covers."""


@dataclass(frozen=True, kw_only=True)
class Observations:
    """The points of one fit. Compute is relative to `scale`, so that no unit reaches the posterior."""

    log_compute: Array
    """[n] log(C / scale)."""
    pass_rate: Array
    """[n]."""
    spread: Array
    """[n] variance of each point as a multiple of the common noise variance; outliers count more."""
    scale: float
    """Largest fitted compute, in the user's unit."""
    initials: tuple[float, ...]
    """The values of R_0 that are averaged: one where it was given exactly."""
    initial_weights: tuple[float, ...]
    """Prior weight of each."""
    noise_variance: float
    """Centre of the prior of the noise variance."""
    noise_shape: float
    """Shape of that inverse-gamma prior."""
    wander_unit: float
    """Mean p (1 - p) of the points over `noise_variance`: turns a wander's deviation into noise variances."""

    def ratio(self, hypothesis: Discrepancy) -> float:
        """Variance of the wander as a multiple of the variance of one measurement."""
        return hypothesis.deviation**2 * self.wander_unit


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Draws of the parameters of one run, and what a new measurement would read."""

    observations: Observations
    discrepancies: tuple[Discrepancy, ...]
    asymptote: Array
    """[draws]"""
    exponent: Array
    """[draws]"""
    log_midpoint: Array
    """[draws] log(C_mid / scale)."""
    initial: Array
    """[draws]"""
    noise_variance: Array
    """[draws] variance of one measurement."""
    hypothesis: Index
    """[draws] index into `discrepancies`."""
    seed: int

    @property
    def midpoint(self) -> Array:
        """[draws] C_mid in the user's unit."""
        return np.exp(self.log_midpoint) * self.observations.scale

    def curves(self, compute: Array) -> Array:
        """[draws, len(compute)] the sigmoids themselves, without wander and noise."""
        logit = self.exponent[:, None] * (self._log(compute)[None, :] - self.log_midpoint[:, None])
        share = 1.0 / (1.0 + np.exp(-np.clip(logit, -700.0, 700.0)))
        return self.initial[:, None] + (self.asymptote - self.initial)[:, None] * share

    def true_pass_rate(self, compute: Array) -> tuple[Array, Array]:
        """Mean and variance, both [draws, len(compute)], of the noise-free pass rate: sigmoid plus wander."""
        obs, new = self.observations, self._log(compute)
        mean = self.curves(compute)
        variance = np.zeros_like(mean)
        residual = obs.pass_rate - self.curves(np.exp(obs.log_compute) * obs.scale)
        for index, hypothesis in enumerate(self.discrepancies):
            rows = self.hypothesis == index
            if hypothesis.deviation == 0.0 or not rows.any():
                continue
            inverse = np.linalg.inv(covariance(obs, hypothesis))
            cross = obs.ratio(hypothesis) * correlation(new, obs.log_compute, hypothesis)
            mean[rows] += residual[rows] @ (inverse @ cross.T)
            left = obs.ratio(hypothesis) - ((cross @ inverse) * cross).sum(axis=1)
            variance[rows] = np.maximum(left, 0.0) * self.noise_variance[rows, None]
        return mean, variance

    def measured(self, compute: Array, *, noise_factor: float = 1.0) -> tuple[Array, Array]:
        """(centre [len(compute)], draws [draws, len(compute)]) of a new measurement at each compute.

        noise_factor: variance of the new measurement relative to the fitted ones (their validation size over
        the new one's).
        """
        mean, variance = self.true_pass_rate(compute)
        noise = np.random.default_rng([self.seed, 1]).standard_normal(mean.shape)
        spread = np.sqrt(variance + noise_factor * self.noise_variance[:, None])
        return np.clip(np.median(mean, axis=0), 0.0, 1.0), np.clip(mean + spread * noise, 0.0, 1.0)

    def weights(self) -> Array:
        """[hypotheses] share of the draws that each discrepancy hypothesis holds."""
        return np.bincount(self.hypothesis, minlength=len(self.discrepancies)) / len(self.hypothesis)

    def _log(self, compute: Array) -> Array:
        return np.log(np.asarray(compute, dtype=float)) - np.log(self.observations.scale)


def correlation(left: Array, right: Array, hypothesis: Discrepancy) -> Array:
    """[len(left), len(right)] correlation of the wander at two log computes."""
    return np.exp(-np.abs(left[:, None] - right[None, :]) / hypothesis.length)


def covariance(observations: Observations, hypothesis: Discrepancy) -> Array:
    """[n, n] covariance of the measured points around the sigmoid, in units of the noise variance."""
    x = observations.log_compute
    return np.diag(observations.spread) + observations.ratio(hypothesis) * correlation(x, x, hypothesis)


def sample(
    observations: Observations,
    *,
    prior: Prior,
    bounds: Bounds,
    fixed_asymptote: float | None = None,
    draws: int = 4000,
    seed: int = 0,
) -> Posterior:
    """Draw from the posterior of (A, B, C_mid, R_0, noise, hypothesis) given the points."""
    grid = _refined_grid(observations, prior, bounds, fixed_asymptote)
    rng = np.random.default_rng([seed, 0])
    flat = rng.choice(grid.mass.size, size=draws, p=grid.mass.ravel() / grid.mass.sum())
    start, hypothesis, i, j, k = np.unravel_index(flat, grid.mass.shape)
    log_b, log_m = _inside_cell(grid.log_b, i, rng), _inside_cell(grid.log_m, j, rng)
    initial = np.asarray(observations.initials)[start]
    standing = (
        grid.standing[start, hypothesis, i, j, k] + rng.uniform(-0.5, 0.5, draws) * grid.step[start, hypothesis, i, j]
    )
    posterior = Posterior(
        observations=observations,
        discrepancies=prior.discrepancies,
        asymptote=np.full(draws, np.nan if fixed_asymptote is None else fixed_asymptote),
        exponent=np.exp(log_b),
        log_midpoint=log_m,
        initial=initial,
        noise_variance=np.ones(draws),
        hypothesis=hypothesis,
        seed=seed,
    )
    if fixed_asymptote is None:
        posterior = replace(posterior, asymptote=_asymptotes(posterior, standing, bounds))
    shape = observations.noise_shape + len(observations.pass_rate) / 2
    scale = observations.noise_shape * observations.noise_variance + _misfit(posterior) / 2
    return replace(posterior, noise_variance=scale / rng.gamma(shape, size=draws))


def hypothesis_evidence(observations: Observations, *, prior: Prior, bounds: Bounds) -> Array:
    """[hypotheses] log marginal likelihood of the points under each of the prior's, up to one common constant."""
    grid = _refined_grid(observations, prior, bounds, None)
    weights = np.array([hypothesis.weight for hypothesis in prior.discrepancies])
    return np.log(np.maximum(grid.mass.sum(axis=(0, 2, 3, 4)), 1e-300)) - np.log(weights)


def log_prior(posterior: Posterior, prior: Prior) -> Array:
    """[draws] log density of `prior` at the draws, up to a constant; -inf where it lacks a draw's hypothesis."""
    known = {(d.deviation, d.length): d.weight for d in prior.discrepancies}
    with np.errstate(divide="ignore"):
        weights = np.log([known.get((d.deviation, d.length), 0.0) for d in posterior.discrepancies])
    share = (posterior.asymptote - posterior.initial) / (1.0 - posterior.initial)
    place = _log_normal(np.log(posterior.exponent), prior.log_exponent_mean, prior.log_exponent_sd)
    place = place + _log_midpoint_prior(posterior.log_midpoint, prior) + _log_gain_prior(share, prior)
    return place + weights[posterior.hypothesis]


def _asymptotes(posterior: Posterior, standing: Array, bounds: Bounds) -> Array:
    """[draws] A that stands `standing` standard deviations from the best A of each draw's own (B, C_mid).

    A draw lies anywhere in its cell, and the best A moves across the cell by more than its own width.
    """
    obs = posterior.observations
    logit = posterior.exponent[:, None] * (obs.log_compute - posterior.log_midpoint[:, None])
    share = 1.0 / (1.0 + np.exp(-np.clip(logit, -700.0, 700.0)))
    gain, width = np.empty(len(share)), np.empty(len(share))
    for index, hypothesis in enumerate(posterior.discrepancies):
        rows = posterior.hypothesis == index
        white = _whitening(obs, hypothesis)[0]
        shares, rises = share[rows] @ white.T, (obs.pass_rate - posterior.initial[rows, None]) @ white.T
        gain[rows], width[rows] = _bell(
            (rises**2).sum(axis=1), (shares * rises).sum(axis=1), (shares**2).sum(axis=1), obs
        )
    low = np.maximum(bounds.asymptote[0], posterior.initial)
    return np.clip(posterior.initial + gain + standing * width, low, bounds.asymptote[1])


def _misfit(posterior: Posterior) -> Array:
    obs = posterior.observations
    residual = obs.pass_rate - posterior.curves(np.exp(obs.log_compute) * obs.scale)
    out = np.zeros(len(residual))
    for index, hypothesis in enumerate(posterior.discrepancies):
        rows = posterior.hypothesis == index
        inverse = np.linalg.inv(covariance(obs, hypothesis))
        out[rows] = ((residual[rows] @ inverse) * residual[rows]).sum(axis=1)
    return out


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """The last grid. A's nodes differ from cell to cell, so they are kept relative to each cell's bell."""

    log_b: Array
    log_m: Array
    mass: Array
    """[initials, hypotheses, B, C_mid, nodes of A] posterior mass."""
    standing: Array
    """Like mass: each node's distance from the cell's best A, in standard deviations."""
    step: Array
    """[initials, hypotheses, B, C_mid] distance between two nodes of A, in standard deviations."""


def _inside_cell(axis: Array, index: Index, rng: np.random.Generator) -> Array:
    step = axis[1] - axis[0]
    return np.clip(axis[index] + rng.uniform(-0.5, 0.5, len(index)) * step, axis[0], axis[-1])


def _refined_grid(obs: Observations, prior: Prior, bounds: Bounds, fixed_asymptote: float | None) -> _Grid:
    limits = [np.log(bounds.exponent), np.log(bounds.midpoint)]
    box = list(limits)
    for _ in range(8):
        grid = _grid(obs, prior, bounds, fixed_asymptote, _axes(box, COARSE))
        cells = grid.mass.sum(axis=(0, 1, 4))
        smaller = [
            _region(cells.sum(axis=1), grid.log_b, limits[0]),
            _region(cells.sum(axis=0), grid.log_m, limits[1]),
        ]
        settled = all(np.ptp(new) > 0.7 * np.ptp(old) for new, old in zip(smaller, box))
        box = smaller
        if settled:
            break
    return _grid(obs, prior, bounds, fixed_asymptote, _axes(box, FINE))


def _axes(box: list[Array], counts: tuple[int, int]) -> list[Array]:
    return [np.linspace(side[0], side[1], count) for side, count in zip(box, counts)]


def _region(marginal: Array, nodes: Array, limit: Array) -> Array:
    kept = np.flatnonzero(marginal > NEGLIGIBLE * marginal.sum())
    margin = nodes[1] - nodes[0]
    return np.array([max(nodes[kept[0]] - margin, limit[0]), min(nodes[kept[-1]] + margin, limit[1])])


def _grid(obs: Observations, prior: Prior, bounds: Bounds, fixed_asymptote: float | None, axes: list[Array]) -> _Grid:
    log_b, log_m = axes
    n, cells = len(obs.log_compute), (len(log_b), len(log_m))
    logit = np.exp(log_b)[:, None, None] * (obs.log_compute - log_m[None, :, None])
    share = (1.0 / (1.0 + np.exp(-np.clip(logit, -700.0, 700.0)))).reshape(-1, n)
    place = _log_normal(log_b, prior.log_exponent_mean, prior.log_exponent_sd)[:, None]
    place = place + _log_midpoint_prior(log_m, prior)[None, :]
    nodes = ASYMPTOTE_NODES if fixed_asymptote is None else 1
    sizes = (len(obs.initials), len(prior.discrepancies), *cells)
    log_mass, standing, step = np.empty((*sizes, nodes)), np.empty((*sizes, nodes)), np.empty(sizes)
    shape, centre = obs.noise_shape + n / 2, obs.noise_shape * obs.noise_variance
    for h, hypothesis in enumerate(prior.discrepancies):
        white, volume = _whitening(obs, hypothesis)
        shares = share @ white.T
        square = (shares**2).sum(axis=1).reshape(cells)
        for r, initial in enumerate(obs.initials):
            rise = white @ (obs.pass_rate - initial)
            cross = (shares @ rise).reshape(cells)
            best, width = _bell(rise @ rise, cross, square, obs)
            gain, step[r, h] = _gain_nodes(best, width, initial, bounds, fixed_asymptote)
            misfit = rise @ rise - 2.0 * cross[..., None] * gain + square[..., None] * gain**2
            likelihood = volume - shape * np.log(centre + np.maximum(misfit, 0.0) / 2)
            weight = np.log(hypothesis.weight * obs.initial_weights[r]) + np.log(step[r, h])[..., None]
            gain_prior = _log_gain_prior(gain / (1.0 - initial), prior)
            log_mass[r, h] = likelihood + place[..., None] + weight + gain_prior
            standing[r, h] = (gain - best[..., None]) / width[..., None]
            step[r, h] /= width
    mass = np.exp(log_mass - log_mass.max())
    return _Grid(log_b=log_b, log_m=log_m, mass=mass, standing=standing, step=step)


def _whitening(obs: Observations, hypothesis: Discrepancy) -> tuple[Array, float]:
    """(W, log det W): W turns residuals into independent ones of the noise's variance."""
    lower = np.linalg.cholesky(covariance(obs, hypothesis))
    return np.linalg.inv(lower), -float(np.log(np.diag(lower)).sum())


def _bell(total: Array, cross: Array, square: Array, obs: Observations) -> tuple[Array, Array]:
    """(best gain, its standard deviation) where the misfit is total - 2 cross gain + square gain^2."""
    square = np.maximum(square, 1e-12)
    best = cross / square
    left = np.maximum(total - cross * best, 0.0)
    variance = (obs.noise_shape * obs.noise_variance + left / 2) / (obs.noise_shape + len(obs.pass_rate) / 2)
    return best, np.sqrt(variance / square)


def _gain_nodes(
    best: Array, width: Array, initial: float, bounds: Bounds, fixed_asymptote: float | None
) -> tuple[Array, Array]:
    """([..., nodes] gains A - R_0 around each cell's best one and inside the bounds, [...] their distance)."""
    if fixed_asymptote is not None:
        return np.full((*best.shape, 1), fixed_asymptote - initial), np.ones_like(best)
    low, high = max(bounds.asymptote[0] - initial, 0.0), bounds.asymptote[1] - initial
    sliver = 1e-3 * (high - low)
    left = np.clip(best - REACH * width, low, high - sliver)
    right = np.clip(best + REACH * width, low + sliver, high)
    step = (right - left) / ASYMPTOTE_NODES
    return left[..., None] + step[..., None] * (np.arange(ASYMPTOTE_NODES) + 0.5), step


def _log_normal(x: Array, mean: float, sd: float) -> Array:
    return -0.5 * ((x - mean) / sd) ** 2 - np.log(sd)


def _log_midpoint_prior(log_m: Array, prior: Prior) -> Array:
    usual = (1.0 - prior.late_share) * np.exp(_log_normal(log_m, prior.log_midpoint_mean, prior.log_midpoint_sd))
    late = prior.late_share * np.exp(_log_normal(log_m, prior.late_mean, prior.late_sd))
    return np.log(np.maximum(usual + late, 1e-300))


def _log_gain_prior(share: Array, prior: Prior) -> Array:
    inside = np.clip(share, 1e-6, 1.0 - 1e-6)
    density = (prior.gain_alpha - 1.0) * np.log(inside) + (prior.gain_beta - 1.0) * np.log1p(-inside)
    return density
