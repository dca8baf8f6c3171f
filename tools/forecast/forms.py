"""Other forms of the curve that the benchmark compares the sigmoid with.

    power law    R(C) = A - D / C^B     for C >= C_0     (Khatri et al. 2025, A.4: eq. 1 far beyond C_mid)
    log-linear   R(C) = a + b log C
    random walk  in log C, measured with noise: the local level model of structural time series

The first two are fitted by least squares, the last by marginal likelihood.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_scalerl.fit.sigmoid import Array, sigmoid


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """R(C) = asymptote - scale / C^exponent."""

    asymptote: float
    """A, at most 1.0."""
    scale: float
    """D >= 0."""
    exponent: float
    """B > 0."""

    def __call__(self, compute):
        return self.asymptote - self.scale * np.exp(-self.exponent * np.log(np.asarray(compute, dtype=float)))


@dataclass(frozen=True, kw_only=True)
class RandomWalk:
    """A random walk in log compute, with an unknown start, measured with noise."""

    log_compute: Array
    """[n] of the fitted points, ascending."""
    pass_rate: Array
    """[n]."""
    rate: float
    """Variance that the walk gains per unit of log compute."""
    noise: float
    """Variance of a measured point around the walk."""

    def __call__(self, compute):
        """(mean, standard deviation) of a measurement at each compute [m]."""
        x, new = self.log_compute, np.log(np.asarray(compute, dtype=float))
        inverse = np.linalg.inv(_walk_covariance(x, x, self.rate) + self.noise * np.eye(len(x)))
        total = float(inverse.sum())
        start = float(inverse.sum(axis=0) @ self.pass_rate) / total
        gain = _walk_covariance(new, x, self.rate, start=x[0]) @ inverse
        mean = start + gain @ (self.pass_rate - start)
        left = self.rate * (new - x[0]) - (gain * _walk_covariance(new, x, self.rate, start=x[0])).sum(axis=1)
        left = left + (1.0 - gain.sum(axis=1)) ** 2 / total
        return mean, np.sqrt(np.maximum(left, 0.0) + self.noise)


def _walk_covariance(left, right, rate, *, start=None):
    return rate * (np.minimum(left[:, None], right[None, :]) - (left[0] if start is None else start))


def fit_random_walk(compute, pass_rate):
    """The rate and the noise of largest marginal likelihood given points [n], the start being unknown (flat)."""
    from scipy.optimize import minimize

    x, n = np.log(compute), len(compute)

    def cost(logs):
        rate, noise = np.exp(logs)
        lower = np.linalg.cholesky(_walk_covariance(x, x, rate) + (noise + 1e-12) * np.eye(n))
        ones, y = np.linalg.solve(lower, np.ones(n)), np.linalg.solve(lower, pass_rate)
        residual = y - (ones @ y) / (ones @ ones) * ones
        return float(np.log(np.diag(lower)).sum() + 0.5 * np.log(ones @ ones) + 0.5 * residual @ residual)

    starts = ([-6.0, -8.0], [-4.0, -9.0], [-9.0, -7.0])
    bounds = [(-25.0, 3.0)] * 2
    best = min((minimize(cost, start, method="Nelder-Mead", bounds=bounds) for start in starts), key=lambda r: r.fun)
    rate, noise = np.exp(best.x)
    return RandomWalk(log_compute=x, pass_rate=pass_rate, rate=float(rate), noise=float(noise) + 1e-12)


def fit_power_law(compute, pass_rate):
    """Fit A - D / C^B with 0 < A <= 1 and D >= 0 to points [n] by least squares.

    For a given B the curve is linear in (A, D), so only B is searched: a table, then a bounded refinement.
    """
    from scipy.optimize import minimize_scalar

    x = np.log(compute / np.exp(np.mean(np.log(compute))))

    def solve(log_b):
        basis = np.exp(-math.exp(log_b) * x)
        return _linear_with_cap(basis, pass_rate)

    table = np.linspace(math.log(0.02), math.log(8.0), 120)
    costs = [solve(value)[0] for value in table]
    best = int(np.argmin(costs))
    bracket = (table[max(best - 1, 0)], table[min(best + 1, len(table) - 1)])
    log_b = minimize_scalar(lambda v: solve(v)[0], bounds=bracket, method="bounded").x
    _, asymptote, scale = solve(float(log_b))
    exponent = math.exp(float(log_b))
    center = float(np.exp(np.mean(np.log(compute))))
    return PowerLaw(asymptote=asymptote, scale=scale * center**exponent, exponent=exponent)


def _linear_with_cap(basis, pass_rate):
    """(sum of squares, A, D) of the best A - D * basis with A <= 1 and D >= 0."""
    centered = basis - basis.mean()
    denominator = max(float(centered @ centered), 1e-300)
    scale = max(-float(centered @ pass_rate) / denominator, 0.0)
    asymptote = float(pass_rate.mean() + scale * basis.mean())
    if asymptote > 1.0:
        asymptote = 1.0
        scale = max(float(basis @ (1.0 - pass_rate)) / max(float(basis @ basis), 1e-300), 0.0)
    residual = pass_rate - asymptote + scale * basis
    return float(residual @ residual), asymptote, scale


def log_linear(compute, pass_rate):
    """The curve a + b log C that fits points [n] best by least squares."""
    slope, intercept = np.polyfit(np.log(compute), pass_rate, 1)
    return lambda later: intercept + slope * np.log(later)


def least_squares_sigmoid(compute, pass_rate, *, initial):
    """Eq. 1 with R_0 fixed, fitted to points [n] by least squares over A in (R_0, 1], B in [0.1, 12] and C_mid, from
    several starts."""
    from scipy.optimize import least_squares

    x = np.log(compute / compute.max())

    def residual(p):
        return initial + (p[0] - initial) / (1.0 + np.exp(np.clip(np.exp(p[2]) * (p[1] - x), -700, 700))) - pass_rate

    low, high = [initial + 1e-4, math.log(1e-3), math.log(0.1)], [1.0, math.log(100.0), math.log(12.0)]
    top = float(np.clip(pass_rate.max() + 0.02, initial + 0.01, 0.99))
    starts = [(a, math.log(m), math.log(1.8)) for a in (top, min(top + 0.1, 0.995)) for m in (0.1, 0.4, 1.5)]
    best = min((least_squares(residual, start, bounds=(low, high)) for start in starts), key=lambda r: r.cost)
    a, log_m, log_b = best.x
    midpoint = np.exp(log_m) * compute.max()
    return partial(sigmoid, asymptote=a, exponent=np.exp(log_b), midpoint=midpoint, initial=initial)
