"""The length penalty by hand: where it begins and ends, what it is added to, and what it leaves alone."""

import dataclasses
from unittest.mock import AsyncMock, Mock

import pytest
from recipe_files import small_recipe
from rollout_groups import group_of, rollout
from verifier_pools import RIGHT, WRONG, pool_of, prompt, wrong

from megatron_scalerl.algorithms import ScaleRL
from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.controller.samples import samples_of
from megatron_scalerl.prompts.curriculum import Curriculum
from megatron_scalerl.recipe.sections import LengthPenaltySection
from megatron_scalerl.rewards.length_penalty import length_penalty, penalized
from megatron_scalerl.rollouts.decoder_pool import Decoded
from megatron_scalerl.rollouts.sampler import Sampler
from megatron_scalerl.types import Prompt, Score

PAPER = small_recipe(rewards={"length_penalty": {}}).length_penalty
SMALL = {"max_tokens": 10, "cache_tokens": 4}


@pytest.mark.parametrize(
    "tokens, expected",
    [
        (1, 0.0),
        (12_288, 0.0),
        (12_800, -0.25),
        (13_312, -0.5),
        (14_335, -2047 / 2048),
        (14_336, -1.0),
        (20_000, -1.0),
    ],
)
def test_the_papers_penalty(tokens, expected):
    assert length_penalty(tokens, PAPER) == expected


def test_only_correct_completions_pay():
    section = LengthPenaltySection(**SMALL)
    assert penalized(RIGHT, 8, section) == Score(correct=True, reward=0.5)
    assert penalized(RIGHT, 99, section) == Score(correct=True, reward=0.0), "still more than a wrong answer"
    assert penalized(WRONG, 99, section) == WRONG
    assert penalized(wrong("truncated"), 99, section) == wrong("truncated")
    assert penalized(RIGHT, 99, None) == RIGHT


async def test_the_pool_scores_equal_texts_of_other_lengths_apart():
    """The check is made once; the penalty is no part of what is kept of it."""
    async with pool_of("same", length_penalty=SMALL) as pool:
        calls = [("7", 6, False), ("7", 8, False), ("7", 10, False), ("8", 10, False), ("7", 10, True)]
        scores = [await pool.score(text, prompt(), tokens=n, truncated=cut) for text, n, cut in calls]
        assert pool._workers._workers[0]._number == 1 + 2, "the setup and two checks"
    assert [s.reward for s in scores] == [1.0, 0.5, 0.0, -1.0, -1.0]
    assert [s.correct for s in scores] == [True, True, True, False, False]


async def test_forced_tokens_and_the_policys_own_end_of_sequence_are_told_apart():
    """Seven tokens of which three were forced: four count."""
    found = rollout(tokens=range(10, 17), mask=(True, True, False, False, False, True, True))
    data = rollout_bytes.write(found)
    completion = rollout_bytes.facts_of(rollout_bytes.arrays_of(found))
    engine, verifier = AsyncMock(), AsyncMock()
    engine.generate.return_value = Decoded(completion=completion, data=data, text="7")
    verifier.score.return_value = RIGHT
    await Sampler(Mock(), decoders=None, verifier=verifier).complete(engine, prompt(), None, priority=0)
    verifier.score.assert_awaited_once_with("7", prompt(), truncated=False, tokens=4)
    assert completion.tokens == 7


def solved(lengths, truncated=()):
    """A group of correct completions with the penalty on their lengths; truncated ones are wrong."""
    rollouts = [rollout(tokens=range(n), truncated=i in truncated) for i, n in enumerate(lengths)]
    section = LengthPenaltySection(**SMALL)
    scores = [
        penalized(wrong("truncated") if each.truncated else RIGHT, len(each.token_ids), section) for each in rollouts
    ]
    return group_of(rollouts, scores, prompt=Prompt(prompt_id="p0", text="", answer="", token_ids=(1,)))


def batch(*groups):
    return samples_of(groups, ScaleRL(normalize="none"))


def test_the_zero_variance_filter_keeps_correct_completions_whose_lengths_differ_near_the_limit():
    """Rewards 1, 1, 0.5 and 0.5; and three times 1, all short."""
    plan = batch(solved([3, 6, 8, 8]), solved([2, 4, 6]))
    assert [s.advantage for s in plan.samples] == [0.25, 0.25, -0.25, -0.25]
    assert plan.stats["groups_dropped_all_correct"] == 1


def test_pass_rates_and_what_is_drawn_again_depend_on_correctness_alone():
    group = solved([3, 9, 10])
    assert group.pass_rate == 1.0 and [s.reward for s in group.scores] == [1.0, 0.25, 0.0]
    curriculum = Curriculum([dataclasses.replace(group.prompt, prompt_id=name) for name in "ab"], 1, 0.9, 2)
    first, _ = curriculum.draw()
    curriculum.observe(first.prompt_id, group.pass_rate)
    assert [curriculum.draw()[0].prompt_id for _ in range(2)] == ["ab".replace(first.prompt_id, "")] * 2


def test_a_truncated_completion_is_left_out_as_without_a_penalty():
    plan = batch(solved([3, 8, 99], truncated={2}))
    assert [s.advantage for s in plan.samples] == [0.25, -0.25] and plan.stats["truncated_dropped"] == 1
