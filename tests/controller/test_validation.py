"""Validation: what is drawn anew each time, what stays, and what is recorded for the noise of a fit."""

import asyncio
import random
from dataclasses import replace

import pytest
from fakes.engine import StandInEngine
from fakes.sampler import StandInSampler
from recipe_files import small_recipe

from megatron_scalerl.controller.measured_prompts import HeldOut, PinnedVersion
from megatron_scalerl.controller.metrics import means, text, within_variance
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.evaluation.completing import Completer
from megatron_scalerl.types import CompletionLost, Prompt

PROMPTS = [Prompt(prompt_id=f"id{i}", text=f"text{i}", answer="1", token_ids=(1,)) for i in range(4)]


def sampler_of(**options):
    """Completion 1 of prompt 2 is lost, others are correct by their draw and have one token."""

    async def wait(engine, draw, priority):
        if draw[1:] == (2, 1):
            raise CompletionLost("no log-probabilities", reason="no_logprobs")

    options = {"tokens": lambda _: (5,), "correct": lambda draw: random.Random(str(draw)).random() < 0.5} | options
    return StandInSampler(wait, **options)


def validate(*steps, sampled=None, prompts=PROMPTS, metrics=None, **validation):
    """[(pass rate, outcomes, draws)] of the validations of `steps`."""

    async def run():
        settings = {"generations": 3, "end_generations": 3} | validation
        recipe = small_recipe(steps=9, validation=settings)
        found = []
        for step in steps:
            engines, sampler = Membership.of([StandInEngine(version=step)], version=step), sampler_of(**sampled or {})
            held_out = HeldOut(recipe, prompts, sampler, metrics=metrics, progress=None)
            axis = {"compute": 0.0, "compute_total": 0.0, "unit": "device_hours"}
            completer = Completer(members=engines, version=step, at_once=16)
            result, outcomes = await held_out.validate(PinnedVersion(step=step, digest="", axis=axis), completer)
            found.append((result, outcomes, {draw for _, draw in sampler.asked}))
        return found

    return asyncio.run(run())


def test_every_validation_draws_anew_by_its_step_alone():
    (_, first, draws), (_, other, others), (_, again, _) = validate(0, 3, 3)
    assert not draws & others, "no request of two validations has a seed in common"
    assert {draw[1:] for draw in draws} == {draw[1:] for draw in others}, "the same prompts and completions"
    assert again == other != first


def test_common_seeds_are_the_same_in_every_validation():
    (_, first, draws), (_, other, others) = validate(0, 3, fresh_seeds=False)
    assert draws == others and first == other
    assert draws == validate(0)[0][2], "the first validation is the same either way"


def test_a_lost_completion_counts_nowhere():
    [(result, outcomes, _)] = validate(0)
    assert outcomes[2][1] is None and result.lost_completions == 1
    kept = [x for x in outcomes[2] if x is not None]
    assert means(outcomes)[2] == sum(kept) / 2
    assert result.pass_rate == pytest.approx(sum(means(outcomes)) / 4)
    assert result.within_variance == within_variance(outcomes)


def test_the_length_is_what_the_policy_wrote():
    mask = (True, False, False, True, True)
    episodes = {"tokens": lambda _: (5, 6, 7, 8, 9), "mask": mask, "environment": ((1, 3),)}
    [(result, _, _)] = validate(0, sampled=episodes)
    assert (result.mean_completion_tokens, result.entropy) == (3.0, 1.0)
    assert validate(0)[0][0].mean_completion_tokens == 1.0


def test_outcomes_are_written_prompt_after_prompt():
    assert text(((True, False), (None, True))) == "10-1"


def test_the_variance_within_prompts_leaves_out_what_lies_between_them():
    assert within_variance([[True] * 4, [False] * 4]) == 0.0, "p (1 - p) of their mean is 1/4"
    assert within_variance([[True, False], [False, True]]) == 0.5
    assert within_variance([[True, False, False], [True, True, True]]) == pytest.approx((2 / 6 + 0) / 2)
    assert within_variance([[True, None], [True, False]]) == 0.5
    assert within_variance([[True], [False]]) is None


def audited(share, **options):
    """The result of a validation in which the second judge confirms a share of the answers."""
    sampled = {"correct": lambda _: True, "confirmed": lambda draw: draw.group < share * len(PROMPTS)}
    [(result, _, _)] = validate(0, sampled=sampled, **options)
    return result


def warnings(caplog):
    return [message for message in caplog.messages if "second judge" in message]


def test_a_validation_says_which_share_of_the_paid_is_confirmed_and_shows_two_that_are_not(caplog):
    result = audited(0.5)
    assert (result.confirmed_share, result.confirmed_least) == (6 / 11, 0.95)
    [warning] = warnings(caplog)
    assert "confirms 54.5 % of the answers judged correct, below 95.0 %" in warning
    assert warning.count("reference '1': 'text ") == 2 and "'text 2.0'" in warning
    caplog.clear()
    assert audited(1.0).confirmed_share == 1.0 and not warnings(caplog)
    assert validate(0)[0][0].confirmed_share is None, "without a second judge nothing is said"


class Earlier:
    def validations(self):
        return [{"step": 0, "confirmed_share": None}, {"step": 1, "confirmed_share": 0.6}]


@pytest.mark.parametrize("share, warned", [(0.75, False), (0.5, True)])
def test_where_references_are_expressions_the_share_may_not_fall(share, warned, caplog):
    expressions = [replace(prompt, answer="2\\sqrt{3}") for prompt in PROMPTS]
    result = audited(share, prompts=expressions, metrics=Earlier())
    assert result.confirmed_least == pytest.approx(0.55) and bool(warnings(caplog)) is warned
