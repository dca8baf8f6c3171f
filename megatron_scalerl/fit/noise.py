"""The noise of a measured pass rate: that of its completions, given its prompts.

A validation asks the same prompts every time, so what lies between prompts is no noise of the curve. What is left
is the mean over prompts of one completion's variance (`within_variance`), over prompts x generations. It is measured
where a prompt has several generations; its share of p (1 - p) is taken to be the same for the other points of a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from megatron_scalerl.fit.sigmoid import Array

SHARES = (0.2, 1.0)
"""Lowest and highest share of p (1 - p) that is believed to be noise."""
LEAST_BINOMIAL = 0.01
"""p (1 - p) is not taken to be below this: all of a few completions can be right by chance."""


@dataclass(frozen=True, kw_only=True)
class ValidationNoise:
    """What a run's records say on the noise of its points."""

    completions: Array = field(repr=False)
    """[n] prompts x generations of each point."""
    initial_completions: float
    """Of R_0."""
    share: float | None
    """Of p (1 - p), measured on this run; None: not measured."""

    def kept(self, which: Array) -> ValidationNoise:
        """Of the points `which` [n] alone; the share stays."""
        return ValidationNoise(
            completions=self.completions[which], initial_completions=self.initial_completions, share=self.share
        )


def binomial(pass_rate: ArrayLike) -> Array:
    """p (1 - p), at least `LEAST_BINOMIAL`. Shape of `pass_rate`."""
    p = np.clip(np.asarray(pass_rate, dtype=float), 0.0, 1.0)
    return np.asarray(np.maximum(p * (1.0 - p), LEAST_BINOMIAL))


def validation_noise(
    pass_rate: Array,
    *,
    initial: float | None,
    prompts: int | None,
    generations: ArrayLike | None,
    initial_generations: int | None = None,
    within_variance: ArrayLike | None = None,
    initial_within_variance: float | None = None,
) -> ValidationNoise | None:
    """The noise of points with pass rates [n]; None if the size of the validations is unknown.

    generations:     one number, or [n].
    initial_generations: of R_0; default: the median of `generations`.
    within_variance: [n], NaN where it was not measured; initial_within_variance: at R_0.
    Raises ValueError for a size below 1.
    """
    sizes = {"prompts": prompts, "generations": generations, "initial_generations": initial_generations}
    for key, number in sizes.items():
        if number is not None and not np.all(np.asarray(number, dtype=float) >= 1):
            raise ValueError(f"{key}: expected a whole number >= 1, found {number!r}")
    if prompts is None or generations is None:
        return None
    each = np.broadcast_to(np.asarray(generations, dtype=float), pass_rate.shape)
    first = float(np.median(each)) if initial_generations is None else float(initial_generations)
    within = np.full(len(pass_rate), np.nan) if within_variance is None else np.asarray(within_variance, dtype=float)
    start = np.nan if initial_within_variance is None else initial_within_variance
    values, counts = np.append(within, start), np.append(each, first)
    rates = np.append(pass_rate, np.nan if initial is None else initial)
    known = np.isfinite(values) & np.isfinite(rates)
    share = None
    if known.any():
        measured, full = values[known] @ counts[known], (rates[known] * (1.0 - rates[known])) @ counts[known]
        share = float(np.clip(measured / max(full, 1e-9), *SHARES))
    return ValidationNoise(completions=prompts * each, initial_completions=prompts * first, share=share)
