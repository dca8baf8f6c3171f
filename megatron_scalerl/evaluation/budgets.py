"""The budget at which more thinking stops paying: a policy at several thinking budgets, on the same problems.

A budget is the number of thinking tokens after which the phrase is forced (Khatri et al. 2025, section 2, "Forced
interruptions"; 10k to 12k in the paper), with both ends of the range equal. Every budget has the same problems and
the same sampling seeds.

The rule. For budget b let G(b) be the largest gain in pass rate of any larger budget over b. Thinking stops paying
at the smallest b for which the one-sided 95 % upper bound of G(b) is at most a margin (0.01 by default): no larger
budget is better by more than the margin. The bound is the 95 % quantile of the largest gain over a bootstrap over
problems, so that the bound holds for all larger budgets together; the largest of several noisy gains is biased
upward, so the rule errs toward more thinking. The largest budget is never the answer.

A second number is the smallest budget over which no larger budget has a gain that is shown (paired 95 % interval
above 0, Bonferroni over the larger budgets). Between the two budgets the question is open: more problems or
completions narrow the gap.
"""

from collections.abc import Sequence

import numpy as np

from megatron_scalerl.evaluation.estimators import LEVEL, bootstrap_means
from megatron_scalerl.record import record

MARGIN = 0.01
"""Gain in pass rate below which more thinking does not pay."""


@record
class Step:
    """The comparison of a budget with all larger budgets."""

    budget: int
    """The budget: number of thinking tokens."""
    largest_gain: float
    """Largest gain in pass rate of any larger budget; 0 for the largest budget."""
    upper: float
    """One-sided 95 % upper bound of the largest gain."""
    shown: bool
    """True if the gain of some larger budget is significant: the interval lies above 0."""


@record
class Saturation:
    """The budget at which more thinking stops paying. Produced by `saturation`."""

    margin: float
    """Gain in pass rate below which more thinking does not pay."""
    steps: tuple[Step, ...]
    """Comparisons, by budget, ascending."""
    stops_at: int | None
    """Smallest budget over which no larger budget gains more than the margin; None: no such budget."""
    no_gain_shown_from: int
    """Smallest budget over which no larger budget has a gain whose interval lies above 0."""

    def line(self) -> str:
        """The answer as a line of text."""
        if self.stops_at is not None:
            return (
                f"more thinking stops paying at a budget of {self.stops_at:,} tokens: no larger budget gains more "
                f"than {self.margin:g} (one-sided {LEVEL:.0%} bound)"
            )
        first = next(step for step in self.steps if step.budget == self.no_gain_shown_from)
        if first is self.steps[-1]:
            return f"more thinking pays up to the largest budget, {first.budget:,} tokens"
        return (
            f"not decided: above a budget of {first.budget:,} tokens no gain is shown, but a gain of up to "
            f"{first.upper:.3f} is not excluded (margin {self.margin:g}); evaluate more problems or completions"
        )


def saturation(budgets: Sequence[int], rates: np.ndarray, *, margin: float = MARGIN) -> Saturation:
    """The budget at which more thinking stops paying, by the rule in this module's docstring.

    budgets: ascending, at least two. rates: [P, budgets] share of correct completions of each problem at each budget.
    """
    means = rates.mean(axis=0)
    bootstrap_rates = bootstrap_means(rates)
    steps = []
    for number, budget in enumerate(budgets[:-1]):
        largest_gain = float((means[number + 1 :] - means[number]).max())
        gains = bootstrap_rates[:, number + 1 :] - bootstrap_rates[:, [number]]
        # The quantile of the maximum holds for all larger budgets at once. A maximum of quantiles does not.
        upper = float(np.quantile(gains.max(axis=1), LEVEL))
        # Bonferroni: the tails of the intervals of all larger budgets add up to the tail of the level.
        tail = (1 - LEVEL) / gains.shape[1] / 2
        gain_is_shown = bool((np.quantile(gains, tail, axis=0) > 0).any())
        steps.append(Step(budget=budget, largest_gain=largest_gain, upper=upper, shown=gain_is_shown))
    steps.append(Step(budget=budgets[-1], largest_gain=0.0, upper=0.0, shown=False))
    return Saturation(
        margin=margin,
        steps=tuple(steps),
        stops_at=next((step.budget for step in steps[:-1] if step.upper <= margin), None),
        no_gain_shown_from=next(step.budget for step in steps if not step.shown),
    )
