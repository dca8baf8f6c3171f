"""The noise of a measured pass rate: that of its completions, given its prompts.

A validation asks the same prompts every time, so what lies between prompts is no noise of the curve. What is left
is the mean over prompts of one completion's variance (`within_variance`), over prompts x generations. It is measured
where a prompt has several generations; its share of p (1 - p) is taken to be the same for the other points of a run.
"""

import math
from dataclasses import field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.sigmoid import Array
from megatron_scalerl.record import record

SHARES = (0.2, 1.0)
"""Lowest and highest share of p (1 - p) that is believed to be noise."""
LEAST_BINOMIAL = 0.001
"""p (1 - p) is not taken to be below this: all of many completions can be right by chance."""
NEIGHBORS = 5
"""Points over which a pass rate is averaged before its noise is derived from it."""
HIGHEST_VARIANCE = 0.5
"""Of one completion, estimated from two: one is right, the other one wrong."""
MOST_COMPLETIONS = 1e9
"""Of a validation: with more, its noise would vanish in rounding errors."""
MOST_POINTS = 128
"""A run with more points is fitted to means of neighbors: a fit takes memory ~ n^2 and time ~ n^3."""


@record
class ValidationNoise:
    """What a run's records say on the noise of its points."""

    completions: Array = field(repr=False)
    """[n] prompts x generations of each point."""
    initial_completions: float
    """Of R_0."""
    share: float | None
    """Of p (1 - p), measured on this run; None: not measured."""


def binomial(pass_rate: ArrayLike) -> Array:
    """p (1 - p), at least `LEAST_BINOMIAL`. Shape of `pass_rate`."""
    p = np.clip(np.asarray(pass_rate, dtype=float), 0.0, 1.0)
    return np.asarray(np.maximum(p * (1.0 - p), LEAST_BINOMIAL))


def validation_noise(curve: Curve) -> ValidationNoise | None:
    """The noise of the points of a run; None if the size of the validations is unknown.

    Raises ValueError for a size outside of [1, `MOST_COMPLETIONS`], or a variance that none can be.
    """
    for key in ("prompts", "generations", "initial_generations"):
        _check(key, getattr(curve, key), 1.0, MOST_COMPLETIONS)
    for key in ("within_variance", "initial_within_variance"):
        _check(key, getattr(curve, key), 0.0, HIGHEST_VARIANCE, missing=True)
    if curve.prompts is None or curve.generations is None:
        return None
    first = float(curve.initial_generations or np.median(curve.generations))
    # None becomes nan
    within = np.broadcast_to(np.asarray(curve.within_variance, dtype=float), len(curve.pass_rate))
    values = np.array([*within, curve.initial_within_variance], dtype=float)
    rates = np.array([*curve.pass_rate, curve.initial], dtype=float)
    counts = np.append(curve.generations, first)
    known = np.isfinite(values) & np.isfinite(rates)
    share = None
    if known.any():
        measured = values[known] @ counts[known]
        full = (rates[known] * (1.0 - rates[known])) @ counts[known]
        share = float(np.clip(measured / max(full, 1e-9), *SHARES))
    return ValidationNoise(
        completions=curve.prompts * curve.generations, initial_completions=curve.prompts * first, share=share
    )


def _check(key: str, given: ArrayLike | None, low: float, high: float, *, missing: bool = False) -> None:
    if given is None:
        return
    values = np.atleast_1d(np.asarray(given, dtype=float))
    valid = (values >= low) & (values <= high) | (missing & np.isnan(values))
    if not np.all(valid):
        raise ValueError(f"{key}: expected values in [{low:g}, {high:g}], found {first_invalid(values, valid)}")


def first_invalid(values: Array, valid: NDArray[np.bool_]) -> str:
    """The first value that is not valid, and its number. values, valid: [n]."""
    index = int(np.flatnonzero(~valid)[0])
    text = f"{float(values[index])!r}"
    if len(values) > 1:
        text += f" at point {index + 1}"
    return text


def smoothed(pass_rate: Array) -> Array:
    """[n] mean of each pass rate and its neighbors, `NEIGHBORS` in all, fewer at the ends."""
    window = np.ones(NEIGHBORS)
    reach = NEIGHBORS // 2
    sums, counts = (np.convolve(values, window)[reach:-reach] for values in (pass_rate, np.ones(len(pass_rate))))
    return np.asarray(sums / counts)


def scatter(pass_rate: Array) -> float:
    """Standard deviation of one point around its neighbors, whatever the curve does: by median second difference.

    pass_rate: [n], in the order of compute. 0 for fewer than four points.
    """
    if len(pass_rate) < 4:
        return 0.0
    bend = np.abs(np.diff(pass_rate, n=2))
    return float(np.median(bend)) / (0.6745 * math.sqrt(6.0))


def pooled(c: Array, y: Array, weights: Array) -> tuple[Array, Array, Array]:
    """At most `MOST_POINTS` points: means of neighbors, weighted by their completions; fewer points as they are.

    c, y, weights: [n] compute > 0, ascending, pass rate, completions. Neighbors are pooled over at most 1/64 of the
    points and 1/64 of the range of log compute, so that neither the early rise nor the end is blurred.
    Returns the geometric mean of c, the mean of y and the sum of weights, each [<= MOST_POINTS].
    """
    if len(c) <= MOST_POINTS:
        return c, y, weights
    log_c = np.log(c)
    ranks = np.arange(len(c)) / len(c)
    levels = (log_c - log_c[0]) / max(log_c[-1] - log_c[0], 1e-12)
    bins = np.minimum(MOST_POINTS * (ranks + levels) / 2.0, MOST_POINTS - 1).astype(int)
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    total = np.add.reduceat(weights, starts)
    means = [np.add.reduceat(weights * values, starts) / total for values in (log_c, y)]
    return np.exp(means[0]), means[1], total
