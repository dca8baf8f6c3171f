"""Coverage of the 90 % intervals on synthetic runs, whose sigmoid is known."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_scalerl.fit.forecast import fit
from megatron_scalerl.fit.observations import deviation_covariance
from megatron_scalerl.fit.prior import DEFAULT_PRIOR
from megatron_scalerl.fit.sigmoid import sigmoid

PARAMETERS = ("asymptote", "exponent", "midpoint")
LATER = (1.5, 2.0, 4.0)
"""Computes of the new measurements, as multiples of the fitted compute."""
INITIAL = 0.4
"""R_0 as it was measured."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How synthetic runs are made."""

    draw: Callable
    """(random numbers, compute [n], completions per validation) -> (A, B, C_mid by name; measured pass rates [n])."""
    prompts: int
    """Prompts of a validation."""
    generations: int
    """Generations per prompt."""
    seed: int
    """Of the runs."""


def without_discrepancy(rng, compute, size):
    """A sigmoid with binomial noise: A 0.55 to 0.9, C_mid 0.2 to 0.7 of the fitted compute, B around 1.9."""
    truth = {
        "asymptote": rng.uniform(0.55, 0.9),
        "exponent": math.exp(rng.normal(math.log(1.9), 0.3)),
        "midpoint": rng.uniform(0.2, 0.7),
    }
    return truth, rng.binomial(size, sigmoid(compute, initial=INITIAL, **truth)) / size


def from_the_prior(rng, compute, size):
    """A run of the method's own prior, discrepancy, noise and R_0 included."""
    prior = DEFAULT_PRIOR
    initial = INITIAL + math.sqrt(prior.noise_share * INITIAL * (1.0 - INITIAL) / size) * rng.standard_normal()
    kind = prior.kinds[_index(rng, [k.weight for k in prior.kinds])]
    log_b = kind.log_exponent_mean + kind.log_exponent_sd * rng.standard_t(prior.freedom)
    log_m = kind.log_midpoint_mean + kind.log_midpoint_sd * rng.standard_t(prior.freedom)
    truth = {
        "asymptote": initial + (1.0 - initial) * rng.beta(kind.gain_alpha, kind.gain_beta),
        "exponent": math.exp(np.clip(log_b, math.log(0.25), math.log(8.0))),
        "midpoint": math.exp(np.clip(log_m, math.log(3e-3), math.log(100.0))),
    }
    curve = sigmoid(compute, initial=initial, **truth)
    discrepancy = prior.discrepancies[_index(rng, [d.weight for d in prior.discrepancies])]
    if discrepancy.level > 0.0:
        curve = np.where(compute > 1.0, curve[compute <= 1.0][-1], curve)
    x = np.log(compute)
    variance = curve * (1.0 - curve)
    covariance = deviation_covariance(x, x, discrepancy, x[0]) + 1e-9 * np.eye(len(x))
    path = np.linalg.cholesky(covariance) @ rng.standard_normal(len(x))
    noise = prior.noise_share * variance / size * prior.noise_shape / rng.gamma(prior.noise_shape)
    level = curve + math.sqrt(variance[compute <= 1.0].mean()) * path
    return truth, np.clip(level + np.sqrt(noise) * rng.standard_normal(len(x)), 0.0, 1.0)


SCENARIOS = {
    f"{name}, {prompts} x {generations}": Scenario(draw=draw, prompts=prompts, generations=generations, seed=seed)
    for name, draw in (("sigmoid and noise", without_discrepancy), ("own prior", from_the_prior))
    for prompts, generations, seed in ((1000, 16, 7), (200, 4, 8))
}


def coverage(scenario, runs=100):
    """(share of new measurements, share of A, B and C_mid) inside their 90 % intervals, over `runs` runs."""
    rng, points, parameters = np.random.default_rng(scenario.seed), [], []
    for index in range(runs):
        n = int(rng.integers(10, 31))
        compute = np.concatenate([np.linspace(1 / n, 1.0, n), LATER])
        truth, measured = scenario.draw(rng, compute, scenario.prompts * scenario.generations)
        result = fit(
            compute[:n],
            measured[:n],
            initial=INITIAL,
            prompts=scenario.prompts,
            generations=scenario.generations,
            draws=1500,
            seed=index,
        )
        parameters += [result.intervals[key][0] <= truth[key] <= result.intervals[key][1] for key in PARAMETERS]
        points += [p.lo <= y <= p.hi for p, y in zip(result.predict(LATER), measured[n:])]
    return float(np.mean(points)), float(np.mean(parameters))


def _index(rng, weights):
    return int(rng.choice(len(weights), p=np.array(weights) / sum(weights)))
