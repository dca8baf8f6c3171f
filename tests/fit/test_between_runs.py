"""Differences between recipes with several seeds: hand-computed cases; error, coverage, power on synthetic runs."""

import math

import numpy as np
import pytest

from megatron_scalerl.fit.compare import UNEVEN_ERROR, Difference, Runs, Table, adjusted, spread


def runs(values, *, fit_sd=1e-6, seeds=None):
    values = np.asarray(values, dtype=float)
    return Runs(
        values=values,
        fit_variance=np.full(len(values), fit_sd**2),
        seeds=tuple(range(len(values))) if seeds is None else tuple(seeds),
    )


def test_two_recipes_within_seeds_are_the_paired_t_test():
    """Differences 0.1, 0.3, 0.2: mean 0.2, deviation 0.1, t = 0.2 / (0.1 / sqrt 3) = 3.464 with 2 degrees."""
    table = Table([runs([0.5, 0.9, 0.1]), runs([0.6, 1.2, 0.3])], paired=True)
    found = table.difference(1, 0)
    assert (found.value, found.paired) == (pytest.approx(0.2), True)
    half = 2.919986 * 0.1 / math.sqrt(3)  # the 95 % quantile of t with 2 degrees of freedom
    assert (found.lo, found.hi) == (pytest.approx(0.2 - half), pytest.approx(0.2 + half))
    assert found.p == pytest.approx(0.07418, abs=1e-5)  # tables: two-sided p of t = 3.464 with 2 degrees


def test_two_recipes_with_other_seeds_are_welchs_t_test():
    """Means 0.5 and 0.8, variances 0.01 and 0.04, three runs each: standard error sqrt(0.05 / 3), 2.941 degrees."""
    table = Table([runs([0.4, 0.5, 0.6]), runs([0.6, 0.8, 1.0], seeds=(7, 8, 9))], paired=True)
    found = table.difference(1, 0)
    assert not found.paired and found.value == pytest.approx(0.3)
    assert found.hi - found.value == pytest.approx(2.372676 * math.sqrt(0.05 / 3), rel=1e-4)  # t, 2.941 degrees


def test_seed_effects_are_removed_where_a_run_is_missing():
    """Seed 2 is 0.4 higher in both; the run of seed 2 that is missing does not shift the difference."""
    table = Table([runs([0.5, 0.6, 1.0]), runs([0.7, 0.8], seeds=(0, 1))], paired=True)
    assert table.difference(1, 0).value == pytest.approx(0.2)


def test_a_recipe_with_seeds_of_its_own_is_not_compared_within_seeds():
    """C - A is 0.91 - 0.61 by hand; seed effects of A and B say nothing about the seeds of C."""
    a, b, c = runs([0.60, 0.62]), runs([0.61, 0.625]), runs([0.90, 0.92], seeds=(3, 4))
    table = Table([a, b, c], paired=True)
    assert table.difference(2, 0).value == pytest.approx(0.30) and not table.difference(2, 0).paired
    assert table.difference(1, 0) == Table([a, b, c], paired=True).difference(1, 0) and table.difference(1, 0).paired
    assert table.difference(2, 0) == Table([a, b, c], paired=False).difference(2, 0)
    through_others = [runs([0.5, 0.7]), runs([0.6, 0.8, 0.9, 1.1]), runs([1.0, 1.2], seeds=(2, 3))]
    assert Table(through_others, paired=True).difference(2, 0).value == pytest.approx(0.2)


def test_one_run_decides_nothing():
    table = Table([runs([0.5]), runs([0.9])], paired=True)
    found = table.difference(1, 0)
    assert found.p == 1.0 and not found.declared and math.isnan(found.lo) and math.isnan(table.mean(0).lo)
    with_others = Table([runs([0.5, 0.501, 0.502]), runs([0.9, 0.901, 0.902]), runs([0.99])], paired=False)
    assert with_others.difference(1, 0).declared
    assert not with_others.difference(2, 0).declared and math.isfinite(with_others.difference(2, 0).lo)


def test_the_variance_is_at_least_that_of_the_fits():
    exact = [runs([0.5, 0.5, 0.5], fit_sd=0.1), runs([0.6, 0.6, 0.6], fit_sd=0.1)]
    found = Table(exact, paired=True).difference(1, 0)
    assert found.hi - found.lo > 2 * 2.1 * math.sqrt(0.02 / 3)  # t of four degrees of freedom, the most there can be


def test_recipes_have_one_variance_but_a_reference_its_own_where_it_is_larger():
    """Variances 0.01, 0.01 and 0.04, two degrees each: together 0.02."""
    recipes = [runs([0.4, 0.5, 0.6]), runs([0.4, 0.5, 0.6]), runs([0.3, 0.5, 0.7])]

    def half(references):
        found = Table(recipes, paired=False, references=references).difference(2, 1)
        return found.hi - found.value

    common = 1.943180 * math.sqrt(2 * 0.02 / 3)  # t of six degrees of freedom
    assert half(()) == pytest.approx(common) and half({0}) == pytest.approx(common)
    freedom = 0.06**2 / (0.02**2 / 6 + 0.04**2 / 2)
    assert freedom == pytest.approx(4.154, abs=1e-3)
    assert half({2}) == pytest.approx(2.10937 * math.sqrt(0.06 / 3), rel=1e-4)  # t of 4.154 degrees of freedom


def test_holms_limits():
    """0.01 x 3, 0.02 x 2, 0.03: never falling, in their places."""

    def of(p):
        return Difference(value=1.0, lo=0.0, hi=2.0, p=p, paired=True)

    found = adjusted({5: of(0.02), 7: of(0.01), 9: of(0.5)})
    assert {n: each.p for n, each in found.items()} == {7: pytest.approx(0.03), 5: pytest.approx(0.04), 9: 0.5}


def test_the_spread_between_runs():
    assert spread([runs([0.63, 0.97, 0.89])]) == pytest.approx(np.std([0.63, 0.97, 0.89], ddof=1))
    assert math.isnan(spread([runs([0.5]), runs([0.9])]))


def drawn(rng, recipes, seeds, *, deviation=0.03, shift=0.0, scatter="alike"):
    """Recipes with one mean but for the second one's shift; runs differ by seed and by `deviation`."""
    effect = rng.normal(0, 0.05, seeds)
    factors = {
        "alike": np.ones(recipes),
        "of their own": np.exp(rng.normal(0, 0.5, recipes)),
        "the reference's larger": np.r_[4.0, np.full(recipes - 1, 0.7)],
    }
    own = deviation * factors[scatter]
    return [
        runs(0.6 + effect + rng.normal(0, own[n], seeds) + (shift if n == 1 else 0.0), fit_sd=0.01)
        for n in range(recipes)
    ]


@pytest.mark.parametrize("scatter", ["alike", "of their own", "the reference's larger"])
@pytest.mark.parametrize(("recipes", "seeds"), [(2, 2), (2, 3), (5, 3), (13, 3)])
def test_errors_and_coverage_of_recipes_that_do_not_differ(recipes, seeds, scatter):
    rng, trials = np.random.default_rng([recipes, seeds, len(scatter)]), 300
    declared = covered = 0.0
    for _ in range(trials):
        table = Table(drawn(rng, recipes, seeds, scatter=scatter), paired=True, references={0})
        found = {n: table.difference(n, 0) for n in range(1, recipes)}
        declared += any(each.declared for each in adjusted(found).values())
        covered += np.mean([each.lo <= 0.0 <= each.hi for each in found.values()])
    assert declared / trials <= UNEVEN_ERROR
    # two runs of two recipes: one degree of freedom, and the fits' variance, which is a lower bound, covers too much
    assert 0.85 <= covered / trials <= (1.0 if seeds == 2 else 0.95)


def test_recipes_that_differ_are_found_with_enough_seeds():
    """By hand: 2 (2.39 + 0.84)^2 x 0.03^2 / 0.045^2 = 9.3 seeds for a power of 80 %, without the t distribution."""
    rng = np.random.default_rng(5)

    def power(seeds):
        found = 0
        for _ in range(150):
            each = Table(drawn(rng, 4, seeds, shift=0.045), paired=True)
            found += adjusted({n: each.difference(n, 0) for n in (1, 2, 3)})[1].declared
        return found / 150

    assert power(11) >= 0.7 and power(3) < 0.5
