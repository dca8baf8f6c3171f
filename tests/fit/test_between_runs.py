"""Differences between recipes with several seeds: hand-computed cases; error, coverage, power on synthetic runs."""

import math

import numpy as np
import pytest

from megatron_scalerl.fit.compare import ERROR, Difference, adjusted_differences, mean_of


def mean(values, *, fit_sd=1e-6):
    return mean_of(np.asarray(values, dtype=float), np.full(len(values), fit_sd**2))


def test_two_recipes_are_welchs_t_test():
    """Means 0.5 and 0.8, variances 0.01 and 0.04, three runs each: standard error sqrt(0.05 / 3), 2.941 degrees."""
    found = mean([0.6, 0.8, 1.0]).minus(mean([0.4, 0.5, 0.6]))
    assert found.value == pytest.approx(0.3)
    assert found.hi - found.value == pytest.approx(2.372676 * math.sqrt(0.05 / 3), rel=1e-4)  # t, 2.941 degrees
    assert found.p == pytest.approx(0.1036, abs=2e-3)  # two-sided p of t = 2.324 with 2.941 degrees


def test_one_run_decides_nothing():
    found = mean([0.9]).minus(mean([0.5, 0.501, 0.502]))
    assert found.p == 1.0 and not found.declared and math.isnan(found.lo) and found.value == pytest.approx(0.399)


def test_the_variance_is_at_least_that_of_the_fits():
    found = mean([0.6, 0.6, 0.6], fit_sd=0.1).minus(mean([0.5, 0.5, 0.5], fit_sd=0.1))
    assert found.hi - found.value == pytest.approx(2.131847 * math.sqrt(0.02 / 3))  # t, four degrees


def test_equal_runs_differ_by_nothing():
    found = mean([0.5, 0.5], fit_sd=0.0).minus(mean([0.5, 0.5], fit_sd=0.0))
    assert (found.value, found.p) == (0.0, 1.0) and found.within(1e-5)


def test_holms_limits():
    """0.01 x 3, 0.02 x 2, 0.03: never falling, in their places."""

    def of(p):
        return Difference(value=1.0, lo=0.0, hi=2.0, p=p)

    found = adjusted_differences({5: of(0.02), 7: of(0.01), 9: of(0.5)})
    assert {n: each.p for n, each in found.items()} == {7: pytest.approx(0.03), 5: pytest.approx(0.04), 9: 0.5}


def drawn(rng, recipes, seeds, *, deviation=0.03, shift=0.0, scatter="alike"):
    """Recipes with one mean but for the second one's shift."""
    factors = {
        "alike": np.ones(recipes),
        "of their own": np.exp(rng.normal(0, 0.5, recipes)),
        "the reference's larger": np.r_[4.0, np.full(recipes - 1, 0.7)],
    }
    own = deviation * factors[scatter]
    return [
        mean(0.6 + rng.normal(0, own[n], seeds) + (shift if n == 1 else 0.0), fit_sd=0.01) for n in range(recipes)
    ]


def differences(means):
    return {n: means[n].minus(means[0]) for n in range(1, len(means))}


@pytest.mark.parametrize("scatter", ["alike", "of their own", "the reference's larger"])
@pytest.mark.parametrize("recipes, seeds", [(2, 2), (2, 3), (5, 3), (13, 3)])
def test_errors_and_coverage_of_recipes_that_do_not_differ(recipes, seeds, scatter):
    rng, trials = np.random.default_rng([recipes, seeds, len(scatter)]), 300
    declared = covered = 0.0
    for _ in range(trials):
        found = differences(drawn(rng, recipes, seeds, scatter=scatter))
        declared += any(each.declared for each in adjusted_differences(found).values())
        covered += np.mean([each.lo <= 0.0 <= each.hi for each in found.values()])
    assert declared / trials <= ERROR + 3 * math.sqrt(ERROR * (1 - ERROR) / trials)
    assert 0.85 <= covered / trials <= 1.0


def test_recipes_that_differ_are_found_with_enough_seeds():
    """By hand: 2 (2.39 + 0.84)^2 x 0.03^2 / 0.045^2 = 9.3 seeds for a power of 80 %, without the t distribution."""
    rng = np.random.default_rng(5)

    def power(seeds):
        found = 0
        for _ in range(150):
            found += adjusted_differences(differences(drawn(rng, 4, seeds, shift=0.045)))[1].declared
        return found / 150

    assert power(11) >= 0.7 and power(3) < 0.5
