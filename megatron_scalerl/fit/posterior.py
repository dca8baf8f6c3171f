"""Posterior of a run's sigmoid by summing over a grid: no chain, no starting value, nothing to converge.

Given (B, C_mid) the sigmoid is linear in A, so the fit error is a quadratic in A and a three-dimensional
grid costs little more than a two-dimensional one. The noise variance is integrated out in closed form
(inverse-gamma prior), the discrepancy hypotheses are summed. The grid is laid three times, each time over the
region that holds the mass of the last. The same data and seed give the same draws, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .prior import Bounds, Discrepancy, Prior
from .sigmoid import Array

GRID = (40, 50, 60)
"""Nodes along B, C_mid and A."""
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
    hypothesis: Array
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
            if hypothesis.ratio == 0.0 or not rows.any():
                continue
            inverse = np.linalg.inv(covariance(obs, hypothesis))
            cross = wander(new, obs.log_compute, hypothesis)
            mean[rows] += residual[rows] @ inverse @ cross.T
            left = hypothesis.ratio - np.einsum("ij,jk,ik->i", cross, inverse, cross)
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


def wander(left: Array, right: Array, hypothesis: Discrepancy) -> Array:
    """[len(left), len(right)] covariance of the wander at two log computes, in units of the noise variance."""
    return hypothesis.ratio * np.exp(-np.abs(left[:, None] - right[None, :]) / hypothesis.length)


def covariance(observations: Observations, hypothesis: Discrepancy) -> Array:
    """[n, n] covariance of the measured points around the sigmoid, in units of the noise variance."""
    x = observations.log_compute
    return np.diag(observations.spread) + wander(x, x, hypothesis)


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
    axes, mass = _refined_grid(observations, prior, bounds, fixed_asymptote)
    rng = np.random.default_rng([seed, 0])
    flat = rng.choice(mass.size, size=draws, p=mass.ravel() / mass.sum())
    start, hypothesis, i, j, k = np.unravel_index(flat, mass.shape)
    log_b, log_m, a = (_inside_cell(axis, index, rng) for axis, index in zip(axes, (i, j, k)))
    initial = np.asarray(observations.initials)[start]
    a = a if fixed_asymptote is not None else np.maximum(a, initial)
    shape = observations.noise_shape + len(observations.pass_rate) / 2
    posterior = Posterior(
        observations=observations,
        discrepancies=prior.discrepancies,
        asymptote=a,
        exponent=np.exp(log_b),
        log_midpoint=log_m,
        initial=initial,
        noise_variance=np.ones(draws),
        hypothesis=hypothesis,
        seed=seed,
    )
    misfit = _misfit(posterior)
    scale = observations.noise_shape * observations.noise_variance + misfit / 2
    object.__setattr__(posterior, "noise_variance", scale / rng.gamma(shape, size=draws))
    return posterior


def _misfit(posterior: Posterior) -> Array:
    obs = posterior.observations
    residual = obs.pass_rate - posterior.curves(np.exp(obs.log_compute) * obs.scale)
    out = np.zeros(len(residual))
    for index, hypothesis in enumerate(posterior.discrepancies):
        rows = posterior.hypothesis == index
        inverse = np.linalg.inv(covariance(obs, hypothesis))
        out[rows] = np.einsum("ij,jk,ik->i", residual[rows], inverse, residual[rows])
    return out


def _inside_cell(axis: Array, index: Array, rng: np.random.Generator) -> Array:
    if len(axis) == 1:
        return np.full(len(index), axis[0])
    step = axis[1] - axis[0]
    return np.clip(axis[index] + rng.uniform(-0.5, 0.5, len(index)) * step, axis[0], axis[-1])


def _refined_grid(
    observations: Observations, prior: Prior, bounds: Bounds, fixed_asymptote: float | None
) -> tuple[list[Array], Array]:
    floor = max(min(observations.initials), bounds.asymptote[0]) + 1e-3
    limits = [np.log(bounds.exponent), np.log(bounds.midpoint), np.array([floor, bounds.asymptote[1] - 1e-4])]
    if fixed_asymptote is not None:
        limits[2] = np.array([fixed_asymptote, fixed_asymptote])
    box = list(limits)
    for _ in range(3):
        axes = [np.linspace(*side, nodes if side[1] > side[0] else 1) for side, nodes in zip(box, GRID)]
        log_mass = _log_posterior(observations, prior, *axes)
        mass = np.exp(log_mass - log_mass.max())
        box = [_region(mass.sum(axis=(0, 1)), axes, n, limits[n]) for n in range(3)]
    return axes, mass


def _region(mass: Array, axes: list[Array], axis: int, limit: Array) -> Array:
    nodes = axes[axis]
    if len(nodes) == 1:
        return limit
    marginal = mass.sum(axis=tuple(n for n in range(3) if n != axis))
    kept = np.flatnonzero(marginal > NEGLIGIBLE * marginal.sum())
    step = nodes[1] - nodes[0]
    return np.array([max(nodes[kept[0]] - step, limit[0]), min(nodes[kept[-1]] + step, limit[1])])


def _log_posterior(obs: Observations, prior: Prior, log_b: Array, log_m: Array, a: Array) -> Array:
    """[initials, hypotheses, B, C_mid, A] log posterior density, up to a constant."""
    x, n = obs.log_compute, len(obs.log_compute)
    logit = np.exp(log_b)[:, None, None] * (x - log_m[None, :, None])
    share = (1.0 / (1.0 + np.exp(-np.clip(logit, -700.0, 700.0)))).reshape(-1, n)
    place = _log_normal(log_b, prior.log_exponent_mean, prior.log_exponent_sd)[:, None, None]
    place = place + _log_midpoint_prior(log_m, prior)[None, :, None]
    grid = (len(log_b), len(log_m), 1)
    shape, centre = obs.noise_shape + n / 2, obs.noise_shape * obs.noise_variance
    out = np.empty((len(obs.initials), len(prior.discrepancies), len(log_b), len(log_m), len(a)))
    for h, hypothesis in enumerate(prior.discrepancies):
        lower = np.linalg.cholesky(covariance(obs, hypothesis))
        white = np.linalg.inv(lower)
        shares = share @ white.T
        square = (shares**2).sum(axis=1).reshape(grid)
        volume = -np.log(np.diag(lower)).sum() + np.log(hypothesis.weight)
        for r, initial in enumerate(obs.initials):
            gain = a - initial
            rise = white @ (obs.pass_rate - initial)
            misfit = rise @ rise - 2.0 * (shares @ rise).reshape(grid) * gain + square * gain**2
            likelihood = volume - shape * np.log(centre + np.maximum(misfit, 0.0) / 2)
            weight = np.log(obs.initial_weights[r]) + _log_gain_prior(gain / (1.0 - initial), prior)
            out[r, h] = likelihood + place + weight
    return out


def _log_normal(x: Array, mean: float, sd: float) -> Array:
    return -0.5 * ((x - mean) / sd) ** 2 - np.log(sd)


def _log_midpoint_prior(log_m: Array, prior: Prior) -> Array:
    usual = (1.0 - prior.late_share) * np.exp(_log_normal(log_m, prior.log_midpoint_mean, prior.log_midpoint_sd))
    late = prior.late_share * np.exp(_log_normal(log_m, prior.late_mean, prior.late_sd))
    return np.log(np.maximum(usual + late, 1e-300))


def _log_gain_prior(share: Array, prior: Prior) -> Array:
    inside = np.clip(share, 1e-6, 1.0 - 1e-6)
    density = (prior.gain_alpha - 1.0) * np.log(inside) + (prior.gain_beta - 1.0) * np.log1p(-inside)
    return np.where(share > 0.0, density, -np.inf)
