"""Compare recipes by ceiling A, compute to one pass rate, and pass rate at a budget (Khatri et al. 2025, A.5).

The unit of a comparison is an arm: a recipe with its runs (`fit.arms`). Falling runs are left out, since no sigmoid
falls (`checks.falling_tail`). A number of an arm, such as A, is the mean over the arm's runs. The variance of a run
is the variance between the arm's runs, and at least the mean variance of a single run's fit. Two arms are compared by
Welch's t test, and p values are adjusted for the number of recipes (Holm 1979). An arm with one run decides nothing.

Every arm also has a probability that the arm's level at the budget is the highest, however short or few the runs are.
The probability comes from Student's t around the mean of several runs. For a single run, draws of the posterior take
the place of Student's t; such draws contain no variance between seeds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_scalerl.fit.arms import Arm, arms_of, differences
from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.decide import Estimate, estimate
from megatron_scalerl.fit.formatting import short_number
from megatron_scalerl.fit.result import TAIL, FitResult
from megatron_scalerl.fit.sigmoid import Array, compute_to_reach, sigmoid
from megatron_scalerl.record import record

SAME_ASYMPTOTE = 0.02
"""Two asymptotes within this margin count as the same: the paper's margin, from three independent runs (Khatri et al.
2025, A.5)."""
SAME_COMPUTE = math.log(1.25)
"""Largest log ratio of two recipes' computes to one pass rate at which the recipes count as equally efficient."""
SHARE_OF_GAIN = 0.8
"""Default of the pass rate whose compute is compared, as a share of the way from R_0 to the lowest A."""
ERROR = 0.05
"""Family-wise error rate: probability that a comparison declares any difference although there is none."""
UNKNOWN_VARIANCE = 1e6
"""Variance used in place of infinity for the compute to a pass rate, if many posterior draws never reach the pass
rate."""
LEAST_VARIANCE = 1e-12
"""Lower bound of a run's variance. Without the bound, equal runs with equal draws of each fit would lead to a
division by 0."""
LARGEST_LOG = 100.0
"""Logarithm above which the end of an interval counts as infinite. A variance of `UNKNOWN_VARIANCE` leads to such an
end."""
SENTENCES = {
    "once": "Not decided, as the recipe or its reference has one run: {}. Two seeds are needed; 3 are better.",
    "ceiling": "The ceiling differs from the reference's: {}.",
    "efficiency": "The efficiency differs from the reference's: {}.",
    "level": "The pass rate at the budget differs from the reference's: {}.",
    "equal": "Ceiling and efficiency equal the reference's, within the margins: {}.",
    "unclear": "These seeds are too few to tell whether there is a difference from the reference: {}.",
}
"""Finding -> the sentence that lists the recipes with this finding."""
Fits = tuple[FitResult, ...]
"""The fits of an arm's runs."""


@record
class Difference(Estimate):
    """A recipe's mean minus the reference's mean, with a 90 % interval by Welch's t; nan if the recipe or the
    reference has one run."""

    p: float
    """Two-sided p value of Welch's t test, adjusted for the number of comparisons; 1 if the recipe or the reference
    has one run."""

    @property
    def declared(self) -> bool:
        """Whether the difference is significant at a family-wise error rate of `ERROR`."""
        return self.p < ERROR

    @property
    def moves_the_ceiling(self) -> bool:
        """Whether this difference, in A, is significant and larger than the paper's margin `SAME_ASYMPTOTE`."""
        return self.declared and abs(self.value) > SAME_ASYMPTOTE

    def within(self, margin: float) -> bool:
        """Whether the 90 % interval lies between -margin and +margin."""
        return -margin <= self.lo and self.hi <= margin


@record
class Mean:
    """The mean of a number over the runs of a recipe."""

    value: float
    """The mean."""
    squared_error: float
    """Variance of the mean; nan for one run."""
    freedom: int
    """Degrees of freedom with which `squared_error` is estimated."""

    def minus(self, reference: "Mean") -> Difference:
        """This mean minus the reference's mean (Welch 1947); p is not adjusted for the number of comparisons."""
        from scipy.special import stdtr

        value = self.value - reference.value
        squared_error = self.squared_error + reference.squared_error
        if math.isnan(squared_error):
            return Difference(**_interval(value, math.nan, math.nan), p=1.0)
        squares = [mean.squared_error**2 / mean.freedom for mean in (self, reference)]
        error = math.sqrt(squared_error)
        freedom = squared_error**2 / sum(squares)
        p = 2.0 * float(stdtr(freedom, -abs(value) / error))
        return Difference(**_interval(value, error, freedom), p=p)


def mean_of(values: Array, fit_variance: Array) -> Mean:
    """The mean of `values` [runs]. fit_variance: [runs] posterior variance of each value by the run's fit."""
    count = len(values)
    if count < 2:
        return Mean(value=float(values[0]), squared_error=math.nan, freedom=0)
    variance = max(float(np.var(values, ddof=1)), float(fit_variance.mean()), LEAST_VARIANCE)
    return Mean(value=float(values.mean()), squared_error=variance / count, freedom=count - 1)


def _interval(value: float, error: float, freedom: float) -> dict[str, float]:
    from scipy.special import stdtrit

    half = error * float(stdtrit(freedom, 1.0 - TAIL))
    return {"value": value, "lo": value - half, "hi": value + half}


def spread(recipes: Sequence[Sequence[float]]) -> float:
    """Standard deviation between runs of one recipe, pooled over all recipes; nan if no recipe was run twice."""
    freedom = sum(len(values) - 1 for values in recipes)
    # `np.var` divides by n, so n * `np.var` is the sum of squares
    squares = sum(len(values) * float(np.var(values)) for values in recipes)
    return math.sqrt(squares / freedom) if freedom else math.nan


def adjusted_differences(differences: Mapping[int, Difference]) -> dict[int, Difference]:
    """The differences with p values adjusted by Holm's method (1979), which bounds the family-wise error rate."""
    out = {}
    highest = 0.0
    for rank, (key, difference) in enumerate(sorted(differences.items(), key=lambda item: item[1].p)):
        # Holm: an adjusted p is raised to the previous adjusted p, so that the order of the p values stays
        highest = max(highest, min(1.0, (len(differences) - rank) * difference.p))
        out[key] = replace(difference, p=highest)
    return out


@record
class Quantity:
    """A number computed from a sigmoid's parameters, and the scale on which recipes are compared by the number."""

    formula: Callable[[Mapping[str, Any]], Any]
    """Function that computes the number from the sigmoid's parameters (name -> value). From parameters [draws] the
    function computes numbers [draws]."""
    scaled: Callable[[Any], Any] = np.log
    """Function that maps a number, or [n] numbers, to the compared scale: the logarithm of a positive number."""
    back: Callable[[float], float] = math.exp
    """The inverse of `scaled`."""

    def mean(self, fits: Fits) -> Mean | None:
        """The mean over the runs on the compared scale; None where the number of a run is not finite."""
        values = self._scaled([self.formula(fit.parameters) for fit in fits])
        if not np.isfinite(values).all():
            return None
        return mean_of(values, np.array([self._variance(fit) for fit in fits]))

    def estimate(self, fits: Fits) -> Estimate:
        """The mean over the runs with a 90 % interval over seeds; for a logarithmic scale the geometric mean.

        For a single run, the run's number with the interval of the fit. inf if the number of any run is inf.
        """
        mean = self.mean(fits)
        values = [float(self.formula(fit.parameters)) for fit in fits]
        if mean is None:
            return Estimate(value=max(values), lo=min(values), hi=max(values))
        if len(fits) == 1:
            return estimate(self.formula(fits[0].posterior.parameters), value=values[0])
        interval = _interval(mean.value, math.sqrt(mean.squared_error), mean.freedom)
        return Estimate(**{key: self.back(_interval_end(end)) for key, end in interval.items()})

    def draws(self, fits: Fits, rng: np.random.Generator) -> Array:
        """[draws] random draws of the mean over the runs, independent of the draws of any other arm."""
        mean = self.mean(fits)
        posterior = self._scaled(self.formula(fits[0].posterior.parameters))
        if len(fits) == 1:
            return rng.permutation(posterior)
        assert mean is not None, "the mean pass rate at the budget is not finite"
        return mean.value + math.sqrt(mean.squared_error) * rng.standard_t(mean.freedom, len(posterior))

    def _scaled(self, values: Any) -> Array:
        with np.errstate(divide="ignore"):
            return np.asarray(self.scaled(values), dtype=float)

    def _variance(self, fit: FitResult) -> float:
        """Posterior variance of a run's number, computed from quantiles, because draws of a compute have a heavy
        tail."""
        draws = self._scaled(self.formula(fit.posterior.parameters))
        lower, upper = np.quantile(draws, [0.1587, 0.8413], method="nearest").tolist()
        variance = ((upper - lower) / 2) ** 2
        return variance if math.isfinite(variance) else UNKNOWN_VARIANCE


ASYMPTOTE = Quantity(formula=lambda parameters: parameters["asymptote"], scaled=np.asarray, back=float)
EXPONENT = Quantity(formula=lambda parameters: parameters["exponent"])
MIDPOINT = Quantity(formula=lambda parameters: parameters["midpoint"])


def compute_to(pass_rate: float) -> Quantity:
    """The quantity "compute at which a run's curve reaches the pass rate"; inf for a curve that stays below."""
    return Quantity(formula=lambda parameters: compute_to_reach(pass_rate, **parameters))


def level_at(compute: float) -> Quantity:
    """The quantity "pass rate of a run's curve at the compute"."""
    return Quantity(formula=lambda parameters: sigmoid(compute, **parameters), scaled=np.asarray, back=float)


def _interval_end(end: float) -> float:
    """`end`, one end of an interval on the compared scale, or inf with the sign of `end` if |end| exceeds
    `LARGEST_LOG`."""
    return math.copysign(math.inf, end) if abs(end) > LARGEST_LOG else end


@record
class ComparedArm:
    """A recipe of a comparison, with the results of all runs that do not fall."""

    name: str
    """The arm's name."""
    reference: str | None
    """Name of the arm's reference; None for the reference of all arms."""
    change: str
    """Settings of the recipe that differ from the reference's; empty if unknown."""
    fits: tuple[FitResult, ...]
    """[runs] fits of the runs that do not fall."""
    seeds: tuple[int | None, ...]
    """[runs] seeds of `fits`; None where unknown."""
    asymptote: Estimate
    """Mean A. The intervals of this field and of the next four are over seeds; for a single run, intervals of the
    fit."""
    exponent: Estimate
    """Geometric mean of B."""
    midpoint: Estimate
    """Geometric mean of C_mid, in the runs' unit."""
    to_reach: Estimate
    """Geometric mean of the compute to the comparison's pass rate; inf: a run never reaches the pass rate."""
    level: Estimate
    """Mean pass rate at the comparison's budget."""
    best: float
    """Probability that the level at the budget is the highest of all arms."""
    ceiling: Difference | None
    """A minus the A of the arm's reference; None for the reference of all arms."""
    efficiency: Difference | None
    """Log of the ratio of `to_reach` to the reference's `to_reach`; None for the reference of all arms, and if a run
    of the arm or the reference never reaches the pass rate."""
    gap: Difference | None
    """Level at the budget minus the level of the arm's reference; None for the reference of all arms."""

    @property
    def runs(self) -> int:
        """Number of runs that do not fall."""
        return len(self.fits)

    @property
    def measured(self) -> Estimate:
        """Mean of the runs' last fitted pass rates, with the lowest and the highest."""
        last = [float(fit.pass_rate[-1]) for fit in self.fits]
        return Estimate(value=float(np.mean(last)), lo=min(last), hi=max(last))


@record
class Comparison:
    """Comparison of recipes by A, B, C_mid, compute to one pass rate and pass rate at a budget (see Khatri et al.
    2025, Fig. 4)."""

    arms: tuple[ComparedArm, ...]
    """The compared arms; the reference of all arms comes first. An arm whose runs all fall is left out."""
    falling: Mapping[str, tuple[str, ...]]
    """Name of an arm -> names of the falling runs, which are left out."""
    pass_rate: float
    """Pass rate for which the recipes' computes are compared."""
    budget: float
    """Compute, in the runs' unit, at which the recipes' pass rates are compared."""
    between_runs: float
    """Standard deviation of A between runs of one recipe; nan where no recipe was run twice."""

    def arm(self, name: str | None) -> ComparedArm:
        """The compared arm with this name."""
        return next(arm for arm in self.arms if arm.name == name)


def compare_runs(
    curves: Sequence[Curve],
    fits: Mapping[str, FitResult],
    *,
    references: Sequence[str] = (),
    pass_rate: float | None = None,
    budget: float | None = None,
) -> Comparison:
    """Group runs by recipe and compare the recipes. The runs have unique names and one unit of compute.

    fits:       name of a run -> the run's fit.
    references: the arm that every arm is compared with (default: the first run's); ARM=REFERENCE for a single arm.
    pass_rate:  the pass rate whose compute is compared; default: R_0 plus 80 % of the gain to the lowest mean A.
    budget:     compute after the longest run's end at which levels are compared; default: the longest run's compute.
    Raises ValueError for a single run, and for a reference that is no arm.
    """
    if len(curves) < 2:
        raise ValueError(f"a comparison takes at least two runs; {len(curves)} was given")
    groups = arms_of(curves)
    steady, falling = _without_falling(groups, fits)
    arms, reference_indices = _ordered_arms(steady, groups, references)
    if not arms:
        unknown = {"pass_rate": math.nan, "budget": math.nan, "between_runs": math.nan}
        return Comparison(arms=(), falling=falling, **unknown)
    runs = [tuple(fits[curve.name] for curve in arm.curves) for arm in arms]
    if pass_rate is None:
        start = float(np.mean([fit.initial for fit in runs[0]]))
        pass_rate = start + SHARE_OF_GAIN * (min(ASYMPTOTE.estimate(arm_fits).value for arm_fits in runs) - start)
    longest = max(float(fit.compute[-1]) for arm_fits in runs for fit in arm_fits)
    total = longest + (longest if budget is None else budget)
    return Comparison(
        arms=_compared_arms(arms, runs, reference_indices, compute_to(pass_rate), level_at(total)),
        falling=falling,
        pass_rate=pass_rate,
        budget=total,
        between_runs=spread([[fit.asymptote for fit in arm_fits] for arm_fits in runs]),
    )


def _compared_arms(
    arms: Sequence[Arm], runs: Sequence[Fits], reference_indices: Sequence[int], reach: Quantity, level: Quantity
) -> tuple[ComparedArm, ...]:
    """The compared arms, with differences to the reference of each arm.

    runs: [arms] fits of each arm's runs. reference_indices: [arms] the index of each arm's reference; arm 0 is the
    reference of all arms. reach, level: the compute to the compared pass rate, and the pass rate at the budget.
    """
    ceilings, efficiencies, gaps = (
        _differences(quantity, runs, reference_indices) for quantity in (ASYMPTOTE, reach, level)
    )
    rng = np.random.default_rng(0)
    highest = np.argmax([level.draws(arm_fits, rng) for arm_fits in runs], axis=0)
    compared = []
    for n, arm in enumerate(arms):
        asymptote = ASYMPTOTE.estimate(runs[n])
        compared.append(
            ComparedArm(
                name=arm.name,
                reference=arms[reference_indices[n]].name if n else None,
                change=differences(arm, arms[reference_indices[n]]),
                fits=runs[n],
                seeds=tuple(curve.seed for curve in arm.curves),
                asymptote=replace(asymptote, lo=max(asymptote.lo, 0.0), hi=min(asymptote.hi, 1.0)),
                exponent=EXPONENT.estimate(runs[n]),
                midpoint=MIDPOINT.estimate(runs[n]),
                to_reach=reach.estimate(runs[n]),
                level=level.estimate(runs[n]),
                best=float(np.mean(highest == n)),
                ceiling=ceilings.get(n),
                efficiency=efficiencies.get(n),
                gap=gaps.get(n),
            )
        )
    return tuple(compared)


def _without_falling(
    groups: Sequence[Arm], fits: Mapping[str, FitResult]
) -> tuple[list[Arm], dict[str, tuple[str, ...]]]:
    """(arms without falling runs, name of an arm -> names of falling runs). fits: name of a run -> the run's fit."""
    falling = {}
    steady = []
    for group in groups:
        steady_curves = tuple(curve for curve in group.curves if fits[curve.name].fall is None)
        if steady_curves:
            steady.append(replace(group, curves=steady_curves))
        falling_names = tuple(curve.name for curve in group.curves if curve not in steady_curves)
        if falling_names:
            falling[group.name] = falling_names
    return steady, falling


def _ordered_arms(
    arms: Sequence[Arm], all_arms: Sequence[Arm], references: Sequence[str]
) -> tuple[list[Arm], list[int]]:
    """(`arms` with the reference of all arms first, [arms] index of each arm's reference).

    references: NAME for the reference of all arms, ARM=NAME for the reference of one arm; NAME is in `all_arms`. For
    a reference whose runs all fall, the reference of all arms is taken.
    """
    reference_names = {}
    for text in references:
        name, equals, reference = text.rpartition("=")
        if equals:
            name = _name_of(all_arms, name)
        reference_names[name] = _name_of(all_arms, reference)
    first = reference_names.get("")
    ordered = sorted(arms, key=lambda arm: arm.name != first)
    places = {arm.name: n for n, arm in enumerate(ordered)}
    return ordered, [places.get(reference_names.get(name, ""), 0) for name in places]


def _name_of(arms: Sequence[Arm], name: str) -> str:
    """The name of the arm that has this name or a run of this name. Raises ValueError if there is no such arm."""
    for arm in arms:
        if name in (arm.name, *(curve.name for curve in arm.curves)):
            return arm.name
    raise ValueError(
        f"--reference: no recipe or run is named {name!r}; choose one of {', '.join(arm.name for arm in arms)}"
    )


def _differences(quantity: Quantity, arms: Sequence[Fits], reference_indices: Sequence[int]) -> dict[int, Difference]:
    """Index of an arm -> difference to the arm's reference, p adjusted for the number of differences.

    The result lacks arm 0, the reference of all arms, and each arm where the mean of the arm or of the arm's
    reference is None.
    """
    means = [quantity.mean(fits) for fits in arms]
    by_arm = {}
    for n, mean in enumerate(means):
        reference = means[reference_indices[n]]
        if n and mean and reference:
            by_arm[n] = mean.minus(reference)
    return by_arm | adjusted_differences({n: difference for n, difference in by_arm.items() if difference.p < 1.0})


def summary(comparison: Comparison, arm: ComparedArm) -> str:
    """One or two sentences on the difference between an arm and the arm's reference."""
    runs = "1 run" if arm.runs == 1 else f"{arm.runs} runs"
    if arm.ceiling is None:
        return f"{arm.name} is the reference: A = {arm.asymptote.value:.3f}, B = {arm.exponent.value:.2f} ({runs})."
    ceiling = arm.ceiling
    reference = comparison.arm(arm.reference)
    if min(arm.runs, reference.runs) < 2:
        position = "within" if abs(ceiling.value) <= SAME_ASYMPTOTE else "outside"
        text = f"{arm.name} against {reference.name}: one run decides nothing. A differs by {ceiling.value:+.3f},"
        text += f" {position} the paper's margin of ±{SAME_ASYMPTOTE:g} between runs of one recipe."
        return f"{text} {_level(comparison, arm)}"
    gap = f"A {ceiling.value:+.3f} [{ceiling.lo:+.3f}, {ceiling.hi:+.3f}]"
    if ceiling.moves_the_ceiling:
        way = "raises" if ceiling.value > 0 else "lowers"
        return f"{arm.name} {way} the ceiling: {gap} (p = {ceiling.p:.2g}, {runs})."
    if ceiling.within(SAME_ASYMPTOTE):
        first = f"{arm.name} keeps the ceiling: {gap}, within ±{SAME_ASYMPTOTE:g}"
    else:
        first = f"Whether {arm.name} moves the ceiling cannot be told from {runs}: {gap}"
    return f"{first}. {_efficiency(arm.efficiency, f'{comparison.pass_rate:.3f}')} {_level(comparison, arm)}"


def left_out(comparison: Comparison) -> list[str]:
    """One sentence for each recipe with falling runs: the runs, and whether the recipe is still compared."""
    compared_runs = {arm.name: arm.runs for arm in comparison.arms}
    lines = []
    for name, runs in comparison.falling.items():
        text = f"{name} is not compared, not even as a reference, because the pass rates of all its runs fall"
        if name in compared_runs:
            text = f"{name}: {len(runs)} of {len(runs) + compared_runs[name]} runs are left out, as pass rates fall"
        lines.append(f"{text}: {', '.join(runs)}.")
    return lines


def conclusions(comparison: Comparison) -> list[str]:
    """The results of the comparison in a few sentences."""
    if not comparison.arms:
        return []
    arms: dict[str, list[str]] = {}
    for arm in comparison.arms[1:]:
        finding, text = _finding(comparison, arm)
        arms.setdefault(finding, []).append(text)
    listed = {finding: ", ".join(texts) for finding, texts in arms.items()}
    lines = [text.format(listed[finding]) for finding, text in SENTENCES.items() if finding in listed]
    return [_variance(comparison), *lines]


def _finding(comparison: Comparison, arm: ComparedArm) -> tuple[str, str]:
    """(key of `SENTENCES` for the arm; the arm's name with the difference that was found)."""
    ceiling = arm.ceiling
    efficiency = arm.efficiency
    gap = arm.gap
    if ceiling is None or min(arm.runs, comparison.arm(arm.reference).runs) < 2:
        return "once", arm.name
    if ceiling.moves_the_ceiling:
        return "ceiling", f"{arm.name} (A {ceiling.value:+.3f})"
    if efficiency and efficiency.declared:
        return "efficiency", f"{arm.name} ({_ratio(efficiency)})"
    if gap and gap.declared:
        return "level", f"{arm.name} ({gap.value:+.3f} at {short_number(comparison.budget)})"
    if efficiency and ceiling.within(SAME_ASYMPTOTE) and efficiency.within(SAME_COMPUTE):
        return "equal", arm.name
    return "unclear", arm.name


def _variance(comparison: Comparison) -> str:
    if math.isnan(comparison.between_runs):
        return (
            "Nothing is decided, as every recipe has one run: the difference between runs of one recipe is unknown "
            f"(±{SAME_ASYMPTOTE:g} in A in the paper)."
        )
    text = f"A differs between runs of one recipe by {comparison.between_runs:.3f} (standard deviation)."
    if len(comparison.arms) == 1:
        return text
    return (
        f"{text} The probability that any declared difference in A is wrong is about {ERROR:.0%}, and higher if one "
        "compares after every run. The same holds for efficiency and pass rate."
    )


def _efficiency(difference: Difference | None, target: str) -> str:
    if difference is None:
        return f"Its compute to {target} is not compared, because a run never reaches this pass rate."
    factor = f"{_ratio(difference)} to {target}"
    if difference.declared:
        word = "more" if difference.value < 0 else "less"
        return f"It is {word} efficient: {factor} (p = {difference.p:.2g})."
    if difference.within(SAME_COMPUTE):
        return f"It is as efficient as the reference, within a factor of {math.exp(SAME_COMPUTE):g}: {factor}."
    return f"Whether its efficiency differs cannot be told: {factor}."


def _level(comparison: Comparison, arm: ComparedArm) -> str:
    best = max(comparison.arms, key=lambda compared: compared.best)
    text = f"At {short_number(comparison.budget)} its pass rate is {arm.level.value:.3f}"
    text += f" [{arm.level.lo:.3f}, {arm.level.hi:.3f}], the best with a probability of {arm.best:.2f}"
    if best is not arm:
        text += f" ({best.name}: {best.best:.2f})"
    return f"{text}."


def _ratio(difference: Difference) -> str:
    lo, hi = (math.exp(_interval_end(end)) for end in (difference.lo, difference.hi))
    return f"{math.exp(difference.value):.2f} [{lo:.2f}, {hi:.2f}] times the compute"
