"""Differences between recipes when each was run with several seeds, and how many seeds would tell them apart.

One number per run, such as its A, is explained by its recipe plus its seed:

    y = recipe + seed + e          e has a variance of its own in every recipe

Seeds are in the model where recipes share at least two of them and the same start (paired); otherwise each run stands
alone. The variance of e is what runs of one recipe differ by, errors of the fit included. With two or three seeds a
recipe's own variance is hardly known, so it is moderated by those of the other recipes (Smyth 2004, "Linear models
and empirical Bayes methods", as in the package limma), but a reference's, which is in many comparisons, never to less
than its own. None is taken below the variance that the fit of a single run has by itself. Intervals are Student's t.
p values are adjusted for the number of recipes (Holm 1979).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_scalerl.fit.decide import Estimate
from megatron_scalerl.fit.result import TAIL
from megatron_scalerl.fit.sigmoid import Array

ERROR = 0.05
"""Probability that any difference of one table is declared although there is none; recipes scatter alike."""
UNEVEN_ERROR = 0.1
"""The same where recipes scatter by very different amounts; simulated (tests/fit/test_between_runs.py)."""
POWER = 0.8
"""Probability of declaring a difference for which `seeds_to_tell` counts the seeds."""
MOST_SEEDS = 1000
"""`seeds_to_tell` counts no further."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """One number per run of one recipe."""

    values: Array
    """[runs]"""
    fit_variance: Array
    """[runs] variance of each by its own fit."""
    seeds: tuple[int | None, ...]
    """[runs] None where unknown."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A recipe minus its reference, with the variance between runs."""

    value: float
    """The difference of the means, within seeds if paired; nan if either has no value."""
    lo: float
    """Lower end of the 90 % interval; nan where no recipe was run twice."""
    hi: float
    """Upper end of it."""
    p: float
    """Probability of so large a difference, or a larger one, between two sets of runs of one recipe, adjusted for the
    number of comparisons; 1 where it is not known or either was run once."""
    paired: bool
    """Whether runs were compared within seeds."""
    variance: float
    """Variance of the difference of two runs with one seed; nan if unknown."""
    freedom: float
    """Degrees of freedom of `variance`."""
    comparisons: int
    """Differences that were tested together."""

    @property
    def declared(self) -> bool:
        """Whether the two differ, at an error of `ERROR` for all comparisons together."""
        return self.p < ERROR


class Table:
    """The numbers of several recipes, fitted together."""

    def __init__(self, recipes: Sequence[Runs], *, paired: bool, references: Collection[int] = ()) -> None:
        """recipes: with finite values, none empty. paired: whether equal seeds may be compared within the seed.

        references: recipes that others are compared with; their variance is in many differences.
        """
        values = np.concatenate([r.values for r in recipes])
        arm = np.repeat(np.arange(len(recipes)), [len(r.values) for r in recipes])
        self.counts = np.bincount(arm, minlength=len(recipes))
        self._arms = (arm[:, None] == np.arange(len(recipes))).astype(float)
        self._parts = sharing_seeds([r.seeds for r in recipes]) if paired else list(range(len(recipes)))
        columns = np.hstack([self._arms, *_seed_effects([r.seeds for r in recipes], self._parts)])
        self.paired = columns.shape[1] > len(recipes)
        self._apart = Table(recipes, paired=False, references=references) if self.paired else self
        """For recipes that do not share seeds."""
        self._inverse = np.linalg.pinv(columns)
        left = np.eye(len(values)) - columns @ self._inverse
        squares, freedom = self._arms.T @ (left @ values) ** 2, self._arms.T @ np.diag(left)
        self._effects = self._inverse @ values
        self._total = max(float(np.trace(left)), 1e-9)
        floor = np.array([r.fit_variance.mean() for r in recipes])
        variance, self._freedom = moderated(squares, freedom)
        for n in references:
            if freedom[n] > 1e-6 and squares[n] / freedom[n] > variance[n]:
                variance[n], self._freedom[n] = squares[n] / freedom[n], freedom[n]
        self.variance = np.maximum(variance, floor)
        """[recipes] of one run; nan where no recipe was run twice."""

    def mean(self, index: int) -> Estimate:
        """The recipe's mean, with the 90 % interval of the mean over seeds; the interval is nan if unknown."""
        weights = self._inverse[index]
        return Estimate(value=float(self._effects[index]), **self._interval(weights, float(self._effects[index])))

    def difference(self, index: int, reference: int) -> Difference:
        """Recipe `index` minus `reference`, tested alone; within seeds if they share them."""
        if self.paired and self._parts[index] != self._parts[reference]:
            return self._apart.difference(index, reference)
        weights = self._inverse[index] - self._inverse[reference]
        value = float(self._effects[index] - self._effects[reference])
        error, freedom = self._error(weights)
        alone = min(self.counts[index], self.counts[reference]) < 2
        p = 1.0 if alone or math.isnan(error) else float(2.0 * _t_tail(abs(value) / max(error, 1e-300), freedom))
        return Difference(
            value=value,
            **self._interval(weights, value),
            p=p,
            paired=self.paired,
            variance=float(self.variance[index] + self.variance[reference]),
            freedom=freedom,
            comparisons=1,
        )

    def _interval(self, weights: Array, value: float) -> dict[str, float]:
        error, freedom = self._error(weights)
        half = error * _t_quantile(1.0 - TAIL, freedom) if math.isfinite(error) else math.nan
        return {"lo": value - half, "hi": value + half}

    def _error(self, weights: Array) -> tuple[float, float]:
        """(standard error of weights . values, its degrees of freedom after Satterthwaite); nan if unknown."""
        parts = (self._arms.T @ weights**2) * self.variance
        used = parts > 0
        if np.isnan(parts).any() or not used.any():
            return math.nan, math.nan
        total = float(parts.sum())
        freedom = total**2 / float((parts[used] ** 2 / self._freedom[used]).sum())
        return math.sqrt(total), min(freedom, self._total)


def spread(recipes: Sequence[Runs]) -> float:
    """Standard deviation between runs of one recipe, common to all recipes; nan where none was run twice."""
    freedom = sum(len(r.values) - 1 for r in recipes)
    squares = sum(float(((r.values - r.values.mean()) ** 2).sum()) for r in recipes)
    return math.sqrt(squares / freedom) if freedom else math.nan


def sharing_seeds(seeds: Sequence[tuple[int | None, ...]]) -> list[int]:
    """[recipes] a number that recipes have in common which share at least two seeds, directly or through others.

    seeds: [recipes, runs]. A recipe with an unknown seed, or with one twice, shares none.
    """
    known = [set(own) if None not in own and len(set(own)) == len(own) else set() for own in seeds]
    parts = list(range(len(seeds)))
    for n, one in enumerate(known):
        for m in range(n):
            if len(one & known[m]) >= 2:
                parts = [parts[m] if part == parts[n] else part for part in parts]
    return parts


def _seed_effects(seeds: Sequence[tuple[int | None, ...]], parts: Sequence[int]) -> Iterator[Array]:
    """[runs, 1] for each seed of the recipes that share seeds, its mean over their runs 0."""
    runs = [(part, seed) for part, own in zip(parts, seeds) for seed in own]
    for part in sorted({each for each in parts if list(parts).count(each) > 1}):
        inside = np.array([each == part for each, _ in runs], dtype=float)
        for seed in sorted({seed for each, seed in runs if each == part and seed is not None}):
            effect = np.array([each == part and other == seed for each, other in runs], dtype=float)
            yield (effect - inside * effect.sum() / inside.sum())[:, None]


def moderated(squares: Array, freedom: Array) -> tuple[Array, Array]:
    """(variance, degrees of freedom), both [recipes]: each recipe's own, drawn toward what all have in common.

    squares: [recipes] sums of squared residuals. freedom: [recipes] their degrees of freedom; 0 for one run.
    nan and 0 where nothing is known. The prior's scale and degrees of freedom are estimated from the spread of the
    variances (Smyth 2004, section 6.2); with fewer than three recipes there is nothing to estimate them from.
    """
    known = freedom > 1e-6
    if not known.any():
        return np.full(len(squares), np.nan), np.zeros(len(squares))
    own = np.where(known, squares / np.where(known, freedom, 1.0), np.nan)
    if known.sum() < 3:
        common = float(squares[known].sum() / freedom[known].sum())
        return np.where(known, own, common), np.where(known, freedom, freedom[known].sum())
    scale, prior = _prior(np.maximum(own[known], 1e-5 * np.median(own[known]) + 1e-300), freedom[known])
    total = float(freedom.sum())
    if math.isinf(prior):
        return np.full(len(squares), squares[known].sum() / total), np.full(len(squares), total)
    with np.errstate(invalid="ignore"):
        mixed = (prior * scale + np.where(known, squares, 0.0)) / (prior + np.where(known, freedom, 0.0))
    return mixed, np.minimum(prior + np.where(known, freedom, 0.0), total)


def _prior(variances: Array, freedom: Array) -> tuple[float, float]:
    """(scale, degrees of freedom) of the inverse chi-square that the variances are drawn from; inf: one value."""
    from scipy.special import digamma, polygamma

    logs = np.log(variances) - digamma(freedom / 2) + np.log(freedom / 2)
    excess = float(np.var(logs, ddof=1) - polygamma(1, freedom / 2).mean())
    if excess <= 0:
        return math.nan, math.inf
    prior = 2.0 * _inverse_trigamma(excess)
    return math.exp(float(logs.mean()) + float(digamma(prior / 2)) - math.log(prior / 2)), prior


def _inverse_trigamma(value: float) -> float:
    """x with trigamma(x) = value > 0, which lies between 1 / value and 1 / value + 1 / sqrt(value)."""
    from scipy.optimize import brentq
    from scipy.special import polygamma

    return float(brentq(lambda x: float(polygamma(1, x)) - value, 1.0 / value, 1.0 / value + value**-0.5))


def adjusted(differences: Mapping[int, Difference]) -> dict[int, Difference]:
    """The same with p adjusted for their number (Holm 1979): `ERROR` bounds the error of all of them together."""
    out, highest = {}, 0.0
    for rank, (key, each) in enumerate(sorted(differences.items(), key=lambda item: item[1].p)):
        highest = max(highest, min(1.0, (len(differences) - rank) * each.p))
        out[key] = replace(each, p=highest, comparisons=len(differences))
    return out


def seeds_to_tell(difference: Difference, size: float, *, seeds: int) -> int | None:
    """Seeds of each recipe with which a true difference of `size` is declared with a probability of 80 %.

    seeds: of each recipe now. The variance is taken as it was found; degrees of freedom grow with the seeds, and the
    strictest of Holm's limits counts. None if the variance is unknown, or the number above `MOST_SEEDS`.
    """
    if math.isnan(difference.variance) or not size or seeds < 2:
        return None
    from scipy.special import nctdtr

    def enough(count: int) -> bool:
        freedom = max(difference.freedom * (count - 1) / (seeds - 1), 1.0)
        limit = _t_quantile(1.0 - ERROR / (2 * difference.comparisons), freedom)
        shift = size / math.sqrt(difference.variance / count)
        return 1.0 - float(nctdtr(freedom, min(shift, 30.0), limit)) >= POWER

    counts = range(2, MOST_SEEDS + 1)
    place = bisect_left(counts, True, key=enough)
    return counts[place] if place < len(counts) else None


def _t_tail(value: float, freedom: float) -> float:
    from scipy.special import stdtr

    return float(stdtr(freedom, -value))


def _t_quantile(probability: float, freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))
