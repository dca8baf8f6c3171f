"""The numbers of a run that recipes are compared by, and their means over the runs of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_scalerl.fit.between_runs import Runs, Table
from megatron_scalerl.fit.decide import Estimate, estimate
from megatron_scalerl.fit.result import FitResult
from megatron_scalerl.fit.sigmoid import Array, compute_to_reach

Arms = Sequence[Sequence[FitResult]]
"""The fits of each arm; an empty one has no part in a quantity."""
Seeds = Sequence[tuple[int | None, ...]]
"""The seeds of the fits."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One number of a fit. A number that is positive is compared by its logarithm."""

    value: Callable[[FitResult], float]
    """The number."""
    draws: Callable[[FitResult], Array]
    """[draws] of it."""
    positive: bool = True
    """Whether it is compared by its logarithm."""

    def of(self, fit: FitResult) -> float:
        """The number, or its logarithm."""
        return math.log(self.value(fit)) if self.positive and self.value(fit) > 0 else self.value(fit)

    def known(self, fits: Sequence[FitResult]) -> bool:
        """Whether there are fits, and each has a finite value."""
        values = [self.value(f) for f in fits]
        return bool(values) and all(math.isfinite(v) and (v > 0 or not self.positive) for v in values)

    def runs(self, fits: Sequence[FitResult], seeds: tuple[int | None, ...]) -> Runs:
        """The number of each run, with the variance of its fit."""
        return Runs(
            values=np.array([self.of(f) for f in fits]),
            fit_variance=np.array([self._variance(f) for f in fits]),
            seeds=seeds,
        )

    def mean(self, arms: Arms, seeds: Seeds, index: int) -> Estimate:
        """The mean over the runs of one arm with the 90 % interval of it, the geometric one of a positive number.

        With one run it is the run's number with the interval of its fit; inf where a run never gets there.
        """
        fits = arms[index]
        values = [self.value(f) for f in fits]
        if not self.known(fits):
            return Estimate(value=max(values), lo=min(values), hi=max(values))
        if len(fits) == 1:
            return estimate(self.draws(fits[0]), value=values[0])
        kept = [n for n, each in enumerate(arms) if self.known(each)]
        table = Table([self.runs(arms[n], seeds[n]) for n in kept], paired=False)
        found = table.mean(kept.index(index))
        back = math.exp if self.positive else float
        return Estimate(value=back(found.value), lo=back(found.lo), hi=back(min(found.hi, 700.0)))

    def _variance(self, fit: FitResult) -> float:
        """By quantiles: draws of a compute to reach have a heavy tail."""
        with np.errstate(divide="ignore"):
            draws = np.log(self.draws(fit)) if self.positive else self.draws(fit)
        low, high = np.quantile(draws, [0.1587, 0.8413], method="nearest")
        return ((float(high) - float(low)) / 2) ** 2 if math.isfinite(low) and math.isfinite(high) else 1e6


ASYMPTOTE = Quantity(value=lambda f: f.asymptote, draws=lambda f: f.posterior.asymptote, positive=False)
EXPONENT = Quantity(value=lambda f: f.exponent, draws=lambda f: f.posterior.exponent)
MIDPOINT = Quantity(value=lambda f: f.midpoint, draws=lambda f: f.posterior.midpoint)


def compute_to(pass_rate: float) -> Quantity:
    """Compute at which a run's curve reaches the pass rate; inf where it never does."""

    def of(parameters: Mapping[str, float] | Mapping[str, Array]) -> Array:
        return compute_to_reach(pass_rate, **parameters)  # type: ignore[arg-type]

    return Quantity(value=lambda f: float(of(f.parameters)), draws=lambda f: of(f.posterior.parameters))


def last_measured(fits: Sequence[FitResult]) -> Estimate:
    """Mean of the runs' last fitted pass rates, with the lowest and the highest."""
    last = [float(f.pass_rate[-1]) for f in fits]
    return Estimate(value=float(np.mean(last)), lo=min(last), hi=max(last))
