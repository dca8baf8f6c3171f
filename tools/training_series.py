"""Does the pass rate of the training batches improve the forecast? Measured on the tiny runs that ship.

    python tools/training_series.py

Each run is fitted up to half of its steps: its validations cut down to 120 prompts x 1 every 4 steps, as the
quickstart has them, alone or together with the means of 4 training batches. Those are placed at the compute of the
policies that sampled them (staleness), have the noise that successive batches show, and are tied to the validations
by one offset and a random walk in compute. The error is that against the run's own
validations (200 x 2) of the second half. Runs that collapse are left out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import harness
from checkout import explained

with explained():
    import numpy as np
    from numpy.typing import NDArray

    from megatron_scalerl.fit import forecast, posterior
    from megatron_scalerl.fit.curve import Curve
    from megatron_scalerl.fit.noise import binomial
    from megatron_scalerl.fit.observations import Observations, observe
    from megatron_scalerl.fit.prior import DEFAULT_PRIOR, Discrepancy
    from megatron_scalerl.fit.tiny_runs import TinyRun, tiny_runs

Array = NDArray[np.float64]
PROMPTS, BATCHES = 120, 4
SHARE = 0.85
"""Noise of a completion as a share of p (1 - p), as measured at the start of tiny runs."""
COLLAPSED = ("easy_lr2e-4", "chain_lr1e-3", "search_lr1e-3")
TIES = ((0.03, 0.03), (0.02, 0.05), (0.05, 0.1))
"""(standard deviation of the offset, of the walk over the fitted compute), in pass rate."""


def small_validations(run: TinyRun) -> Array:
    """[n] pass rates of the first `PROMPTS` prompts: one completion each, at step 0 all."""
    rates = []
    for number in range(len(run.step)):
        correct = run.correct(number)
        if correct is None:
            raise ValueError(f"{run.name}: expected the outcomes of validation {number}, found a lost completion")
        rates.append(correct[:PROMPTS, : None if number == 0 else 1].mean())
    return np.array(rates)


def training_points(run: TinyRun) -> tuple[Array, Array, float]:
    """(compute [m], pass rate [m], variance of one) of the means of `BATCHES` batches up to half of the run."""
    columns = run.training
    kept = (columns["step"] <= run.step[-1] / 2) & np.isfinite(columns["pass_rate"])
    rate, staleness = columns["pass_rate"][kept], np.nan_to_num(columns["staleness"][kept])
    sampled_at = np.clip(columns["step"][kept] - 1.0 - staleness, 0.0, None)
    count = len(rate) // BATCHES * BATCHES
    compute = np.interp(sampled_at, run.step, run.compute)[:count].reshape(-1, BATCHES).mean(axis=1)
    means, variance = rate[:count].reshape(-1, BATCHES).mean(axis=1), float(np.mean(np.diff(rate) ** 2)) / 2
    return compute[compute > 0], means[compute > 0], variance / BATCHES


def errors(run: TinyRun, tie: tuple[float, float] | None) -> tuple[Array, Array]:
    """([unseen] measured minus forecast, [unseen] whether a small validation is inside its 90 % interval)."""
    rates = small_validations(run)
    fitted, unseen = (run.step > 0) & (run.step <= run.step[-1] / 2), run.step > run.step[-1] / 2
    compute, rate = run.compute[fitted], rates[fitted]
    variance, training = SHARE * binomial(rate) / PROMPTS, np.zeros(len(compute))
    if tie is not None:
        more, means, noise = training_points(run)
        compute, rate = np.append(compute, more), np.append(rate, means)
        variance, training = np.append(variance, np.full(len(more), noise)), np.append(training, np.ones(len(more)))
        order = np.argsort(compute, kind="stable")
        compute, rate, variance, training = compute[order], rate[order], variance[order], training[order]
    rate = np.clip(rate, 0.0, 1.0)
    points = Curve(
        name=run.name,
        source=Path(run.name),
        compute=compute,
        pass_rate=rate,
        initial=float(rates[0]),
        prompts=PROMPTS,
        generations=np.ones(len(rate)),
        initial_generations=int(run.generations[0]),
        within_variance=SHARE * rate * (1.0 - rate),
        initial_within_variance=float(SHARE * rates[0] * (1.0 - rates[0])),
    )
    seen = observe(points, DEFAULT_PRIOR)
    seen = replace(seen, spread=variance / seen.noise_variance)
    walk = compute / compute.max() * training
    offset, drift = tie or (0.0, 0.0)
    tied = offset**2 * np.outer(training, training) + drift**2 * np.minimum.outer(walk, walk)
    plain = posterior.covariance

    def covariance(observations: Observations, hypothesis: Discrepancy) -> Array:
        return plain(observations, hypothesis) + tied / observations.noise_variance

    with (
        mock.patch.object(posterior, "covariance", covariance),
        mock.patch.object(forecast, "covariance", covariance),
    ):
        found = forecast.robust_posterior(seen, DEFAULT_PRIOR, fixed_asymptote=None, draws=1500, seed=0)
        center, draws = found.measured(run.compute[unseen], np.full(int(unseen.sum()), float(PROMPTS)))
    low, high = np.quantile(draws, [0.05, 0.95], axis=0)
    return run.pass_rate[unseen] - center, (rates[unseen] >= low) & (rates[unseen] <= high)


parser = harness.options(__doc__)


def main() -> None:
    """Print the error and the coverage of each way."""
    parser().parse_args()
    runs = [run for run in tiny_runs(held_back=False) if run.name not in COLLAPSED]
    for tie in (None, *TIES):
        each = [errors(run, tie) for run in runs]
        error, inside = (np.concatenate(parts) for parts in zip(*each))
        name = "validations alone" if tie is None else f"and training batches, offset {tie[0]:g}, walk {tie[1]:g}"
        print(f"{name:44s} error {np.abs(error).mean():.4f}  signed {error.mean():+.4f}  inside {inside.mean():.3f}")


if __name__ == "__main__":
    main()
