"""A comparison in words: what moves the ceiling or the efficiency, what cannot be told, how many seeds would tell."""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_scalerl.fit.between_runs import ERROR, MOST_SEEDS, POWER, UNEVEN_ERROR, Difference, seeds_to_tell
from megatron_scalerl.fit.compare import (
    SAME_ASYMPTOTE,
    SAME_COMPUTE,
    ComparedArm,
    Comparison,
    decides,
    moves_the_ceiling,
    within,
)

ENOUGH = 3
"""Seeds of each recipe that are suggested where there is one."""


def summary(comparison: Comparison, arm: ComparedArm) -> str:
    """How an arm differs from its reference, in one or two sentences."""
    runs = f"{arm.runs} run{'s' * (arm.runs > 1)}"
    if arm.reference is None:
        return f"{arm.name} is the reference: A = {arm.asymptote.value:.3f}, B = {arm.exponent.value:.2f} ({runs})."
    assert arm.ceiling is not None
    if not decides(arm, comparison.arm(arm.reference)):
        return _by_the_margin(comparison, arm)
    ceiling, gap = arm.ceiling, f"A {arm.ceiling.value:+.3f}{_interval(arm.ceiling)}"
    if moves_the_ceiling(ceiling):
        way = "raises" if ceiling.value > 0 else "lowers"
        return f"{arm.name} {way} the ceiling: {gap} (p = {_p(ceiling)}, {runs})."
    if within(ceiling, SAME_ASYMPTOTE):
        first = f"{arm.name} keeps the ceiling: {gap}, within ±{SAME_ASYMPTOTE:g}"
    else:
        first = f"Whether {arm.name} moves the ceiling cannot be told from {runs}: {gap}; {_ceiling_seeds(arm)}"
    return f"{first}. {_efficiency(comparison, arm)}"


def conclusions(comparison: Comparison) -> list[str]:
    """What the whole comparison says, in a few sentences."""
    others = [arm for arm in comparison.arms if arm.reference is not None]
    decided = [arm for arm in others if decides(arm, comparison.arm(str(arm.reference)))]
    lines = [_variance(comparison)]
    single = [arm.name for arm in others if arm not in decided]
    if single:
        lines.append(
            f"Run once, so not decided: {', '.join(single)}. At least two seeds, better {ENOUGH}, are needed."
        )
    if not decided:
        return lines
    moved = [arm for arm in decided if arm.ceiling is not None and moves_the_ceiling(arm.ceiling)]
    kept = [arm for arm in decided if arm.ceiling is not None and within(arm.ceiling, SAME_ASYMPTOTE)]
    faster = [arm for arm in decided if arm not in moved and arm.efficiency is not None and arm.efficiency.declared]
    equal = [a for a in kept if a.efficiency is not None and a not in faster and within(a.efficiency, SAME_COMPUTE)]
    open_ones = [arm.name for arm in decided if arm not in moved and arm not in faster and arm not in equal]
    lines.append(f"Moves the ceiling: {_named(moved, lambda a: f'A {a.ceiling.value:+.3f}' if a.ceiling else '')}.")
    lines.append(f"Changes the efficiency: {_named(faster, lambda a: _ratio(a.efficiency))}.")
    if equal:
        lines.append(f"Neither, within the margins: {', '.join(arm.name for arm in equal)}.")
    if open_ones:
        lines.append(f"Cannot be told apart from the reference with these seeds: {', '.join(open_ones)}.")
    return lines


def _variance(comparison: Comparison) -> str:
    if math.isnan(comparison.between_runs):
        return (
            "Every recipe was run once, so that nothing is decided: how far runs of one recipe differ is unknown "
            f"(±{SAME_ASYMPTOTE:g} in A in the paper)."
        )
    pairing = "; recipes are compared within seeds" if comparison.paired else ""
    spread = f"A differs between runs of one recipe by {comparison.between_runs:.3f} (standard deviation){pairing}."
    if len(comparison.arms) == 1:
        return spread
    return (
        f"{spread} "
        f"That any declared difference in A is wrong has a probability of about {ERROR:.0%} where recipes scatter "
        f"alike, up to {UNEVEN_ERROR:.0%} where they do not, more if one looks after every run; so for efficiency."
    )


def _by_the_margin(comparison: Comparison, arm: ComparedArm) -> str:
    assert arm.ceiling is not None
    difference, other = arm.ceiling.value, comparison.arm(str(arm.reference))
    once = "both were" if arm.runs == other.runs == 1 else f"{arm.name if arm.runs == 1 else other.name} was"
    where = "within" if abs(difference) <= SAME_ASYMPTOTE else "outside"
    text = (
        f"{arm.name} against {other.name}: {once} run once, which decides nothing. A {difference:+.3f}, {where} the "
        f"paper's margin of ±{SAME_ASYMPTOTE:g} between runs of one recipe"
    )
    if arm.fixed_exponent is not None and other.fixed_exponent is not None:
        text += f"; B {arm.fixed_exponent.value:.2f} against {other.fixed_exponent.value:.2f} at equal A"
    return f"{text}."


def _efficiency(comparison: Comparison, arm: ComparedArm) -> str:
    difference, target = arm.efficiency, f"{comparison.pass_rate:.3f}"
    if difference is None or arm.fixed_exponent is None:
        return f"Its compute to {target} is not compared at equal A."
    other = comparison.arm(str(arm.reference)).fixed_exponent
    exponents = "" if other is None else f", B {arm.fixed_exponent.value:.2f} against {other.value:.2f} at equal A"
    factor = f"{_ratio(difference)} to {target}{exponents}"
    if difference.declared:
        word = "more" if difference.value < 0 else "less"
        return f"It is {word} efficient: {factor} (p = {_p(difference)})."
    if within(difference, SAME_COMPUTE):
        return f"It is as efficient, within a factor of {math.exp(SAME_COMPUTE):g}: {factor}."
    size = max(abs(difference.value), SAME_COMPUTE)
    needed = _needed(difference, size, arm.runs, f"a factor of {math.exp(size):.2f}")
    return f"Its efficiency cannot be told apart: {factor}; {needed}."


def _ceiling_seeds(arm: ComparedArm) -> str:
    assert arm.ceiling is not None
    size = max(abs(arm.ceiling.value), SAME_ASYMPTOTE)
    return _needed(arm.ceiling, size, arm.runs, f"a difference of {size:.3f}")


def _needed(difference: Difference, size: float, seeds: int, what: str) -> str:
    count = seeds_to_tell(difference, size, seeds=seeds)
    if count is None:
        return f"more than {MOST_SEEDS} seeds of each would tell {what}"
    return f"about {count} seeds of each would tell {what} (power {POWER:.0%})"


def _interval(difference: Difference) -> str:
    return "" if math.isnan(difference.lo) else f" [{difference.lo:+.3f}, {difference.hi:+.3f}]"


def _ratio(difference: Difference | None) -> str:
    assert difference is not None
    lo, hi = (math.exp(min(end, 700.0)) for end in (difference.lo, difference.hi))
    return f"{math.exp(difference.value):.2f} [{lo:.2f}, {hi:.2f}] times the compute"


def _named(arms: list[ComparedArm], how: Callable[[ComparedArm], str]) -> str:
    return ", ".join(f"{arm.name} ({how(arm)})" for arm in arms) or "none is found to"


def _p(difference: Difference) -> str:
    return f"{difference.p:.3f}" if difference.p >= 0.001 else "0.001 or less"
