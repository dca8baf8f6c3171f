"""Which recipe scales better: the ceiling first, then the efficiency (Khatri et al. 2025, A.5 and Fig. 4).

The unit of a comparison is a recipe with its runs, an arm (`fit.arms`). One number per run, such as its A, is
explained by its recipe plus its seed:

    y = recipe + seed + e

Seeds are in the model where recipes share at least two of them and the same start (paired); otherwise each run stands
alone. The variance of e is what runs of one recipe differ by, errors of the fit included. All recipes have it in
common, since two or three runs say little about a variance; a reference's, which is in many differences, is its own
where that is larger. None is taken below the variance that the fit of a single run has by itself. Intervals are
Student's t; p values are adjusted for the number of recipes (Holm 1979).

Arms whose ceiling is not found to differ from their reference's are refitted with A fixed to the mean of their A;
their efficiency is the compute to reach one pass rate there, of which B is a part. An arm with one run decides
nothing: whether its A lies within 0.02 of the reference's, the paper's margin between runs of one recipe, then only
says whether it is refitted.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_scalerl.fit.arms import Arm, arms_of, differences, shared_start
from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.decide import Estimate, estimate
from megatron_scalerl.fit.result import TAIL, FitResult
from megatron_scalerl.fit.sigmoid import Array, compute_to_reach
from megatron_scalerl.record import record

SAME_ASYMPTOTE = 0.02
"""Two asymptotes within this margin count as the same (three independent runs; Khatri et al. 2025, A.5)."""
SAME_COMPUTE = math.log(1.25)
"""Two recipes count as equally efficient where the log ratio of their compute to one pass rate is within this."""
SHARE_OF_GAIN = 0.8
"""The compared pass rate is this share of the way from R_0 to the common A."""
ERROR = 0.05
"""Probability that any difference of one table is declared although there is none; recipes scatter alike."""
UNEVEN_ERROR = 0.1
"""The same where recipes scatter by very different amounts; simulated (tests/fit/test_between_runs.py)."""
Arms = Sequence[Sequence[FitResult]]
"""The fits of each arm; an empty one has no part in a quantity."""
Seeds = Sequence[tuple[int | None, ...]]
"""The seeds of the fits."""


@record
class Runs:
    """One number per run of one recipe."""

    values: Array
    """[runs]"""
    fit_variance: Array
    """[runs] variance of each by its own fit."""
    seeds: tuple[int | None, ...]
    """[runs] None where unknown."""


@record
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

    @property
    def declared(self) -> bool:
        """Whether the two differ, at an error of `ERROR` for all comparisons together."""
        return self.p < ERROR

    @property
    def moves_the_ceiling(self) -> bool:
        """Whether a difference in A is declared, and larger than the paper's margin."""
        return self.declared and abs(self.value) > SAME_ASYMPTOTE

    def within(self, margin: float) -> bool:
        """Whether the 90 % interval lies inside the margin."""
        return -margin <= self.lo and self.hi <= margin


class Table:
    """The numbers of several recipes, fitted together."""

    def __init__(self, recipes: Sequence[Runs], *, paired: bool, references: Collection[int] = ()):
        """recipes: with finite values, none empty. paired: whether equal seeds may be compared within the seed.

        references: recipes that others are compared with; their variance is in many differences.
        """
        values = np.concatenate([r.values for r in recipes])
        arm = np.repeat(np.arange(len(recipes)), [len(r.values) for r in recipes])
        self._counts = np.bincount(arm)
        self._arms = (arm[:, None] == np.arange(len(recipes))).astype(float)
        self._parts = sharing_seeds([r.seeds for r in recipes]) if paired else list(range(len(recipes)))
        columns = np.hstack([self._arms, *_seed_effects([r.seeds for r in recipes], self._parts)])
        self.paired = columns.shape[1] > len(recipes)
        self._apart = Table(recipes, paired=False, references=references) if self.paired else self
        """For recipes that do not share seeds."""
        self._inverse = np.linalg.pinv(columns)
        left = np.eye(len(values)) - columns @ self._inverse
        self._effects = self._inverse @ values
        self._total = max(float(np.trace(left)), 1e-9)
        squares, freedom = self._arms.T @ (left @ values) ** 2, self._arms.T @ np.diag(left)
        variance, self._freedom = _variances(squares, freedom, references)
        self._variance = np.maximum(variance, [r.fit_variance.mean() for r in recipes])
        """[recipes] of one run; nan where no recipe was run twice."""

    def mean(self, index: int) -> Estimate:
        """The recipe's mean, with the 90 % interval of the mean over seeds; the interval is nan if unknown."""
        value = float(self._effects[index])
        return Estimate(value=value, **_interval(value, *self._error(self._inverse[index])))

    def difference(self, index: int, reference: int) -> Difference:
        """Recipe `index` minus `reference`, tested alone; within seeds if they share them."""
        if self.paired and self._parts[index] != self._parts[reference]:
            return self._apart.difference(index, reference)
        value = float(self._effects[index] - self._effects[reference])
        error, freedom = self._error(self._inverse[index] - self._inverse[reference])
        p = 1.0
        if min(self._counts[index], self._counts[reference]) >= 2 and not math.isnan(error):
            from scipy.special import stdtr

            p = 2.0 * float(stdtr(freedom, -abs(value) / max(error, 1e-300)))
        return Difference(value=value, **_interval(value, error, freedom), p=p, paired=self.paired)

    def _error(self, weights: Array) -> tuple[float, float]:
        """(standard error of weights . values, its degrees of freedom after Satterthwaite); nan if unknown."""
        parts = (self._arms.T @ weights**2) * self._variance
        used = parts > 0
        if np.isnan(parts).any() or not used.any():
            return math.nan, math.nan
        total = float(parts.sum())
        freedom = total**2 / float((parts[used] ** 2 / self._freedom[used]).sum())
        return math.sqrt(total), min(freedom, self._total)


def _interval(value: float, error: float, freedom: float) -> dict[str, float]:
    from scipy.special import stdtrit

    half = error * float(stdtrit(freedom, 1.0 - TAIL))
    return {"lo": value - half, "hi": value + half}


def _variances(squares: Array, freedom: Array, references: Collection[int]) -> tuple[Array, Array]:
    """(variance of one run, its degrees of freedom), both [recipes]; nan and 0 where nothing is known.

    squares: [recipes] sums of squared residuals. freedom: [recipes] their degrees of freedom; 0 for one run. Of two
    recipes each has its own, of more all have one, but for a reference whose own is larger.
    """
    known = freedom > 1e-6
    total = float(freedom[known].sum())
    common = float(squares[known].sum()) / total if known.any() else math.nan
    own = np.where(known, squares / np.where(known, freedom, 1.0), -math.inf)
    is_reference = np.isin(np.arange(len(squares)), list(references))
    apart = known if known.sum() < 3 else is_reference & (own > common)
    return np.where(apart, own, common), np.where(apart, freedom, total)


def spread(recipes: Sequence[Runs]) -> float:
    """Standard deviation between runs of one recipe, common to all recipes; nan where none was run twice."""
    freedom = sum(len(r.values) - 1 for r in recipes)
    squares = sum(float(((r.values - r.values.mean()) ** 2).sum()) for r in recipes)
    return math.sqrt(squares / freedom) if freedom else math.nan


def sharing_seeds(seeds: Seeds) -> list[int]:
    """[recipes] a number that recipes have in common which share at least two seeds, directly or through others.

    seeds: [recipes, runs]. A recipe with an unknown seed, or with one twice, shares none.
    """
    known = [set() if None in runs or len(set(runs)) < len(runs) else set(runs) for runs in seeds]
    parts = list(range(len(seeds)))
    for n, one in enumerate(known):
        for m in range(n):
            if len(one & known[m]) >= 2:
                parts = [parts[m] if part == parts[n] else part for part in parts]
    return parts


def _seed_effects(seeds: Seeds, parts: Sequence[int]) -> Iterator[Array]:
    """[runs, 1] for each seed of the recipes that share seeds, its mean over their runs 0."""
    part_of_run = np.repeat(parts, [len(runs) for runs in seeds])
    seed_of_run = np.array([-1 if seed is None else seed for runs in seeds for seed in runs])
    for part in sorted({part for part in parts if list(parts).count(part) > 1}):
        inside = (part_of_run == part).astype(float)
        for seed in np.unique(seed_of_run[part_of_run == part]):
            effect = inside * (seed_of_run == seed)
            yield (effect - inside * effect.sum() / inside.sum())[:, None]


def adjusted(differences: Mapping[int, Difference]) -> dict[int, Difference]:
    """The same with p adjusted for their number (Holm 1979): `ERROR` bounds the error of all of them together."""
    out, highest = {}, 0.0
    for rank, (key, difference) in enumerate(sorted(differences.items(), key=lambda item: item[1].p)):
        highest = max(highest, min(1.0, (len(differences) - rank) * difference.p))
        out[key] = replace(difference, p=highest)
    return out


@record
class Quantity:
    """One number of a sigmoid. A number that is positive is compared by its logarithm."""

    of: Callable[[Mapping[str, Any]], Any]
    """(parameters, or [draws] of each) -> the number, or [draws] of it."""
    positive: bool = True
    """Whether it is compared by its logarithm."""

    def value(self, fit: FitResult) -> float:
        """The number of a run's fit."""
        return float(self.of(fit.parameters))

    def known(self, fits: Sequence[FitResult]) -> bool:
        """Whether there are fits, and each has a finite value."""
        values = [self.value(f) for f in fits]
        return bool(values) and all(math.isfinite(v) and (v > 0 or not self.positive) for v in values)

    def runs(self, fits: Sequence[FitResult], seeds: tuple[int | None, ...]) -> Runs:
        """The number of each run, or its logarithm, with the variance of its fit."""
        values = np.array([self.value(f) for f in fits])
        if self.positive:
            values = np.array([math.log(value) for value in values])
        return Runs(values=values, fit_variance=np.array([self._variance(f) for f in fits]), seeds=seeds)

    def mean(self, arms: Arms, seeds: Seeds, index: int) -> Estimate:
        """The mean over the runs of one arm with the 90 % interval of it, the geometric one of a positive number.

        With one run it is the run's number with the interval of its fit; inf where a run never gets there.
        """
        fits = arms[index]
        values = [self.value(f) for f in fits]
        if not self.known(fits):
            return Estimate(value=max(values), lo=min(values), hi=max(values))
        if len(fits) == 1:
            return estimate(self.of(fits[0].posterior.parameters), value=values[0])
        kept = [n for n, runs in enumerate(arms) if self.known(runs)]
        mean = Table([self.runs(arms[n], seeds[n]) for n in kept], paired=False).mean(kept.index(index))
        back = math.exp if self.positive else float
        return Estimate(value=back(mean.value), lo=back(mean.lo), hi=back(min(mean.hi, 700.0)))

    def _variance(self, fit: FitResult) -> float:
        """By quantiles: draws of a compute to reach have a heavy tail."""
        draws = self.of(fit.posterior.parameters)
        with np.errstate(divide="ignore"):
            low, high = np.quantile(np.log(draws) if self.positive else draws, [0.1587, 0.8413], method="nearest")
        return ((float(high) - float(low)) / 2) ** 2 if math.isfinite(low) and math.isfinite(high) else 1e6


ASYMPTOTE = Quantity(of=lambda parameters: parameters["asymptote"], positive=False)
EXPONENT = Quantity(of=lambda parameters: parameters["exponent"])
MIDPOINT = Quantity(of=lambda parameters: parameters["midpoint"])


def compute_to(pass_rate: float) -> Quantity:
    """Compute at which a run's curve reaches the pass rate; inf where it never does."""
    return Quantity(of=lambda parameters: compute_to_reach(pass_rate, **parameters))


@record
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
    """Mean of the runs' last fitted pass rates, with the lowest and the highest."""
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


@record
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

    def arm(self, name: str | None) -> ComparedArm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)


def compare_runs(
    curves: Sequence[Curve],
    fit_curve: Callable[[Curve, float | None], FitResult],
    *,
    references: Sequence[str] = (),
    pass_rate: float | None = None,
) -> Comparison:
    """Group runs by recipe and compare the recipes. Names of the runs are unique, their unit of compute is one.

    fit_curve:  (run, A to hold or None) -> its fit.
    references: the arm that the others are compared with (default: the first run's), and ARM=REFERENCE for others.
    pass_rate:  whose compute is compared; default: R_0 plus 80 % of the gain to the common A.
    Raises ValueError for one run alone and for the name of no arm.
    """
    arms, to = _ordered(curves, references)
    paired = shared_start(arms)
    seeds = [tuple(curve.seed for curve in arm.curves) for arm in arms]
    fits = [tuple(fit_curve(curve, None) for curve in arm.curves) for arm in arms]
    ceilings = _differences(ASYMPTOTE, fits, seeds, to, paired)
    shared = _share_the_ceiling(fits, ceilings, to)
    mean = float(np.mean([ASYMPTOTE.mean(fits, seeds, n).value for n, alike in enumerate(shared) if alike]))
    fixed = max(mean, max(f.initial for runs in fits for f in runs) + 1e-3)
    refits = [
        tuple(fit_curve(curve, fixed) for curve in arm.curves) if alike else () for arm, alike in zip(arms, shared)
    ]
    start = float(np.mean([f.initial for f in fits[0]]))
    pass_rate = start + SHARE_OF_GAIN * (fixed - start) if pass_rate is None else pass_rate
    reach = compute_to(pass_rate)
    efficiency = _differences(reach, refits, seeds, to, paired)
    compared = []
    for n, arm in enumerate(arms):
        last = [float(f.pass_rate[-1]) for f in fits[n]]
        asymptote = ASYMPTOTE.mean(fits, seeds, n)
        compared.append(
            ComparedArm(
                name=arm.name,
                reference=arms[to[n]].name if n else None,
                change=differences(arm, arms[to[n]]) if n else "",
                fits=fits[n],
                seeds=seeds[n],
                refits=refits[n],
                measured=Estimate(value=float(np.mean(last)), lo=min(last), hi=max(last)),
                asymptote=replace(asymptote, lo=max(asymptote.lo, 0.0), hi=min(asymptote.hi, 1.0)),
                exponent=EXPONENT.mean(fits, seeds, n),
                midpoint=MIDPOINT.mean(fits, seeds, n),
                fixed_exponent=EXPONENT.mean(refits, seeds, n) if refits[n] else None,
                to_reach=reach.mean(refits if refits[n] else fits, seeds, n),
                ceiling=ceilings.get(n),
                efficiency=efficiency.get(n),
            )
        )
    return Comparison(
        arms=tuple(compared),
        fixed_asymptote=fixed,
        pass_rate=pass_rate,
        between_runs=spread([ASYMPTOTE.runs(*arm) for arm in zip(fits, seeds)]),
        paired=any(difference.paired for difference in ceilings.values()),
    )


def _ordered(curves: Sequence[Curve], references: Sequence[str]) -> tuple[list[Arm], list[int]]:
    """(the arms, the reference of all first; the index of each one's own reference)."""
    if len(curves) < 2:
        raise ValueError(f"expected at least two runs to compare, found {len(curves)}")
    arms = {arm.name: arm for arm in arms_of(curves)}
    references_of, first = dict[str, str](), next(iter(arms))
    for text in references:
        name, equals, other = text.rpartition("=")
        reference = _named(arms, other)
        if equals:
            references_of[_named(arms, name)] = reference
        else:
            first = reference
    names = [first, *(name for name in arms if name != first)]
    return [arms[name] for name in names], [names.index(references_of.get(name, first)) for name in names]


def _named(arms: Mapping[str, Arm], name: str) -> str:
    """The arm called `name`, or the one of the run called so."""
    for arm in arms.values():
        if name == arm.name or any(name == curve.name for curve in arm.curves):
            return arm.name
    raise ValueError(f"--reference: expected one of {', '.join(arms)}, found {name!r}")


def _differences(
    quantity: Quantity, arms: Arms, seeds: Seeds, to: Sequence[int], paired: bool
) -> dict[int, Difference]:
    """Index of an arm -> difference to its reference, p adjusted for their number.

    Left out are the first arm, an arm without fits or values, and one whose reference is.
    """
    kept = [n for n, runs in enumerate(arms) if quantity.known(runs)]
    if len(kept) < 2:
        return {}
    pairs = {n: (kept.index(n), kept.index(to[n])) for n in kept if n and to[n] in kept}
    references = {reference for _, reference in pairs.values()}
    table = Table([quantity.runs(arms[n], seeds[n]) for n in kept], paired=paired, references=references)
    out = {n: table.difference(*pair) for n, pair in pairs.items()}
    return out | adjusted({n: difference for n, difference in out.items() if difference.p < 1.0})


def _share_the_ceiling(fits: Arms, ceilings: Mapping[int, Difference], to: Sequence[int]) -> list[bool]:
    def alone(n: int) -> bool:
        if n == 0:
            return True
        if min(len(fits[n]), len(fits[to[n]])) < 2:
            # 1e-9: the grid of the paper's method puts differences of exactly 0.02 on either side of it
            return abs(ceilings[n].value) <= SAME_ASYMPTOTE + 1e-9
        return not ceilings[n].moves_the_ceiling

    return [alone(n) and alone(to[n]) for n in range(len(fits))]


def summary(comparison: Comparison, arm: ComparedArm) -> str:
    """How an arm differs from its reference, in one or two sentences."""
    runs = f"{arm.runs} run{'s' if arm.runs > 1 else ''}"
    if arm.ceiling is None:
        return f"{arm.name} is the reference: A = {arm.asymptote.value:.3f}, B = {arm.exponent.value:.2f} ({runs})."
    ceiling, other = arm.ceiling, comparison.arm(arm.reference)
    if not _decides(comparison, arm):
        once = "both were" if arm.runs == other.runs == 1 else f"{arm.name if arm.runs == 1 else other.name} was"
        where = "within" if abs(ceiling.value) <= SAME_ASYMPTOTE else "outside"
        text = f"{arm.name} against {other.name}: {once} run once, which decides nothing. A {ceiling.value:+.3f},"
        margin = f"{where} the paper's margin of ±{SAME_ASYMPTOTE:g} between runs of one recipe"
        return f"{text} {margin}{_exponents(arm, other, '; ')}."
    gap = f"A {ceiling.value:+.3f} [{ceiling.lo:+.3f}, {ceiling.hi:+.3f}]"
    if ceiling.moves_the_ceiling:
        way = "raises" if ceiling.value > 0 else "lowers"
        return f"{arm.name} {way} the ceiling: {gap} (p = {_p(ceiling)}, {runs})."
    if ceiling.within(SAME_ASYMPTOTE):
        first = f"{arm.name} keeps the ceiling: {gap}, within ±{SAME_ASYMPTOTE:g}"
    else:
        first = f"Whether {arm.name} moves the ceiling cannot be told from {runs}: {gap}"
    return f"{first}. {_efficiency(arm, other, f'{comparison.pass_rate:.3f}')}"


def conclusions(comparison: Comparison) -> list[str]:
    """What the whole comparison says, in a few sentences."""
    others = [arm for arm in comparison.arms if arm.ceiling is not None]
    decided = [arm for arm in others if _decides(comparison, arm)]
    lines = [_variance(comparison)]
    once = [arm.name for arm in others if arm not in decided]
    if once:
        lines.append(f"Run once, so not decided: {', '.join(once)}. At least two seeds, better 3, are needed.")
    if not decided:
        return lines
    moved = {
        arm.name: f"A {arm.ceiling.value:+.3f}" for arm in decided if arm.ceiling and arm.ceiling.moves_the_ceiling
    }
    efficiency = {arm.name: arm.efficiency for arm in decided if arm.name not in moved and arm.efficiency}
    faster = {name: _ratio(difference) for name, difference in efficiency.items() if difference.declared}
    kept = [arm.name for arm in decided if arm.ceiling and arm.ceiling.within(SAME_ASYMPTOTE)]
    equal = [n for n in kept if n in efficiency and n not in faster and efficiency[n].within(SAME_COMPUTE)]
    unclear = [arm.name for arm in decided if arm.name not in (*moved, *faster, *equal)]
    lines += [f"Moves the ceiling: {_listed(moved)}.", f"Changes the efficiency: {_listed(faster)}."]
    if equal:
        lines.append(f"Neither, within the margins: {', '.join(equal)}.")
    if unclear:
        lines.append(f"Cannot be told apart from the reference with these seeds: {', '.join(unclear)}.")
    return lines


def _decides(comparison: Comparison, arm: ComparedArm) -> bool:
    """Whether the arm and its reference were run with at least two seeds."""
    return min(arm.runs, comparison.arm(arm.reference).runs) >= 2


def _variance(comparison: Comparison) -> str:
    if math.isnan(comparison.between_runs):
        return (
            "Every recipe was run once, so that nothing is decided: how far runs of one recipe differ is unknown "
            f"(±{SAME_ASYMPTOTE:g} in A in the paper)."
        )
    pairing = "; recipes are compared within seeds" if comparison.paired else ""
    text = f"A differs between runs of one recipe by {comparison.between_runs:.3f} (standard deviation){pairing}."
    if len(comparison.arms) == 1:
        return text
    return (
        f"{text} That any declared difference in A is wrong has a probability of about {ERROR:.0%} where recipes "
        f"scatter alike, up to {UNEVEN_ERROR:.0%} where they do not, more if one looks after every run; so for "
        "efficiency."
    )


def _efficiency(arm: ComparedArm, other: ComparedArm, target: str) -> str:
    difference = arm.efficiency
    if difference is None:
        return f"Its compute to {target} is not compared at equal A."
    factor = f"{_ratio(difference)} to {target}{_exponents(arm, other, ', ')}"
    if difference.declared:
        word = "more" if difference.value < 0 else "less"
        return f"It is {word} efficient: {factor} (p = {_p(difference)})."
    if difference.within(SAME_COMPUTE):
        return f"It is as efficient, within a factor of {math.exp(SAME_COMPUTE):g}: {factor}."
    return f"Its efficiency cannot be told apart: {factor}."


def _exponents(arm: ComparedArm, other: ComparedArm, mark: str) -> str:
    if arm.fixed_exponent is None or other.fixed_exponent is None:
        return ""
    return f"{mark}B {arm.fixed_exponent.value:.2f} against {other.fixed_exponent.value:.2f} at equal A"


def _ratio(difference: Difference) -> str:
    lo, hi = (math.exp(min(end, 700.0)) for end in (difference.lo, difference.hi))
    return f"{math.exp(difference.value):.2f} [{lo:.2f}, {hi:.2f}] times the compute"


def _listed(arms: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({text})" for name, text in arms.items()) or "none is found to"


def _p(difference: Difference) -> str:
    return f"{difference.p:.3f}" if difference.p >= 0.001 else "0.001 or less"
