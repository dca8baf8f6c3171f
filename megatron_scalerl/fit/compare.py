"""Which recipe scales better: the ceiling first, then the efficiency (Khatri et al. 2025, A.5 and Fig. 4).

The unit of a comparison is a recipe with its runs, an arm (`fit.arms`); what runs of one recipe differ by is in every
interval (`fit.between_runs`). Arms whose ceiling is not found to differ from their reference's are refitted with A
fixed to the mean of their A; their efficiency is the compute to reach one pass rate there, of which B is a part. An
arm with one run decides nothing: whether its A lies within 0.02 of the reference's, the paper's margin between runs
of one recipe, then only says whether it is refitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_scalerl.fit.arms import Arm, arms_of, differences, shared_start
from megatron_scalerl.fit.between_runs import Difference, Runs, Table, adjusted, spread
from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.decide import Estimate, estimate
from megatron_scalerl.fit.result import FitResult
from megatron_scalerl.fit.sigmoid import Array, compute_to_reach

SAME_ASYMPTOTE = 0.02
"""Two asymptotes within this margin count as the same (three independent runs; Khatri et al. 2025, A.5)."""
SAME_COMPUTE = math.log(1.25)
"""Two recipes count as equally efficient where the log ratio of their compute to one pass rate is within this."""
SHARE_OF_GAIN = 0.8
"""The compared pass rate is this share of the way from R_0 to the common A."""

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


@dataclass(frozen=True, kw_only=True)
class ComparedArm:
    """One recipe of a comparison."""

    name: str
    """The arm's name."""
    reference: str | None
    """Name of the arm that it is compared with; None for the reference of all."""
    change: str
    """What the recipe sets that its reference sets otherwise; empty if unknown."""
    fits: tuple[FitResult, ...]
    """Its runs, each fitted with A free."""
    seeds: tuple[int | None, ...]
    """Their seeds; None where unknown."""
    refits: tuple[FitResult, ...]
    """The same runs with A fixed to the comparison's; none for another ceiling."""
    measured: Estimate
    """Mean of the runs' last validations."""
    asymptote: Estimate
    """Mean A. The interval of this and the next ones is that of the mean over seeds; of one run, that of its fit."""
    exponent: Estimate
    """Geometric mean of B."""
    midpoint: Estimate
    """Geometric mean of C_mid, in the runs' unit."""
    fixed_exponent: Estimate | None
    """Geometric mean of B with A fixed; None for another ceiling."""
    to_reach: Estimate
    """Geometric mean of the compute to the comparison's pass rate, with A fixed if it is; inf: a run never does."""
    ceiling: Difference | None
    """A minus the reference's; None for the reference."""
    efficiency: Difference | None
    """Log of the compute to reach the pass rate over the reference's, at equal A; None where that is not compared."""

    @property
    def runs(self) -> int:
        """Number of its runs."""
        return len(self.fits)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The table of the paper's Fig. 4 for any recipes."""

    arms: tuple[ComparedArm, ...]
    """The reference first."""
    fixed_asymptote: float
    """Mean A of the arms that share their reference's ceiling."""
    pass_rate: float
    """The pass rate whose compute is compared."""
    between_runs: float
    """Standard deviation of A between runs of one recipe; nan where none was run twice."""
    paired: bool
    """Whether differences are within seeds."""

    def arm(self, name: str) -> ComparedArm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)


def compare_runs(
    curves: Sequence[Curve],
    fit_curve: Callable[[Curve, float | None], FitResult],
    *,
    references: Sequence[str] = (),
    pass_rate: float | None = None,
) -> Comparison:
    """Group runs by recipe and compare the recipes. Names of the runs are unique.

    fit_curve:  (run, A to hold or None) -> its fit.
    references: the arm that the others are compared with (default: the first run's), and ARM=REFERENCE for others.
    pass_rate:  whose compute is compared; default: R_0 plus 80 % of the gain to the common A.
    Raises ValueError for one run alone, for the name of no arm, and for runs in different units of compute.
    """
    arms, to = _ordered(curves, references)
    paired = shared_start(arms)
    seeds = [tuple(curve.seed for curve in arm.curves) for arm in arms]
    fits = [tuple(fit_curve(curve, None) for curve in arm.curves) for arm in arms]
    ceilings = _differences(ASYMPTOTE, fits, seeds, to, paired)
    shared = _share_the_ceiling(fits, ceilings, to)
    mean = float(np.mean([ASYMPTOTE.mean(fits, seeds, n).value for n, alike in enumerate(shared) if alike]))
    fixed = max(mean, max(f.initial for each in fits for f in each) + 1e-3)
    refits = [
        tuple(fit_curve(curve, fixed) for curve in arm.curves) if alike else () for arm, alike in zip(arms, shared)
    ]
    start = float(np.mean([f.initial for f in fits[0]]))
    pass_rate = start + SHARE_OF_GAIN * (fixed - start) if pass_rate is None else pass_rate
    reach = compute_to(pass_rate)
    efficiency = _differences(reach, refits, seeds, to, paired)
    compared = tuple(
        ComparedArm(
            name=arm.name,
            reference=arms[to[n]].name if n else None,
            change=differences(arm, arms[to[n]]) if n else "",
            fits=fits[n],
            seeds=seeds[n],
            refits=refits[n],
            measured=last_measured(fits[n]),
            asymptote=_inside(ASYMPTOTE.mean(fits, seeds, n)),
            exponent=EXPONENT.mean(fits, seeds, n),
            midpoint=MIDPOINT.mean(fits, seeds, n),
            fixed_exponent=EXPONENT.mean(refits, seeds, n) if refits[n] else None,
            to_reach=reach.mean(refits if refits[n] else fits, seeds, n),
            ceiling=ceilings.get(n),
            efficiency=efficiency.get(n),
        )
        for n, arm in enumerate(arms)
    )
    return Comparison(
        arms=compared,
        fixed_asymptote=fixed,
        pass_rate=pass_rate,
        between_runs=spread([ASYMPTOTE.runs(own_fits, own_seeds) for own_fits, own_seeds in zip(fits, seeds)]),
        paired=any(each.paired for each in ceilings.values()),
    )


def _ordered(curves: Sequence[Curve], references: Sequence[str]) -> tuple[list[Arm], list[int]]:
    """(the arms, the reference of all first; the index of each one's own reference)."""
    for curve in curves:
        if curve.unit != curves[0].unit:
            raise ValueError(
                f"{curve.source}: expected compute in {curves[0].unit}, as of {curves[0].source}, found {curve.unit}"
            )
    if len(curves) < 2:
        raise ValueError(f"expected at least two runs to compare, found {len(curves)}")
    arms = arms_of(curves)
    by_name, own, first = {arm.name: arm for arm in arms}, dict[str, str](), arms[0].name
    for text in references:
        name, equals, other = text.rpartition("=")
        found = _named(by_name, other)
        if equals:
            own[_named(by_name, name)] = found
        else:
            first = found
    names = [first, *(name for name in by_name if name != first)]
    return [by_name[name] for name in names], [names.index(own.get(name, first)) for name in names]


def _named(arms: Mapping[str, Arm], name: str) -> str:
    """The arm called `name`, or the one of the run called so."""
    for arm in arms.values():
        if name == arm.name or any(name == curve.name for curve in arm.curves):
            return arm.name
    raise ValueError(f"--reference: expected one of {', '.join(arms)}, found {name!r}")


def decides(arm: ComparedArm, reference: ComparedArm) -> bool:
    """Whether both were run with at least two seeds."""
    return min(arm.runs, reference.runs) >= 2


def moves_the_ceiling(difference: Difference) -> bool:
    """Whether a difference in A is declared, and larger than the paper's margin."""
    return difference.declared and abs(difference.value) > SAME_ASYMPTOTE


def within(difference: Difference, margin: float) -> bool:
    """Whether the 90 % interval of a difference lies inside the margin."""
    return -margin <= difference.lo and difference.hi <= margin


def _differences(
    quantity: Quantity, arms: Arms, seeds: Seeds, to: Sequence[int], paired: bool
) -> dict[int, Difference]:
    """Index of an arm -> difference to its reference, p adjusted for their number.

    Left out are the first arm, an arm without fits or values, and one whose reference is.
    """
    kept = [n for n, own in enumerate(arms) if quantity.known(own)]
    if len(kept) < 2:
        return {}
    pairs = {n: (kept.index(n), kept.index(to[n])) for n in kept if n and to[n] in kept}
    references = {reference for _, reference in pairs.values()}
    table = Table([quantity.runs(arms[n], seeds[n]) for n in kept], paired=paired, references=references)
    found = {n: table.difference(*pair) for n, pair in pairs.items()}
    return found | adjusted({n: each for n, each in found.items() if each.p < 1.0})


def _share_the_ceiling(fits: Arms, ceilings: Mapping[int, Difference], to: Sequence[int]) -> list[bool]:
    def alone(n: int) -> bool:
        if n == 0:
            return True
        difference = ceilings[n]
        if min(len(fits[n]), len(fits[to[n]])) < 2:
            # 1e-9: the grid of the paper's method puts differences of exactly 0.02 on either side of it
            return abs(difference.value) <= SAME_ASYMPTOTE + 1e-9
        return not moves_the_ceiling(difference)

    return [alone(n) and alone(to[n]) for n in range(len(fits))]


def _inside(rate: Estimate) -> Estimate:
    """A pass rate's interval within [0, 1]."""
    return Estimate(value=rate.value, lo=max(rate.lo, 0.0), hi=min(rate.hi, 1.0))
