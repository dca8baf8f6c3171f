"""Whether to continue a run: the gain that further compute is expected to buy, a verdict and a reason."""

import math
from typing import Literal

import numpy as np

from megatron_scalerl.fit.checks import FEW_POINTS, below_initial
from megatron_scalerl.fit.formatting import short_number, unit_name
from megatron_scalerl.fit.result import TAIL, FitResult
from megatron_scalerl.fit.sigmoid import Array, compute_to_reach
from megatron_scalerl.record import record

WORTH = 0.01
"""Default of the smallest gain in pass rate that justifies the budget."""
LIKELY = 0.8
"""Probability of a sufficient gain at or above which the verdict is "go on"."""
UNLIKELY = 0.2
"""Probability of a sufficient gain at or below which the verdict is "stop"."""
LASTING = 1.0 / 3.0
"""A fall that has lasted for at least this share of the fitted compute means "stop"; a shorter fall may recover."""

Verdict = Literal["go on", "stop", "too early to say"]


@record
class Estimate:
    """A number with a 90 % interval; value, lo and hi may be inf, for the compute to a pass rate that is never
    reached."""

    value: float
    """The point estimate."""
    lo: float
    """5 % quantile."""
    hi: float
    """95 % quantile."""


@record
class Decision:
    """The gain that a run is expected to make, and the verdict whether to continue the run."""

    verdict: Verdict
    """"go on", "stop" or "too early to say"."""
    reason: str
    """The grounds of the verdict in one line, with a caution for fewer than `FEW_POINTS` points."""
    budget: float
    """Further compute for which the gain is forecast, in the run's unit; default: the compute spent so far."""
    gain: Estimate
    """Gain in the pass rate, without measurement noise, from the largest fitted compute to `budget` beyond."""
    worth: float
    """Smallest gain in pass rate that justifies the budget."""
    probability: float
    """Probability that the gain exceeds `worth`."""
    compute_to_95_percent_of_asymptote: Estimate
    """Compute at which 95 % of A is reached."""
    target: float | None
    """Pass rate whose compute is `compute_to_target`; None if no target was given."""
    compute_to_target: Estimate | None
    """Compute at which the target is reached; inf where the ceiling lies below the target."""

    def sentence(self) -> str:
        """Verdict and reason in one line."""
        return f"{self.verdict}: {self.reason}"


def decide(
    fit: FitResult, *, budget: float | None = None, worth: float = WORTH, target: float | None = None
) -> Decision:
    """Decide whether `budget` further units of compute are likely to raise the pass rate by more than `worth`.

    The verdict follows from the probability of that gain, however few points there are, unless the run falls or lies
    below R_0.
    target: a pass rate; the compute to reach this pass rate is estimated, too.
    Raises ValueError for a budget that is not positive.
    """
    now = float(fit.compute.max())
    budget = now if budget is None else float(budget)
    if not 0.0 < budget < math.inf:
        raise ValueError(f"budget is {budget!r}; it has to be a finite number greater than 0")
    gains = gain_draws(fit, now, now + budget)
    probability = float(np.mean(gains > worth))
    verdict, reason = _verdict(fit, budget, worth, probability, float(np.median(gains)))
    parameters = fit.posterior.parameters
    to_target = None
    if target is not None:
        to_target = estimate(compute_to_reach(target, **parameters))
    near_asymptote = compute_to_reach(0.95 * parameters["asymptote"], **parameters)
    return Decision(
        verdict=verdict,
        reason=reason,
        budget=budget,
        gain=estimate(gains),
        worth=worth,
        probability=probability,
        compute_to_95_percent_of_asymptote=estimate(near_asymptote),
        target=target,
        compute_to_target=to_target,
    )


def gain_draws(fit: FitResult, start: float, end: float) -> Array:
    """[draws] gain from compute `start` to compute `end` in the pass rate without measurement noise: the sigmoid plus
    the run's deviation from the sigmoid."""
    mean, variance = fit.posterior.true_pass_rate(np.array([start, end]))
    noise = np.random.default_rng([fit.posterior.seed, 2]).standard_normal(len(mean))
    end_rate = mean[:, 1] + np.sqrt(variance[:, 1]) * noise
    return np.clip(end_rate, 0.0, 1.0) - np.clip(mean[:, 0], 0.0, 1.0)


def estimate(draws: Array, *, value: float | None = None) -> Estimate:
    """`value` (default: the median of the draws) with the 90 % interval of the draws [n]. Draws may be inf."""
    # method "nearest" takes one of the draws; interpolation between a finite draw and inf would give inf
    lo, median, hi = np.quantile(draws, [TAIL, 0.5, 1.0 - TAIL], method="nearest")
    if value is None:
        value = float(median)
    return Estimate(value=value, lo=float(lo), hi=float(hi))


def _verdict(fit: FitResult, budget: float, worth: float, probability: float, gain: float) -> tuple[Verdict, str]:
    # runs below R_0 and falling runs are checked first: a sigmoid only rises, so the forecast gain does not hold
    if fit.posterior.observations.initial_given and below_initial(fit.pass_rate, fit.initial):
        return "stop", f"most points lie below R_0 = {fit.initial:.3f}; check R_0 and the run before spending more"
    if fit.fall is not None:
        lasting = fit.fall.compute / (1.0 - LASTING)
        if fit.compute.max() >= lasting:
            return "stop", f"{fit.fall}; find the instability before spending more"
        advice = f"short dips can recover, so fit again at {short_number(lasting)} {unit_name(fit.unit)}"
        return "too early to say", f"{fit.fall}; {advice}"
    bought = f"{short_number(budget)} more {unit_name(fit.unit)} buy {gain:+.3f} in the median"
    chance = f"{100 * probability:.0f} %"
    caution = ""
    if fit.n_points < FEW_POINTS:
        caution = f"; only {fit.n_points} points were measured, and {FEW_POINTS} or more are needed to rely on it"
    if probability >= LIKELY:
        return "go on", f"{bought}, and more than {worth:g} with a probability of {chance}{caution}"
    if probability <= UNLIKELY:
        return "stop", f"{bought}, and more than {worth:g} with a probability of only {chance}{caution}"
    lo, hi = fit.intervals["asymptote"]
    return "too early to say", (
        f"{bought}, but whether they buy more than {worth:g} is open (probability {chance}); "
        f"A lies in [{lo:.3f}, {hi:.3f}]{caution}"
    )
