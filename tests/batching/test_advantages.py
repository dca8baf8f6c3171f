"""Filters, advantages and weights of a batch, against values computed by hand."""

import math
from dataclasses import replace

import pytest
from rollout_groups import group

from megatron_scalerl.algorithms import ScaleRL
from megatron_scalerl.controller.samples import empty_reason, samples_of
from megatron_scalerl.types import Score


def plan(groups, **options):
    return samples_of(groups, ScaleRL(**options))


def advantages(groups, **options):
    return [s.advantage for s in plan(groups, **options).samples]


# Centred rewards: (.5, .5, .5, -1.5) x 2 for rewards 1 1 1 -1, and (1, -1).
MIXED = [group([1, 1, 1, -1]), group([1, -1], group_id=1)]
STD = math.sqrt((0.25 * 3 + 2.25 + 1 + 1) / 6)


SPREAD = math.sqrt((0.25 * 3 + 2.25) / 4)
"""Of the first group alone; that of the second is 1."""


@pytest.mark.parametrize(
    "normalize, first, second", [("batch", STD, STD), ("prompt", SPREAD, 1.0), ("none", 1.0, 1.0)]
)
def test_centered_rewards_are_divided_by_one_population_std_or_each_groups(normalize, first, second):
    expected = [0.5 / first] * 3 + [-1.5 / first, 1 / second, -1 / second]
    assert advantages(MIXED, normalize=normalize) == pytest.approx(expected)
    assert plan(MIXED, normalize=normalize).stats["advantage_std"] == pytest.approx(STD)


def test_an_unknown_normalization_is_refused():
    with pytest.raises(AssertionError, match="mean"):
        plan(MIXED, normalize="mean")


def test_one_value_per_completion_not_per_token():
    long = [group([1, 1, 1, -1], lengths=[50, 1, 1, 1]), group([1, -1], group_id=1)]
    assert advantages(long) == pytest.approx(advantages(MIXED))


@pytest.mark.parametrize(
    "options, expected, dropped",
    [({}, [1.0, -1.0], 1), ({"truncated": "wrong", "normalize": "none"}, [4 / 3, -2 / 3, -2 / 3], 0)],
)
def test_truncated_leave_loss_and_group_mean_or_count_as_wrong(options, expected, dropped):
    result = plan([group([1, -1, -1], truncated={2})], **options)
    assert [s.advantage for s in result.samples] == pytest.approx(expected)
    assert (result.stats["truncated_dropped"], result.stats["completions"]) == (dropped, 3)


def test_truncated_leave_before_the_variance_is_judged():
    # one right, the others truncated: what remains teaches nothing
    groups = [group([1, -1, -1], truncated={1, 2}), group([1, 1, -1], truncated={2}, group_id=1)]
    result = plan(groups)
    assert result.samples == ()
    assert result.stats["groups_dropped_too_few"] == 1
    assert result.stats["groups_dropped_all_correct"] == 1
    assert len(plan(groups, truncated="wrong").samples) == 6


def test_zero_variance_groups_leave_spread_and_denominator():
    solved = [*MIXED, group([1, 1, 1], group_id=2)]
    assert plan(solved).samples == plan(MIXED).samples
    assert plan(solved).stats["groups_kept"] == 2


def test_zero_variance_groups_stay_when_asked():
    solved = [*MIXED, group([1, 1, 1], group_id=2)]
    result = plan(solved, zero_variance=False)
    assert [s.advantage for s in result.samples[6:]] == [0.0] * 3
    spread = math.sqrt((0.25 * 3 + 2.25 + 1 + 1) / 9)
    assert result.samples[0].advantage == pytest.approx(0.5 / spread)
    assert result.samples[0].token_weight == pytest.approx(1 / (3 * 12))  # N_eff counts the solved prompt


def test_groups_with_nothing_left_leave_without_the_variance_filter_too():
    groups = [*MIXED, group([1, -1], truncated={0, 1}, group_id=2)]
    result = plan(groups, zero_variance=False)
    assert result.samples == plan(MIXED, zero_variance=False).samples
    assert (result.stats["groups_kept"], result.stats["groups_dropped_too_few"]) == (2, 1)
    assert "groups_dropped_too_few" not in plan(MIXED, zero_variance=False).stats


def test_equal_fractional_rewards_give_exact_zeros():
    values = advantages([group([0.1] * 3), group([0.7] * 7, group_id=1)], zero_variance=False)
    assert values == [0.0] * 10


def test_weights_follow_the_loss_mask_of_what_remains():
    groups = [group([1, -1, 1], lengths=[2, 6, 9], truncated={2}), group([1, -1], lengths=[1, 3], group_id=1)]
    weights = [s.token_weight for s in plan(groups).samples]
    assert weights == pytest.approx([1 / 16] * 2 + [1 / 8] * 2)
    weights = [s.token_weight for s in plan(groups, reduction="sequence_mean").samples]
    assert weights == pytest.approx([1 / 8, 1 / 24, 1 / 4, 1 / 12])
    weights = [s.token_weight for s in plan(groups, reduction="token_mean").samples]
    assert weights == pytest.approx([1 / 12] * 4)


def test_nothing_left_is_an_empty_plan():
    result = plan([group([1, 1]), group([-1, -1], group_id=1)])
    assert result.samples == ()
    assert result.stats["groups_dropped_all_correct"] == 1
    assert result.stats["groups_dropped_all_incorrect"] == 1
    assert result.stats["advantage_std"] == 0.0
    assert plan([]).samples == ()


def test_groups_of_one_are_zero_variance():
    assert plan([group([1])], normalize="none").samples == ()
    assert advantages([group([1])], normalize="none", zero_variance=False) == [0.0]


def test_a_dropped_group_has_its_reason():
    equal = replace(group([1, 1]), scores=(Score(correct=True, reward=1.0), Score(correct=False, reward=1.0)))
    groups = [group([1, -1]), group([1, 1]), group([-1, -1]), group([1]), group([]), equal]
    reasons = ["", "all_correct", "all_incorrect", "too_few", "too_few", "equal_rewards"]
    assert [ScaleRL().drop_reason(each) for each in groups] == reasons
    groups = [replace(each, group_id=number) for number, each in enumerate(groups)]
    result = plan(groups, normalize="none")
    assert result.trained.dropped == {n: reason for n, reason in enumerate(reasons) if reason}
    assert result.trained.advantages == {0: {0: 1.0, 1: -1.0}} and result.stats["groups_dropped_too_few"] == 2
    assert "2 of 6 groups with fewer than two completions" in empty_reason(result.stats)
