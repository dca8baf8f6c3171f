"""Posterior of a run's sigmoid on a grid: no Markov chain, no starting value, no convergence to check.

Given (B, C_mid) the sigmoid is linear in A, so the likelihood in A is Gaussian with known mean and width: only
(log B, log C_mid) needs a grid, and every cell has nodes of A around the cell's mean. The noise variance is
integrated out in closed form (inverse-gamma prior). The hypotheses on the model discrepancy, a Gaussian process on
the residuals (Kennedy and O'Hagan 2001), are summed. The grid is refined over the region that holds the mass until
the region stops shrinking. The same data and seed give the same draws, bit for bit.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_scalerl.fit.observations import Observations, binomial, covariance
from megatron_scalerl.fit.prior import DEFAULT_BOUNDS, Bounds, Discrepancy, Prior
from megatron_scalerl.fit.sigmoid import PARAMETERS, Array, share_by_logs
from megatron_scalerl.record import record

Index = NDArray[np.integer[Any]]

COARSE = (24, 30)
"""Numbers of nodes along B and C_mid of the coarse grids, which locate the posterior mass."""
FINE = (56, 72)
"""Numbers of nodes along B and C_mid of the fine grid, from which draws are sampled."""
ASYMPTOTE_NODES = 17
REACH = 5.0
"""Half of the range of A's nodes, in conditional standard deviations of A."""
NEGLIGIBLE = 1e-5
"""Share of the marginal mass below which a node of a coarse grid is left out of the grid that follows."""


@record
class Posterior:
    """Draws of the parameters of one run, and the distribution of new measurements. [draws]: one value for each
    draw."""

    observations: Observations
    discrepancies: tuple[Discrepancy, ...]
    asymptote: Array
    """[draws] asymptote A."""
    exponent: Array
    """[draws] exponent B."""
    log_midpoint: Array
    """[draws] log(C_mid / `observations.scale`)."""
    initial: Array
    """[draws] pass rate R_0 before RL."""
    noise_variance: Array
    """[draws] noise variance of a measured point whose `Observations.spread` is 1."""
    hypothesis: Index
    """[draws] index into `discrepancies` of the hypothesis that the draw assumes."""
    seed: int

    @property
    def midpoint(self) -> Array:
        """[draws] C_mid in the user's unit."""
        return np.exp(self.log_midpoint) * self.observations.scale

    @property
    def parameters(self) -> dict[str, Array]:
        """The keyword arguments of `sigmoid.sigmoid`, each [draws]."""
        return {key: getattr(self, key) for key in PARAMETERS}

    def curves(self, compute: Array) -> Array:
        """[draws, len(compute)] the sigmoids, without discrepancy and noise."""
        share = share_by_logs(self._log(compute), self.exponent[:, None], self.log_midpoint[:, None])
        return self.initial[:, None] + (self.asymptote - self.initial)[:, None] * share

    def residuals(self) -> Array:
        """[draws, n] measured points minus the sigmoids."""
        return self.observations.pass_rate - self.curves(self.observations.compute)

    def true_pass_rate(self, compute: Array) -> tuple[Array, Array]:
        """Mean and variance, both [draws, len(compute)], of the pass rate without noise: sigmoid plus discrepancy."""
        obs = self.observations
        log_compute = self._log(compute)
        mean = self.curves(compute)
        # `reached` stays at the sigmoid's value at `scale`, the last fitted compute, for any later compute
        reached = self.curves(np.minimum(compute, obs.scale))
        variance = np.zeros_like(mean)
        residual = self.residuals()
        for index, hypothesis in enumerate(self.discrepancies):
            rows = self.hypothesis == index
            if hypothesis.level > 0.0:
                # this hypothesis: the run has left its sigmoid, so no gain of the sigmoid after `scale` is added
                mean[rows] = reached[rows]
            # Gaussian process regression: mean K* K^-1 r and variance K** - K* K^-1 K*^T of the deviation
            inverse = np.linalg.inv(covariance(obs, hypothesis))
            cross = obs.deviation(log_compute, obs.log_compute, hypothesis)
            mean[rows] += residual[rows] @ (inverse @ cross.T)
            prior = np.diag(obs.deviation(log_compute, log_compute, hypothesis))
            conditional = prior - ((cross @ inverse) * cross).sum(axis=1)
            variance[rows] = np.maximum(conditional, 0.0) * self.noise_variance[rows, None]
        return mean, variance

    def measured(self, compute: Array, completions: Array | None = None) -> tuple[Array, Array]:
        """(center [len(compute)], draws [draws, len(compute)]) of a new measurement at each compute.

        completions: [len(compute)] completions of each measurement; default: the median of the fitted points.
        """
        mean, variance = self.true_pass_rate(compute)
        # streams 0 and 2 of this seed belong to `sample` and `decide`: the three are independent
        noise = np.random.default_rng([self.seed, 1]).standard_normal(mean.shape)
        if completions is None:
            completions = np.array(self.observations.completions or 1.0)
        measured = self.noise_variance[:, None] * binomial(mean) / completions / self.observations.spread_unit
        spread = np.sqrt(variance + measured)
        return np.clip(np.median(mean, axis=0), 0.0, 1.0), np.clip(mean + spread * noise, 0.0, 1.0)

    def _log(self, compute: Array) -> Array:
        return np.log(np.asarray(compute, dtype=float)) - np.log(self.observations.scale)


def sample(
    observations: Observations,
    *,
    prior: Prior,
    bounds: Bounds = DEFAULT_BOUNDS,
    draws: int = 4000,
    seed: int = 0,
) -> Posterior:
    """Draw from the posterior of (A, B, C_mid, R_0, noise, hypothesis) given the points.

    bounds: range of each parameter; A is fixed if the bounds of A are equal. draws: number of draws.
    """
    lowest, highest = bounds.asymptote
    grid = _refined_grid(observations, prior, bounds)
    rng = np.random.default_rng([seed, 0])
    flat = rng.choice(grid.mass.size, size=draws, p=grid.mass.ravel() / grid.mass.sum())
    start, hypothesis, i, j, k = np.unravel_index(flat, grid.mass.shape)
    log_b = _inside_cell(grid.log_b, i, rng)
    log_m = _inside_cell(grid.log_m, j, rng)
    jitter = rng.uniform(-0.5, 0.5, draws) * grid.step[start, hypothesis, i, j]
    offset = grid.offset[start, hypothesis, i, j, k] + jitter
    posterior = Posterior(
        observations=observations,
        discrepancies=prior.discrepancies,
        asymptote=np.full(draws, lowest),
        exponent=np.exp(log_b),
        log_midpoint=log_m,
        initial=np.asarray(observations.initials)[start],
        noise_variance=np.ones(draws),
        hypothesis=hypothesis,
        seed=seed,
    )
    if lowest < highest:
        posterior = replace(posterior, asymptote=_asymptotes(posterior, offset, bounds))
    # conjugate update: a point adds 1/2 to the shape; the inverse of a gamma draw is inverse gamma
    shape = observations.noise_shape + len(observations.pass_rate) / 2
    scale = observations.noise_shape * observations.noise_variance + _misfit(posterior) / 2
    return replace(posterior, noise_variance=scale / rng.gamma(shape, size=draws))


def _asymptotes(posterior: Posterior, offset: Array, bounds: Bounds) -> Array:
    """[draws] A at `offset` standard deviations from the conditional mean of A given each draw's (B, C_mid).

    The (B, C_mid) at the center of a draw's cell would be too coarse: within a cell the conditional mean changes by
    more than the standard deviation.
    """
    obs = posterior.observations
    share = share_by_logs(obs.log_compute, posterior.exponent[:, None], posterior.log_midpoint[:, None])
    gain = np.empty(len(share))
    width = np.empty(len(share))
    for index, hypothesis in enumerate(posterior.discrepancies):
        rows = posterior.hypothesis == index
        white = _whitening(obs, hypothesis)[0]
        shares = share[rows] @ white.T
        rises = (obs.pass_rate - posterior.initial[rows, None]) @ white.T
        gain[rows], width[rows] = _conditional_gain(
            (rises**2).sum(axis=1), (shares * rises).sum(axis=1), (shares**2).sum(axis=1), obs
        )
    lowest = np.maximum(bounds.asymptote[0], posterior.initial)
    return np.clip(posterior.initial + gain + offset * width, lowest, bounds.asymptote[1])


def _misfit(posterior: Posterior) -> Array:
    """[draws] squared Mahalanobis norm of the residuals, in units of the noise variance."""
    residual = posterior.residuals()
    out = np.zeros(len(residual))
    for index, hypothesis in enumerate(posterior.discrepancies):
        rows = posterior.hypothesis == index
        inverse = np.linalg.inv(covariance(posterior.observations, hypothesis))
        out[rows] = ((residual[rows] @ inverse) * residual[rows]).sum(axis=1)
    return out


@record
class _Grid:
    """The posterior mass on a grid of B, C_mid and A. Nodes of A lie around the cell's conditional mean of A."""

    log_b: Array
    """[B] log B of the nodes."""
    log_m: Array
    """[C_mid] log(C_mid / scale) of the nodes."""
    mass: Array
    """[initials, hypotheses, B, C_mid, nodes of A] posterior mass."""
    offset: Array
    """In the shape of `mass`: distance of each node from the cell's conditional mean of A, in standard deviations."""
    step: Array
    """[initials, hypotheses, B, C_mid] distance between two nodes of A, in standard deviations."""


def _inside_cell(axis: Array, index: Index, rng: np.random.Generator) -> Array:
    # the first and the last node lie on the edges of the box: draws beyond an edge are moved to the edge
    step = axis[1] - axis[0]
    return np.clip(axis[index] + rng.uniform(-0.5, 0.5, len(index)) * step, axis[0], axis[-1])


def _refined_grid(obs: Observations, prior: Prior, bounds: Bounds) -> _Grid:
    limits = [np.log(bounds.exponent), np.log(bounds.midpoint)]
    box = limits
    for _ in range(8):
        grid = _grid(obs, prior, bounds, box, COARSE)
        cells = grid.mass.sum(axis=(0, 1, 4))
        marginals = (cells.sum(axis=1), grid.log_b), (cells.sum(axis=0), grid.log_m)
        smaller = [_region(*marginal, limit) for marginal, limit in zip(marginals, limits)]
        # a pass that shortens every axis by less than 30 % is the last
        settled = all(np.ptp(new) > 0.7 * np.ptp(old) for new, old in zip(smaller, box))
        box = smaller
        if settled:
            break
    return _grid(obs, prior, bounds, box, FINE)


def _region(marginal: Array, nodes: Array, limit: Array) -> Array:
    indices = np.flatnonzero(marginal > NEGLIGIBLE * marginal.sum())
    # the margin is one step: the mass may end anywhere between the last node with mass and the next node
    margin = nodes[1] - nodes[0]
    return np.array([max(nodes[indices[0]] - margin, limit[0]), min(nodes[indices[-1]] + margin, limit[1])])


def _grid(obs: Observations, prior: Prior, bounds: Bounds, box: list[Array], cells: tuple[int, int]) -> _Grid:
    """The posterior mass on a grid over `box`: the (lowest, highest) of log B and of log(C_mid / scale). cells:
    numbers of nodes along B and C_mid."""
    log_b, log_m = (np.linspace(lowest, highest, count) for (lowest, highest), count in zip(box, cells))
    n = len(obs.log_compute)
    share = share_by_logs(obs.log_compute, np.exp(log_b)[:, None, None], log_m[None, :, None])
    share = share.reshape(-1, n)
    cell_densities = log_cells(log_b[:, None, None], log_m[None, :, None], prior)
    nodes = ASYMPTOTE_NODES if bounds.asymptote[0] < bounds.asymptote[1] else 1
    step = np.empty((len(obs.initials), len(prior.discrepancies), *cells))
    log_mass = np.empty((*step.shape, nodes))
    offset = np.empty_like(log_mass)
    shape = obs.noise_shape + n / 2
    center = obs.noise_shape * obs.noise_variance
    for h, hypothesis in enumerate(prior.discrepancies):
        white, volume = _whitening(obs, hypothesis)
        shares = share @ white.T
        square = (shares**2).sum(axis=1).reshape(cells)
        for r, initial in enumerate(obs.initials):
            rise = white @ (obs.pass_rate - initial)
            cross = (shares @ rise).reshape(cells)
            best, width = _conditional_gain(rise @ rise, cross, square, obs)
            gain, step[r, h] = _gain_nodes(best, width, initial, bounds)
            # the square |rise - gain share|^2 is multiplied out, so that no array has both axes, points and nodes of
            # A
            misfit = rise @ rise - 2.0 * cross[..., None] * gain + square[..., None] * gain**2
            # Student's t: the inverse-gamma variance is integrated out; rounding may push a misfit below 0
            likelihood = volume - shape * np.log(center + np.maximum(misfit, 0.0) / 2)
            # the prior is a density of the gain's share of the room, A's nodes are in pass rate: hence 1 / (1 - R_0)
            room = hypothesis.weight * obs.initial_weights[r] / (1.0 - initial)
            weight = np.log(room) + np.log(step[r, h])[..., None]
            log_mass[r, h] = likelihood + weight + log_prior_density(cell_densities, gain / (1.0 - initial), prior)
            offset[r, h] = (gain - best[..., None]) / width[..., None]
            step[r, h] /= width
    # only ratios of masses count, so the maximum is subtracted: narrow noise and many points would overflow
    mass = np.exp(log_mass - log_mass.max())
    return _Grid(log_b=log_b, log_m=log_m, mass=mass, offset=offset, step=step)


def _whitening(obs: Observations, hypothesis: Discrepancy) -> tuple[Array, float]:
    """(W [n, n], log det W) of the matrix W that maps residuals to independent residuals with the noise variance."""
    # covariance = L L^T, so W = L^-1 and log det W = -sum(log diag L)
    lower = np.linalg.cholesky(covariance(obs, hypothesis))
    return np.linalg.inv(lower), -float(np.log(np.diag(lower)).sum())


def _conditional_gain(total: Array, cross: Array, square: Array, obs: Observations) -> tuple[Array, Array]:
    """Conditional (mean, standard deviation) of the gain A - R_0, if the misfit at a gain is total - 2 cross gain +
    square gain^2."""
    # if C_mid lies far beyond the points, all shares and `square` vanish: the lower bound of `square` prevents 0 / 0
    square = np.maximum(square, 1e-12)
    best = cross / square
    misfit = np.maximum(total - cross * best, 0.0)
    variance = (obs.noise_shape * obs.noise_variance + misfit / 2) / (obs.noise_shape + len(obs.pass_rate) / 2)
    return best, np.sqrt(variance / square)


def _gain_nodes(best: Array, width: Array, initial: float, bounds: Bounds) -> tuple[Array, Array]:
    """([..., nodes] gains A - R_0 around each cell's mean and inside the bounds, [...] distance of two nodes)."""
    lowest, highest = (end - initial for end in bounds.asymptote)
    if lowest == highest:
        # a fixed A has one node, whose step of 1 adds log 1 = 0 to the node's weight
        return np.full((*best.shape, 1), lowest), np.ones_like(best)
    lowest = max(lowest, 0.0)
    # where the cell's mean lies far outside the bounds, the step would be 0 and its logarithm -inf
    sliver = 1e-3 * (highest - lowest)
    left_end = np.clip(best - REACH * width, lowest, highest - sliver)
    right_end = np.clip(best + REACH * width, lowest + sliver, highest)
    step = (right_end - left_end) / ASYMPTOTE_NODES
    return left_end[..., None] + step[..., None] * (np.arange(ASYMPTOTE_NODES) + 0.5), step


def log_cells(log_b: Array, log_m: Array, prior: Prior) -> Array:
    """[kinds, *shape] for each kind of runs, the log of the kind's weight times the kind's prior density at log B =
    `log_b` and log(C_mid / scale) = `log_m`."""
    out = []
    for kind in prior.kinds:
        exponent = _log_student((log_b - kind.log_exponent_mean) / kind.log_exponent_sd, prior.freedom)
        midpoint = _log_student((log_m - kind.log_midpoint_mean) / kind.log_midpoint_sd, prior.freedom)
        out.append(np.log(kind.weight / kind.log_exponent_sd / kind.log_midpoint_sd) + exponent + midpoint)
    return np.array(out)


def log_prior_density(log_cells: Array, share: Array, prior: Prior) -> Array:
    """Log prior density of the gain's `share` of the room above R_0 and of (B, C_mid), summed over the kinds of runs.

    log_cells: [kinds, ...] result of `log_cells`; broadcasts with `share`.
    """
    # Beta(1, b) has 0 log 0 at a share of 0, which is nan in floating point
    inside = np.clip(share, 1e-6, 1.0 - 1e-6)
    log_share = np.log(inside)
    log_remainder = np.log1p(-inside)
    # the logarithm of the sum over kinds, as log-sum-exp
    highest = log_cells.max(axis=0)
    total = np.zeros(np.broadcast_shapes(share.shape, highest.shape))
    for kind, cells in zip(prior.kinds, log_cells):
        alpha = kind.gain_alpha
        beta = kind.gain_beta
        log_beta = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
        total += np.exp(cells - highest + (alpha - 1.0) * log_share + (beta - 1.0) * log_remainder - log_beta)
    return highest + np.log(np.maximum(total, 1e-300))


def _log_student(z: Array, freedom: float) -> Array:
    """Log density of Student's t up to a constant."""
    return -0.5 * (freedom + 1.0) * np.log1p(z**2 / freedom)
