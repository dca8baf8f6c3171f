"""Which recipe scales better: the ceiling first, then the efficiency (Khatri et al. 2025, A.5 and Fig. 4).

The unit of a comparison is a recipe with its runs, an arm (`fit.arms`). Runs that fall are left out, since no sigmoid
falls (`checks.falling_tail`). One number per run, such as its A, is explained by its recipe plus its seed:

    y = recipe + seed + e

Seeds are in the model where recipes share at least two of them and the same start (paired); otherwise each run stands
alone. The variance of e is what runs of one recipe differ by, errors of the fit included. All recipes have it in
common, since two or three runs say little about a variance; a reference's, which is in many differences, is its own
where that is larger. None is below that of a single run's fit. Intervals are Student's t; p values are adjusted for
the number of recipes (Holm 1979).

Arms whose ceiling is not found to differ from their reference's are refitted with A fixed to the mean of their A;
their efficiency is the compute to reach one pass rate there, of which B is a part. An arm with one run decides
nothing; it is refitted where its A lies within 0.02 of the reference's, the paper's margin between runs.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
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
UNKNOWN_VARIANCE = 1e6
"""Variance of a number that some draws of the posterior never reach."""
LARGEST_LOG = 100.0
"""Largest logarithm of an end of an interval; UNKNOWN_VARIANCE is beyond."""
SENTENCES = {
    "once": "One run alone, so not decided: {}. At least two seeds, better 3, are needed.",
    "ceiling": "Moves the ceiling: {}.",
    "efficiency": "Changes the efficiency: {}.",
    "equal": "Neither, within the margins: {}.",
    "unclear": "Cannot be told apart from the reference with these seeds: {}.",
}
"""What is found of recipes -> the sentence that lists them."""
Arms = Sequence[Sequence[FitResult]]
"""The fits of each arm; an empty one has no part in a quantity."""
Seeds = tuple[int | None, ...]
"""The seeds of a recipe's runs; None where unknown."""


@record
class Runs:
    """A number of each run of a recipe."""

    values: Array
    """[runs]; empty where the recipe has no part in a table."""
    fit_variance: Array
    """[runs] variance of each value by its own fit."""
    seeds: Seeds
    """[runs] None where unknown."""


@record
class Difference(Estimate):
    """A recipe minus its reference: the difference of the means, within seeds if paired.

    The 90 % interval is from the variance between runs; nan where no recipe was run twice.
    """

    p: float
    """Probability of so large a difference, or a larger one, between two sets of runs of one recipe, adjusted for the
    number of comparisons; 1 where it is not known or either has one run."""
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
    """The numbers of several recipes, fitted together by least squares."""

    def __init__(self, recipes: Sequence[Runs], *, paired: bool, references: Collection[int] = ()):
        """recipes: with finite values. paired: whether equal seeds may be compared within the seed.

        references: recipes that others are compared with; their variance is in many differences.
        """
        values = np.concatenate([recipe.values for recipe in recipes])
        self._counts = [len(recipe.values) for recipe in recipes]
        recipe_of_run = np.repeat(np.arange(len(recipes)), self._counts)
        self._membership = (recipe_of_run[:, None] == np.arange(len(recipes))).astype(float)
        """[runs, recipes] 1 where the run is of the recipe."""
        seeds = [recipe.seeds for recipe in recipes]
        self._groups = sharing_seeds(seeds) if paired else list(range(len(recipes)))
        columns = np.hstack([self._membership, _seed_columns(seeds, self._groups)])
        self.paired = columns.shape[1] > len(recipes)
        if self.paired:
            self._unpaired = Table(recipes, paired=False, references=references)
            """For recipes that do not share seeds."""
        # seed columns and recipes are dependent: the pseudoinverse leaves differences within a group as they are
        self._inverse = np.linalg.pinv(columns)
        residual_maker = np.eye(len(values)) - columns @ self._inverse
        self._effects = self._inverse @ values
        self._total_freedom = max(float(np.trace(residual_maker)), 1e-9)
        squares = self._membership.T @ (residual_maker @ values) ** 2
        variance, self._freedom = _variances(squares, self._membership.T @ np.diag(residual_maker), references)
        by_fits = [float(recipe.fit_variance.sum()) / max(len(recipe.values), 1) for recipe in recipes]
        self._variance = np.maximum(variance, by_fits)
        """[recipes] of one run; nan where no recipe was run twice."""

    def mean(self, index: int) -> Estimate:
        """The recipe's mean, with the 90 % interval of the mean over seeds; the interval is nan if unknown."""
        return Estimate(**_interval(float(self._effects[index]), *self._error(self._inverse[index])))

    def difference(self, index: int, reference: int) -> Difference:
        """Recipe `index` minus `reference`, tested alone; within seeds if they share them."""
        if self.paired and self._groups[index] != self._groups[reference]:
            return self._unpaired.difference(index, reference)
        value = float(self._effects[index] - self._effects[reference])
        error, freedom = self._error(self._inverse[index] - self._inverse[reference])
        p = 1.0
        if min(self._counts[index], self._counts[reference]) >= 2 and not math.isnan(error):
            from scipy.special import stdtr

            p = 2.0 * float(stdtr(freedom, -abs(value) / max(error, 1e-300)))
        return Difference(**_interval(value, error, freedom), p=p, paired=self.paired)

    def _error(self, weights: Array) -> tuple[float, float]:
        """(standard error of weights . values, its degrees of freedom after Satterthwaite); nan if unknown."""
        squared_weights = self._membership.T @ weights**2
        used = squared_weights > 0
        shares = squared_weights[used] * self._variance[used]
        if np.isnan(shares).any() or not shares.any():
            return math.nan, math.nan
        total = float(shares.sum())
        freedom = total**2 / float((shares**2 / self._freedom[used]).sum())
        return math.sqrt(total), min(freedom, self._total_freedom)


def _interval(value: float, error: float, freedom: float) -> dict[str, float]:
    from scipy.special import stdtrit

    half = error * float(stdtrit(freedom, 1.0 - TAIL))
    return {"value": value, "lo": value - half, "hi": value + half}


def _variances(squares: Array, freedom: Array, references: Collection[int]) -> tuple[Array, Array]:
    """(variance of one run, its degrees of freedom), both [recipes]; nan and 0 where nothing is known.

    squares: [recipes] sums of squared residuals. freedom: [recipes] their degrees of freedom; 0 for one run. Of two
    recipes each has its own variance, of more all have one, but for a reference whose own is larger.
    """
    repeated = freedom > 1e-6
    total = float(freedom[repeated].sum())
    if not total:
        return np.full(len(squares), math.nan), np.zeros(len(squares))
    common = float(squares[repeated].sum()) / total
    by_recipe = squares / np.where(repeated, freedom, math.inf)
    separate = repeated
    if repeated.sum() >= 3:
        separate = np.isin(np.arange(len(squares)), list(references)) & (by_recipe > common)
    return np.where(separate, by_recipe, common), np.where(separate, freedom, total)


def spread(recipes: Sequence[Runs]) -> float:
    """Standard deviation between runs of one recipe, common to all recipes; nan where none was run twice."""
    freedom = sum(len(recipe.values) - 1 for recipe in recipes)
    # `np.var` divides by n, so n times it is the sum of squares
    squares = sum(len(recipe.values) * float(np.var(recipe.values)) for recipe in recipes)
    return math.sqrt(squares / freedom) if freedom else math.nan


def sharing_seeds(seeds: Sequence[Seeds]) -> list[int]:
    """[recipes] a number that recipes have in common which share at least two seeds, directly or through others.

    seeds: [recipes, runs]. A recipe with an unknown seed, or with one twice, shares none.
    """
    distinct = [set(runs) for runs in seeds]
    groups = np.arange(len(seeds))
    for n, runs in enumerate(distinct):
        if None in runs or len(runs) < len(seeds[n]):
            runs.clear()
        for m in range(n):
            if len(runs & distinct[m]) >= 2:
                groups[groups == groups[n]] = groups[m]
    return groups.tolist()


def _seed_columns(seeds: Sequence[Seeds], groups: Sequence[int]) -> Array:
    """[runs, shared seeds] 1 where the run has the seed, which recipes of its group share."""
    seed_of_run = [(group, seed) for group, runs in zip(groups, seeds) for seed in runs]
    shared = {key for key in seed_of_run if list(groups).count(key[0]) > 1}
    columns = [[float(key == column) for column in shared] for key in seed_of_run]
    return np.reshape(columns, (len(seed_of_run), len(shared)))


def adjusted(differences: Mapping[int, Difference]) -> dict[int, Difference]:
    """The differences with p adjusted for their number (Holm 1979): `ERROR` bounds the error of all together."""
    out = {}
    highest = 0.0
    for rank, (key, difference) in enumerate(sorted(differences.items(), key=lambda item: item[1].p)):
        # Holm: the maximum keeps a larger p from being adjusted below a smaller one
        highest = max(highest, min(1.0, (len(differences) - rank) * difference.p))
        out[key] = replace(difference, p=highest)
    return out


@record
class Quantity:
    """A number of a sigmoid, as it is compared."""

    formula: Callable[[Mapping[str, Any]], Any]
    """(parameters, or [draws] of each) -> the number, or [draws] of it."""
    scaled: Callable[[Any], Any] = np.log
    """number, or [n] of it -> the scale on which it is compared: a positive number's is its logarithm."""
    back: Callable[[float], float] = math.exp
    """The inverse of `scaled`."""

    def runs(self, fits: Sequence[FitResult], seeds: Seeds) -> Runs:
        """The number of each run, or its logarithm; no runs where one of them has none, as it never gets there."""
        values = self._scaled([self.formula(fit.parameters) for fit in fits])
        if not np.isfinite(values).all():
            return self.runs((), ())
        return Runs(values=values, fit_variance=np.array([self._variance(f) for f in fits]), seeds=seeds[: len(fits)])

    def means(self, arms: Arms, seeds: Sequence[Seeds]) -> dict[int, Estimate]:
        """Index of an arm with runs -> their mean with the mean's 90 % interval; geometric for a positive number.

        The mean of one run is the run's number with the interval of its fit; inf where a run never gets there.
        """
        recipes = [self.runs(*arm) for arm in zip(arms, seeds)]
        table = Table(recipes, paired=False)
        means = {}
        for n, fits in enumerate(arms):
            values = [float(self.formula(fit.parameters)) for fit in fits]
            if fits and not recipes[n].seeds:
                means[n] = Estimate(value=max(values), lo=min(values), hi=max(values))
            elif len(fits) == 1:
                means[n] = estimate(self.formula(fits[0].posterior.parameters), value=values[0])
            elif fits:
                mean = table.mean(n)
                ends = {"lo": self.back(_known(mean.lo)), "hi": self.back(_known(mean.hi))}
                means[n] = Estimate(value=self.back(mean.value), **ends)
        return means

    def _scaled(self, values: Any) -> Array:
        with np.errstate(divide="ignore"):
            return np.asarray(self.scaled(values), dtype=float)

    def _variance(self, fit: FitResult) -> float:
        """Variance by quantiles, as draws of a compute to reach have a heavy tail."""
        draws = self._scaled(self.formula(fit.posterior.parameters))
        low, high = np.quantile(draws, [0.1587, 0.8413], method="nearest").tolist()
        variance = ((high - low) / 2) ** 2
        return variance if math.isfinite(variance) else UNKNOWN_VARIANCE


ASYMPTOTE = Quantity(formula=lambda parameters: parameters["asymptote"], scaled=np.asarray, back=float)
EXPONENT = Quantity(formula=lambda parameters: parameters["exponent"])
MIDPOINT = Quantity(formula=lambda parameters: parameters["midpoint"])


def compute_to(pass_rate: float) -> Quantity:
    """Compute at which a run's curve reaches the pass rate; inf where it never does."""
    return Quantity(formula=lambda parameters: compute_to_reach(pass_rate, **parameters))


def _known(end: float) -> float:
    """An end of an interval of a logarithm; infinite where the variance is unknown."""
    return math.copysign(math.inf, end) if abs(end) > LARGEST_LOG else end


@record
class ComparedArm:
    """A recipe of a comparison with its runs."""

    name: str
    """The arm's name."""
    reference: str | None
    """Name of the arm that it is compared with; None for the reference of all."""
    change: str
    """What the recipe sets that its reference sets otherwise; empty if unknown."""
    fits: tuple[FitResult, ...]
    """Its runs that do not fall, each fitted with A free."""
    seeds: Seeds
    """Their seeds; None where unknown."""
    refits: tuple[FitResult, ...]
    """The same runs with A fixed to the comparison's; none for another ceiling."""
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
        """Number of its runs that do not fall."""
        return len(self.fits)

    @property
    def measured(self) -> Estimate:
        """Mean of the runs' last fitted pass rates, with the lowest and the highest."""
        last = [float(fit.pass_rate[-1]) for fit in self.fits]
        return Estimate(value=float(np.mean(last)), lo=min(last), hi=max(last))


@record
class Comparison:
    """The table of the paper's Fig. 4 for any recipes."""

    arms: tuple[ComparedArm, ...]
    """The reference first. An arm whose runs all fall is left out."""
    falling: Mapping[str, tuple[str, ...]]
    """Name of an arm -> its runs that fall, which are left out."""
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
    fit_run: Callable[[Curve, float | None], FitResult],
    *,
    references: Sequence[str] = (),
    pass_rate: float | None = None,
) -> Comparison:
    """Group runs by recipe and compare the recipes. Names of the runs are unique, their unit of compute is one.

    fit_run:    (run, A to hold or None) -> its fit.
    references: the arm that the others are compared with (default: the first run's), and ARM=REFERENCE for others.
    pass_rate:  whose compute is compared; default: R_0 plus 80 % of the gain to the common A.
    Raises ValueError for one run alone, and for a reference that is no arm.
    """
    if len(curves) < 2:
        raise ValueError(f"a comparison takes at least two runs; {len(curves)} was given")
    free = {curve.name: fit_run(curve, None) for curve in curves}
    groups = arms_of(curves)
    steady, falling = _without_falling(groups, free)
    arms, to = _ordered(steady, groups, references)
    if not arms:
        unknown = {"fixed_asymptote": math.nan, "pass_rate": math.nan, "between_runs": math.nan}
        return Comparison(arms=(), falling=falling, paired=False, **unknown)
    paired = shared_start(arms)
    seeds = [tuple(curve.seed for curve in arm.curves) for arm in arms]
    fits = [tuple(free[curve.name] for curve in arm.curves) for arm in arms]
    asymptotes = ASYMPTOTE.means(fits, seeds)
    ceilings = _differences(ASYMPTOTE, fits, seeds, to, paired)
    shared = _share_the_ceiling(fits, ceilings, to)
    common = float(np.mean([asymptotes[n].value for n, alike in enumerate(shared) if alike]))
    # A cannot be held below the start of a run
    starts = [fit.initial for runs, alike in zip(fits, shared) if alike for fit in runs]
    fixed = min(max(common, max(starts) + 1e-3), 1.0)
    refits = [tuple(fit_run(curve, fixed) for curve in arm.curves if alike) for arm, alike in zip(arms, shared)]
    if pass_rate is None:
        start = float(np.mean([fit.initial for fit in fits[0]]))
        pass_rate = start + SHARE_OF_GAIN * (fixed - start)
    reach = compute_to(pass_rate)
    numbers: dict[str, Mapping[int, Any]] = {
        "reference": {n: arms[to[n]].name for n in range(1, len(arms))},
        "change": {n: differences(arm, arms[to[n]]) for n, arm in enumerate(arms)},
        "asymptote": {n: replace(a, lo=max(a.lo, 0.0), hi=min(a.hi, 1.0)) for n, a in asymptotes.items()},
        "exponent": EXPONENT.means(fits, seeds),
        "midpoint": MIDPOINT.means(fits, seeds),
        "fixed_exponent": EXPONENT.means(refits, seeds),
        "to_reach": reach.means(fits, seeds) | reach.means(refits, seeds),
        "ceiling": ceilings,
        "efficiency": _differences(reach, refits, seeds, to, paired),
    }
    compared = []
    for n, arm in enumerate(arms):
        known: dict[str, Any] = {key: of_arms.get(n) for key, of_arms in numbers.items()}
        compared.append(ComparedArm(name=arm.name, fits=fits[n], seeds=seeds[n], refits=refits[n], **known))
    return Comparison(
        arms=tuple(compared),
        falling=falling,
        fixed_asymptote=fixed,
        pass_rate=pass_rate,
        between_runs=spread([ASYMPTOTE.runs(*arm) for arm in zip(fits, seeds)]),
        paired=any(difference.paired for difference in ceilings.values()),
    )


def _without_falling(
    groups: Sequence[Arm], fits: Mapping[str, FitResult]
) -> tuple[list[Arm], dict[str, tuple[str, ...]]]:
    """(the arms with their runs that do not fall; name of an arm -> its runs that fall). fits: of each run's name."""
    falling = {}
    steady = []
    for group in groups:
        kept = tuple(curve for curve in group.curves if fits[curve.name].fall is None)
        if kept:
            steady.append(replace(group, curves=kept))
        fell = tuple(curve.name for curve in group.curves if curve not in kept)
        if fell:
            falling[group.name] = fell
    return steady, falling


def _ordered(arms: Sequence[Arm], named: Sequence[Arm], references: Sequence[str]) -> tuple[list[Arm], list[int]]:
    """(the arms, the reference of all first; the index of each arm's reference).

    named: all arms that `references` may name. In place of one whose runs all fall stands the reference of all.
    """
    wanted = {}
    for text in references:
        name, equals, reference = text.rpartition("=")
        if equals:
            name = _name_of(named, name)
        wanted[name] = _name_of(named, reference)
    first = wanted.get("")
    ordered = sorted(arms, key=lambda arm: arm.name != first)
    places = {arm.name: n for n, arm in enumerate(ordered)}
    return ordered, [places.get(wanted.get(name, ""), 0) for name in places]


def _name_of(arms: Sequence[Arm], name: str) -> str:
    """The name of the arm that is called so or has a run that is."""
    for arm in arms:
        if name in (arm.name, *(curve.name for curve in arm.curves)):
            return arm.name
    raise ValueError(f"--reference: {name!r} is no recipe here; choose one of {', '.join(arm.name for arm in arms)}")


def _differences(
    quantity: Quantity, arms: Arms, seeds: Sequence[Seeds], to: Sequence[int], paired: bool
) -> dict[int, Difference]:
    """Index of an arm -> difference to its reference, p adjusted for their number.

    Left out are the first arm, an arm without fits or values, and one whose reference is.
    """
    recipes = [quantity.runs(*arm) for arm in zip(arms, seeds)]
    pairs = {n: to[n] for n in range(1, len(arms)) if recipes[n].seeds and recipes[to[n]].seeds}
    table = Table(recipes, paired=paired, references=set(pairs.values()))
    out = {n: table.difference(n, reference) for n, reference in pairs.items()}
    return out | adjusted({n: difference for n, difference in out.items() if difference.p < 1.0})


def _share_the_ceiling(fits: Arms, ceilings: Mapping[int, Difference], to: Sequence[int]) -> list[bool]:
    """[arms] whether no other ceiling than its reference's is found, for the arm and for its reference."""
    alike = [True]
    for n in range(1, len(fits)):
        if min(len(fits[n]), len(fits[to[n]])) < 2:
            # 1e-9: the grid of the paper's method puts differences of exactly 0.02 on either side of it
            alike.append(abs(ceilings[n].value) <= SAME_ASYMPTOTE + 1e-9)
        else:
            alike.append(not ceilings[n].moves_the_ceiling)
    return [alike[n] and alike[reference] for n, reference in enumerate(to)]


def summary(comparison: Comparison, arm: ComparedArm) -> str:
    """How an arm differs from its reference, in one or two sentences."""
    runs = "1 run" if arm.runs == 1 else f"{arm.runs} runs"
    if arm.ceiling is None:
        return f"{arm.name} is the reference: A = {arm.asymptote.value:.3f}, B = {arm.exponent.value:.2f} ({runs})."
    ceiling = arm.ceiling
    other = comparison.arm(arm.reference)
    if min(arm.runs, other.runs) < 2:
        where = "within" if abs(ceiling.value) <= SAME_ASYMPTOTE else "outside"
        text = f"{arm.name} against {other.name}: one run decides nothing. A {ceiling.value:+.3f},"
        return f"{text} {where} the paper's margin of ±{SAME_ASYMPTOTE:g} between runs of one recipe."
    gap = f"A {ceiling.value:+.3f} [{ceiling.lo:+.3f}, {ceiling.hi:+.3f}]"
    if ceiling.moves_the_ceiling:
        way = "raises" if ceiling.value > 0 else "lowers"
        return f"{arm.name} {way} the ceiling: {gap} (p = {ceiling.p:.2g}, {runs})."
    if ceiling.within(SAME_ASYMPTOTE):
        first = f"{arm.name} keeps the ceiling: {gap}, within ±{SAME_ASYMPTOTE:g}"
    else:
        first = f"Whether {arm.name} moves the ceiling cannot be told from {runs}: {gap}"
    return f"{first}. {_efficiency(arm.efficiency, f'{comparison.pass_rate:.3f}')}"


def left_out(comparison: Comparison) -> list[str]:
    """Which runs fall, and what becomes of their recipe; one sentence a recipe."""
    kept = {arm.name: arm.runs for arm in comparison.arms}
    lines = []
    for name, runs in comparison.falling.items():
        text = f"{name} is not compared and no reference, as every run of it falls"
        if name in kept:
            text = f"{name}: {len(runs)} of {len(runs) + kept[name]} runs fall and are left out"
        lines.append(f"{text}: {', '.join(runs)}.")
    return lines


def conclusions(comparison: Comparison) -> list[str]:
    """The comparison's results in a few sentences."""
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
    """(a key of `SENTENCES`; the arm's name with the difference found)."""
    ceiling = arm.ceiling
    efficiency = arm.efficiency
    if ceiling is None or min(arm.runs, comparison.arm(arm.reference).runs) < 2:
        return "once", arm.name
    if ceiling.moves_the_ceiling:
        return "ceiling", f"{arm.name} (A {ceiling.value:+.3f})"
    if efficiency and efficiency.declared:
        return "efficiency", f"{arm.name} ({_ratio(efficiency)})"
    if efficiency and ceiling.within(SAME_ASYMPTOTE) and efficiency.within(SAME_COMPUTE):
        return "equal", arm.name
    return "unclear", arm.name


def _variance(comparison: Comparison) -> str:
    if math.isnan(comparison.between_runs):
        return (
            "Every recipe has one run, so that nothing is decided: how far runs of one recipe differ is unknown "
            f"(±{SAME_ASYMPTOTE:g} in A in the paper)."
        )
    text = f"A differs between runs of one recipe by {comparison.between_runs:.3f} (standard deviation)"
    if comparison.paired:
        text += "; recipes are compared within seeds"
    if len(comparison.arms) == 1:
        return f"{text}."
    return (
        f"{text}. That any declared difference in A is wrong has a probability of about {ERROR:.0%} where recipes "
        f"scatter alike, up to {UNEVEN_ERROR:.0%} where they do not, more if one looks after every run; so for "
        "efficiency."
    )


def _efficiency(difference: Difference | None, target: str) -> str:
    if difference is None:
        return f"Its compute to {target} is not compared at equal A."
    factor = f"{_ratio(difference)} to {target}"
    if difference.declared:
        word = "more" if difference.value < 0 else "less"
        return f"It is {word} efficient: {factor} (p = {difference.p:.2g})."
    if difference.within(SAME_COMPUTE):
        return f"It is as efficient, within a factor of {math.exp(SAME_COMPUTE):g}: {factor}."
    return f"Its efficiency cannot be told apart: {factor}."


def _ratio(difference: Difference) -> str:
    lo, hi = (math.exp(_known(end)) for end in (difference.lo, difference.hi))
    return f"{math.exp(difference.value):.2f} [{lo:.2f}, {hi:.2f}] times the compute"
