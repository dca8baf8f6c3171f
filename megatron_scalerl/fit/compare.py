"""Which recipe scales better: the ceiling first, then the efficiency (Khatri et al. 2025, A.5 and Fig. 4).

Two asymptotes within 0.02 count as the same. Runs that share their ceiling are refitted with A fixed to the
mean of their A, and their B is compared. Beside B stands what it is a stand-in for: the compute each run needs
to reach one pass rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_scalerl.fit.decide import Estimate
from megatron_scalerl.fit.published import SAME_ASYMPTOTE
from megatron_scalerl.fit.result import TAIL, FitResult
from megatron_scalerl.fit.sigmoid import compute_to_reach

SURE = 0.95


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One run of a comparison; the first run given is the reference."""

    fit: FitResult
    """The free fit."""
    same_ceiling: bool
    """Whether A lies within 0.02 of the reference's."""
    refit: FitResult | None
    """The fit with A fixed to the mean of those that share the reference's ceiling; None for the others."""
    better_exponent: float
    """Probability that the refitted B exceeds the reference's; nan for the reference and for other ceilings."""
    to_reach: Estimate
    """Compute to reach the comparison's pass rate."""
    words: str
    """What the change did, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The table of the paper's Fig. 4 for any runs."""

    contenders: tuple[Contender, ...]
    fixed_asymptote: float
    """Mean A of the runs that share the reference's ceiling."""
    pass_rate: float
    """The pass rate whose compute is compared."""

    def sentences(self) -> list[str]:
        """What moved the ceiling and what the efficiency, one sentence a run."""
        return [contender.words for contender in self.contenders]


def compare(
    fits: Sequence[FitResult],
    refit: Callable[[FitResult, float], FitResult],
    *,
    pass_rate: float | None = None,
    margin: float = SAME_ASYMPTOTE,
) -> Comparison:
    """Compare runs with the first of them.

    refit:     (free fit, A) -> the same run fitted with that A; the caller knows the run's options.
    pass_rate: whose compute is compared; default 90 % of the smallest gain among the runs.
    Raises ValueError for fewer than two runs.
    """
    if len(fits) < 2:
        raise ValueError(f"expected at least two runs to compare, found {len(fits)}")
    reference = fits[0]
    # 1e-9: the grid of the paper's method puts differences of exactly 0.02 on either side of it
    same = [abs(f.asymptote - reference.asymptote) <= margin + 1e-9 for f in fits]
    mean = float(np.mean([f.asymptote for f, alike in zip(fits, same) if alike]))
    refits = [refit(f, mean) if alike else None for f, alike in zip(fits, same)]
    if pass_rate is None:
        pass_rate = min(f.initial + 0.9 * (f.asymptote - f.initial) for f in fits)
    contenders = []
    for index, (run, alike, again) in enumerate(zip(fits, same, refits)):
        better = math.nan
        if index and again is not None and refits[0] is not None:
            better = _probability_above(again, refits[0])
        contenders.append(
            Contender(
                fit=run,
                same_ceiling=alike,
                refit=again,
                better_exponent=better,
                to_reach=_to_reach(run, pass_rate),
                words=_words(index, run, reference, again, refits[0], better),
            )
        )
    return Comparison(contenders=tuple(contenders), fixed_asymptote=mean, pass_rate=pass_rate)


def _probability_above(run: FitResult, reference: FitResult) -> float:
    """Probability that one run's B exceeds the other's; the draws of two runs are independent."""
    theirs = np.sort(reference.posterior.exponent)
    below = np.searchsorted(theirs, run.posterior.exponent) / len(theirs)
    return float(below.mean())


def _to_reach(run: FitResult, pass_rate: float) -> Estimate:
    posterior = run.posterior
    draws = compute_to_reach(
        pass_rate,
        asymptote=posterior.asymptote,
        exponent=posterior.exponent,
        midpoint=posterior.midpoint,
        initial=posterior.initial,
    )
    lo, hi = np.quantile(draws, [TAIL, 1.0 - TAIL], method="nearest")
    value = compute_to_reach(
        pass_rate, asymptote=run.asymptote, exponent=run.exponent, midpoint=run.midpoint, initial=run.initial
    )
    return Estimate(value=float(value), lo=float(lo), hi=float(hi))


def _words(
    index: int,
    run: FitResult,
    reference: FitResult,
    refit: FitResult | None,
    reference_refit: FitResult | None,
    better: float,
) -> str:
    if index == 0:
        return f"{run.name} is the reference: A = {run.asymptote:.3f}, B = {run.exponent:.2f}."
    difference = run.asymptote - reference.asymptote
    if refit is None or reference_refit is None:
        ends = "higher" if difference > 0 else "lower"
        spread = run.posterior.asymptote - np.resize(
            np.random.default_rng(0).permutation(reference.posterior.asymptote), len(run.posterior.asymptote)
        )
        sure = float(np.mean(spread * math.copysign(1.0, difference) > 0))
        by = f"A is {abs(difference):.3f} {ends} (probability {sure:.2f} that it is {ends})"
        return f"{run.name} moved the ceiling: {by}."
    move = f"B {refit.exponent:.2f} against {reference_refit.exponent:.2f} at the same A"
    if better >= SURE:
        return f"{run.name} kept the ceiling and is more efficient: {move} (probability {better:.2f})."
    if better <= 1.0 - SURE:
        return f"{run.name} kept the ceiling and is less efficient: {move} (probability {1.0 - better:.2f})."
    return f"{run.name} kept the ceiling, with no clear difference in efficiency: {move}."
