"""Which recipe scales better: the ceiling first, then the efficiency (Khatri et al. 2025, A.5 and Fig. 4).

Two asymptotes within 0.02 count as the same. Runs that share their ceiling are refitted with A fixed to the mean
of their A, and their B is compared. The table also states the compute that each run needs to reach one pass rate,
for which B is only a proxy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_scalerl.fit.decide import Estimate, estimate
from megatron_scalerl.fit.result import FitResult
from megatron_scalerl.fit.sigmoid import compute_to_reach

SAME_ASYMPTOTE = 0.02
"""Two asymptotes within this margin count as the same (three independent runs; Khatri et al. 2025, A.5)."""
CLEAR = 0.95
"""Probability above which a difference in B is stated as one."""


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run of a comparison. The first run given is the reference."""

    fit: FitResult
    """The fit with A free."""
    same_ceiling: bool
    """Whether A lies within 0.02 of the reference's."""
    refit: FitResult | None
    """The fit with A fixed to the mean over the runs that share the reference's ceiling; None for the others."""
    better_exponent: float
    """Probability that the refitted B exceeds the reference's; nan for the reference and for other ceilings."""
    to_reach: Estimate
    """Compute to reach the comparison's pass rate, in the run's unit."""
    summary: str
    """How the run differs from the reference, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The table of the paper's Fig. 4 for any runs."""

    runs: tuple[ComparedRun, ...]
    """The reference first."""
    fixed_asymptote: float
    """Mean A of the runs that share the reference's ceiling."""
    pass_rate: float
    """The pass rate whose compute is compared."""


def compare(
    fits: Sequence[FitResult],
    refit: Callable[[FitResult, float], FitResult],
    *,
    pass_rate: float | None = None,
) -> Comparison:
    """Compare runs with the first of them.

    refit:     (fit with A free, A) -> the same run fitted with that A; the caller has the run's options.
    pass_rate: whose compute is compared; default: R_0 plus 90 % of the gain, the smallest among the runs.
    Raises ValueError for fewer than two runs.
    """
    if len(fits) < 2:
        raise ValueError(f"expected at least two runs to compare, found {len(fits)}")
    reference = fits[0]
    # 1e-9: the grid of the paper's method puts differences of exactly 0.02 on either side of it
    same = [abs(f.asymptote - reference.asymptote) <= SAME_ASYMPTOTE + 1e-9 for f in fits]
    mean = float(np.mean([f.asymptote for f, alike in zip(fits, same) if alike]))
    refits = [refit(f, mean) if alike else None for f, alike in zip(fits, same)]
    if pass_rate is None:
        pass_rate = min(f.initial + 0.9 * (f.asymptote - f.initial) for f in fits)
    runs = []
    for index, (run, alike, again) in enumerate(zip(fits, same, refits)):
        better = math.nan
        if index and again is not None and refits[0] is not None:
            better = _probability_above(again, refits[0])
        runs.append(
            ComparedRun(
                fit=run,
                same_ceiling=alike,
                refit=again,
                better_exponent=better,
                to_reach=_to_reach(run, pass_rate),
                summary=_summary(index, run, reference, again, refits[0], better),
            )
        )
    return Comparison(runs=tuple(runs), fixed_asymptote=mean, pass_rate=pass_rate)


def _probability_above(run: FitResult, reference: FitResult) -> float:
    """Probability that one run's B exceeds the other's. The draws of two runs are independent."""
    ordered = np.sort(reference.posterior.exponent)
    below = np.searchsorted(ordered, run.posterior.exponent) / len(ordered)
    return float(below.mean())


def _to_reach(run: FitResult, pass_rate: float) -> Estimate:
    draws = compute_to_reach(pass_rate, **run.posterior.parameters)
    return estimate(draws, value=float(compute_to_reach(pass_rate, **run.parameters)))


def _summary(
    index: int,
    run: FitResult,
    reference: FitResult,
    refit: FitResult | None,
    reference_refit: FitResult | None,
    better: float,
) -> str:
    if index == 0:
        return f"{run.name} is the reference: A = {run.asymptote:.3f}, B = {run.exponent:.2f}."
    if refit is None or reference_refit is None:
        return f"{run.name} moved the ceiling: {_ceiling_difference(run, reference)}."
    exponents = f"B {refit.exponent:.2f} against {reference_refit.exponent:.2f} at the same A"
    if better >= CLEAR:
        return f"{run.name} kept the ceiling and is more efficient: {exponents} (probability {better:.2f})."
    if better <= 1.0 - CLEAR:
        return f"{run.name} kept the ceiling and is less efficient: {exponents} (probability {1.0 - better:.2f})."
    return f"{run.name} kept the ceiling, with no clear difference in efficiency: {exponents}."


def _ceiling_difference(run: FitResult, reference: FitResult) -> str:
    difference = run.asymptote - reference.asymptote
    direction = "higher" if difference > 0 else "lower"
    own, other = run.posterior.asymptote, reference.posterior.asymptote
    differences = own - np.resize(np.random.default_rng(0).permutation(other), len(own))
    probability = float(np.mean(differences * math.copysign(1.0, difference) > 0))
    return f"A is {abs(difference):.3f} {direction} (probability {probability:.2f} that it is {direction})"
