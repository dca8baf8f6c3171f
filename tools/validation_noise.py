"""What the cadence of validations and their sampling seeds do to a forecast: simulated runs, the best possible fit.

    python tools/validation_noise.py [--runs 400] [RUN ...]

Each simulated run is a sigmoid with random parameters over 100 steps. Its validations have binomial noise,
independent with fresh seeds, correlated as exp(-lag / LENGTH) with common ones. The forecast of the second half is
the posterior mean under the parameters' own distribution and the noise's own covariance, so that neither kind of
seeds is disadvantaged by a fit that does not know it. RUN: folders of runs with validation.fresh_seeds=false and
two generations or more; the correlation of their noise by lag is printed: how much more the same completion of two
validations agrees than two completions of the same prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import harness
from checkout import explained

with explained():
    import numpy as np

    from megatron_scalerl.checkpoints.jsonl import read_jsonl
    from megatron_scalerl.fit.sigmoid import Array, sigmoid

STEPS, FIT_FROM = 100, 4
AT_START = 600
"""Completions of the validation at step 0."""
WITHIN = 0.7
"""Variance of one completion given its prompt, as a share of p (1 - p)."""
PRIOR_DRAWS, LENGTH = 20_000, 28.0
"""Draws from the distribution of parameters; steps of the noise's correlation."""
DESIGNS = ((10, 400), (5, 200), (4, 160), (2, 80))
"""(steps between validations, completions of one): the same completions per step."""


def parameters(rng: np.random.Generator, count: int) -> list[Array]:
    """(R_0, A, B, C_mid in steps) of `count` runs."""
    start = rng.uniform(0.2, 0.5, count)
    top = start + (1 - start) * rng.beta(3, 1.5, count)
    return [start, top, np.exp(rng.normal(0.6, 0.35, count)), STEPS * np.exp(rng.normal(-0.9, 0.6, count))]


def curves(found: list[Array], steps: Array) -> Array:
    """[runs, steps] pass rates."""
    start, top, exponent, midpoint = (x[:, None] for x in found)
    return sigmoid(steps[None, :], asymptote=top, exponent=exponent, midpoint=midpoint, initial=start)


def covariance(steps: Array, sizes: Array, length: float) -> Array:
    """[steps, steps] covariance of the noise over that of one completion; length 0: independent.

    With common seeds a smaller validation has the first completions of a larger one.
    """
    lag = np.abs(steps[:, None] - steps[None, :])
    close = np.exp(-lag / length) if length else (lag == 0).astype(float)
    return close / np.maximum(sizes[:, None], sizes[None, :])


def errors(every: int, completions: int, length: float, *, runs: int, seed: int = 0) -> tuple[float, float, float]:
    """Root mean squared errors of: the true second half, its measured points, the difference of successive points."""
    rng = np.random.default_rng(seed)
    steps = np.concatenate([[1e-6], np.arange(every, STEPS + 1, every)])
    sizes = np.where(steps < 1, float(AT_START), float(completions))
    fitted, unseen = (steps < 1) | (steps >= FIT_FROM) & (steps <= STEPS / 2), steps > STEPS / 2
    prior = curves(parameters(rng, PRIOR_DRAWS), steps)
    noise = covariance(steps, sizes, length)
    chol = np.linalg.cholesky(noise + 1e-12 * np.eye(len(steps)))
    precision = np.linalg.inv(noise[np.ix_(fitted, fitted)])
    to_unseen = precision @ noise[np.ix_(fitted, unseen)]
    squared = []
    for truth in curves(parameters(rng, runs), steps):
        scale = np.sqrt(WITHIN * truth * (1 - truth))
        error = scale * (chol @ rng.standard_normal(len(steps)))
        measured = truth + error
        left = ((measured - prior) / scale)[:, fitted]
        misfit = np.einsum("ij,jk,ik->i", left, precision, left)
        weight = np.exp(-0.5 * (misfit - misfit.min()))
        weight /= weight.sum()
        mean = weight @ prior[:, unseen]
        later = mean + scale[unseen] * (weight @ left @ to_unseen)
        squared.append([np.mean(x**2) for x in (mean - truth[unseen], later - measured[unseen], np.diff(error[1:]))])
    curve, points, difference = np.sqrt(np.mean(squared, axis=0))
    return float(curve), float(points), float(difference)


def correlations(run: Path) -> Iterator[tuple[int, float]]:
    """(lag in steps, correlation of the noise given the prompts), mean over pairs of validations."""
    rows = read_jsonl(run / "validation_by_prompt.jsonl")
    prompts = len(rows[0]["by_prompt"])
    size = min(len(row["outcomes"]) // prompts for row in rows)
    if size < 2:
        raise SystemExit(f"{run}: expected validations with two generations or more, found {size}")
    won = np.array(
        [np.array([c == "1" for c in row["outcomes"]], float).reshape(prompts, -1)[:, :size] for row in rows]
    )
    same = np.einsum("tij,sij->ts", won, won)
    other = np.einsum("tij,sik->ts", won, won) - same
    covariance = same / (prompts * size) - other / (prompts * size * (size - 1))
    spread = np.sqrt(np.diag(covariance))
    found: dict[int, list[float]] = {}
    for t, s in zip(*np.triu_indices(len(rows), 1)):
        if spread[t] * spread[s] > 0:
            found.setdefault(rows[s]["step"] - rows[t]["step"], []).append(covariance[t, s] / (spread[t] * spread[s]))
    for lag in sorted(found):
        yield lag, float(np.mean(found[lag]))


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = harness.options(__doc__, runs=(400, "simulated runs (default: %(default)s)"))()
    made.add_argument("run", nargs="*", type=Path, metavar="RUN")
    return made


def main() -> None:
    """Print one row per design and kind of seeds, and the correlations of each RUN."""
    options = parser().parse_args()
    print("every  completions  seeds   true curve  measured  difference")
    for every, completions in DESIGNS:
        for seeds, length in (("common", LENGTH), ("fresh", 0.0)):
            curve, measured, difference = errors(every, completions, length, runs=options.runs)
            print(f"{every:5d}  {completions:11d}  {seeds:6s}{curve:12.4f}{measured:10.4f}{difference:12.4f}")
    for run in options.run:
        print(f"{run}: " + ", ".join(f"lag {lag}: {value:.2f}" for lag, value in correlations(run)))


if __name__ == "__main__":
    main()
