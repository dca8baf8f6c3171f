"""mean@k, pass@k and their intervals over prompts."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_scalerl.evaluation.estimators import mean_at_k, pass_at_k


def outcomes(correct, k):
    """Of k completions of each prompt, the first ones are correct."""
    return [[index < c for index in range(k)] for c in correct]


counts_of_one = st.integers(1, 7).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(st.lists(counts_of_one, min_size=1, max_size=6), st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_completion(prompts, k):
    drawn = [outcomes([c], n)[0] for c, n in prompts]
    k = min(k, *map(len, drawn))
    shares = [np.mean([any(i < c for i in subset) for subset in combinations(range(n), k)]) for c, n in prompts]
    found = pass_at_k(drawn, k)
    assert found.value == pytest.approx(np.mean(shares))
    assert 0 <= found.low <= found.value <= found.high <= 1
    if k == 1:
        assert found.value == pytest.approx(mean_at_k(drawn).value)


def test_mean_at_k_weighs_prompts_equally():
    assert mean_at_k([*outcomes([1], 1), *outcomes([4], 16)]).value == pytest.approx((1 + 0.25) / 2)


def test_completions_of_one_prompt_are_not_independent():
    """16 completions of each of 30 prompts that are always or never solved are 30 observations."""
    always_or_never = outcomes((16, 0) * 15, 16)
    mixed = outcomes((8,) * 15 + (9, 7) * 7 + (8,), 16)
    wide, narrow = mean_at_k(always_or_never), mean_at_k(mixed)
    assert wide.value == narrow.value == 0.5
    assert wide.high - wide.low > 0.35 and narrow.high - narrow.low < 0.12


def test_equal_prompts_leave_an_interval():
    """No prompt of 30 was solved: as many as 12.5 % of all prompts may be (1 - (1 - x)^30 = 0.975, Student's t)."""
    never = mean_at_k(outcomes([0] * 30, 16))
    always = mean_at_k(outcomes([16] * 30, 16))
    assert (never.value, never.low) == (0, 0) and never.high == pytest.approx(0.125, abs=0.003)
    assert (always.value, always.high) == (1, 1) and always.low == pytest.approx(1 - never.high)
    one = mean_at_k(outcomes([3], 4))
    assert (one.low, one.high) == (0, 1)


@pytest.mark.parametrize("prompts, k, beta", [(30, 16, (0.3, 0.7)), (60, 4, (0.5, 0.5)), (200, 4, (2, 1))])
def test_the_interval_holds_its_level(prompts, k, beta):
    random, expected, inside = np.random.default_rng(0), beta[0] / sum(beta), 0
    for _ in range(400):
        correct = random.binomial(k, random.beta(*beta, prompts))
        found = mean_at_k(outcomes(correct, k))
        inside += found.low <= expected <= found.high
    assert inside / 400 >= 0.93
