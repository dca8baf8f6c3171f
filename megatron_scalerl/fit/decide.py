"""Is it worth going on? What a budget of further compute is expected to buy, and a verdict with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_scalerl.fit.checks import FEW_POINTS, below_initial, falling_tail
from megatron_scalerl.fit.result import TAIL, FitResult
from megatron_scalerl.fit.sigmoid import Array, compute_to_reach
from megatron_scalerl.fit.wording import short_number, unit_name

WORTH = 0.01
"""Gain in pass rate that a budget has to buy, unless told otherwise."""
SURE, UNLIKELY = 0.8, 0.2
"""Probability of that gain from which the verdict is to go on, and below which it is to stop."""
NEARLY_THERE = 0.95
"""Share of A whose compute is stated."""

Verdict = Literal["go on", "stop", "too early to say"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its 90 % interval; inf where it is never reached."""

    value: float
    lo: float
    hi: float


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What one run is expected to gain, and what to do."""

    verdict: Verdict
    reason: str
    now: float
    """Largest fitted compute."""
    budget: float
    """Further compute that the gain is for; as much again as was spent, unless told otherwise."""
    gain: Estimate
    """Gain in the true pass rate from `now` to `now + budget`."""
    gain_per_unit: Estimate
    """That gain per unit of compute."""
    worth: float
    """The gain that the budget has to buy."""
    probability: float
    """Probability that the gain exceeds `worth`."""
    to_asymptote: Estimate
    """Compute at which 95 % of A is reached."""
    target: float | None
    """A pass rate that was asked for."""
    to_target: Estimate | None
    """Compute at which the target is reached; inf where the ceiling lies below it."""

    def sentence(self) -> str:
        """Verdict and reason in one line."""
        return f"{self.verdict}: {self.reason}"


def decide(
    fit: FitResult, *, budget: float | None = None, worth: float = WORTH, target: float | None = None
) -> Decision:
    """Weigh `budget` further units of compute against a gain of `worth`.

    Raises ValueError for a budget that is not positive.
    """
    now = float(fit.compute.max())
    budget = now if budget is None else float(budget)
    if not budget > 0:
        raise ValueError(f"budget: expected compute > 0, found {budget!r}")
    gains = gain_draws(fit, now, now + budget)
    probability = float(np.mean(gains > worth))
    verdict, reason = _verdict(fit, now, budget, worth, probability, float(np.median(gains)))
    posterior = fit.posterior
    return Decision(
        verdict=verdict,
        reason=reason,
        now=now,
        budget=budget,
        gain=_estimate(gains),
        gain_per_unit=_estimate(gains / budget),
        worth=worth,
        probability=probability,
        to_asymptote=_estimate(_reach(fit, NEARLY_THERE * posterior.asymptote)),
        target=target,
        to_target=None if target is None else _estimate(_reach(fit, np.full_like(posterior.asymptote, target))),
    )


def gain_draws(fit: FitResult, start: float, end: float) -> Array:
    """[draws] gain in the true pass rate, wander included, between two computes."""
    mean, variance = fit.posterior.true_pass_rate(np.array([start, end]))
    noise = np.random.default_rng([fit.posterior.seed, 2]).standard_normal(len(mean))
    return mean[:, 1] - mean[:, 0] + np.sqrt(variance[:, 1]) * noise


def _reach(fit: FitResult, pass_rate: Array) -> Array:
    posterior = fit.posterior
    return compute_to_reach(
        pass_rate,
        asymptote=posterior.asymptote,
        exponent=posterior.exponent,
        midpoint=posterior.midpoint,
        initial=posterior.initial,
    )


def _estimate(draws: Array) -> Estimate:
    lo, value, hi = np.quantile(draws, [TAIL, 0.5, 1.0 - TAIL], method="nearest")
    return Estimate(value=float(value), lo=float(lo), hi=float(hi))


def _verdict(
    fit: FitResult, now: float, budget: float, worth: float, probability: float, gain: float
) -> tuple[Verdict, str]:
    chance = f"{100 * probability:.0f} %"
    units = unit_name(fit.unit)
    bought = f"{short_number(budget)} more {units} buy {gain:+.3f} in the median"
    fall = falling_tail(fit.compute, fit.pass_rate)
    if below_initial(fit.pass_rate, fit.initial):
        return "stop", f"most points lie below R_0 = {fit.initial:.3f}; check R_0 and the run before spending more"
    if fall is not None:
        return "stop", (
            f"the pass rate has fallen by {fall[1]:.3f} since {short_number(fall[0])}; "
            "find the instability before spending more"
        )
    if fit.n_points < FEW_POINTS:
        return "too early to say", f"only {fit.n_points} points; measure at least {FEW_POINTS}"
    if probability >= SURE:
        return "go on", f"{bought}, and more than {worth:g} with a probability of {chance}"
    if probability <= UNLIKELY:
        return "stop", f"{bought}, and more than {worth:g} with a probability of only {chance}"
    lo, hi = fit.intervals["asymptote"]
    return "too early to say", (
        f"{bought}, but whether they buy more than {worth:g} is open (probability {chance}); "
        f"A lies in [{lo:.3f}, {hi:.3f}]"
    )
