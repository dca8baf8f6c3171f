"""The simulated queue: closed forms where there are some, the bound on staleness, which side waits."""

import random
from dataclasses import replace

import pytest

from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.engine import Decoding
from megatron_scalerl.plan.simulate import QueueSettings, simulate
from megatron_scalerl.plan.split import Split, generate_seconds
from megatron_scalerl.plan.work import Lengths, assumed_lengths
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.sections import RolloutsSection

RNG = random.Random(3)
SPREAD = Lengths(tuple(RNG.randint(100, 1900) for _ in range(4000)))
SPEED = Decoding(fixed_seconds=0.01, per_completion_seconds=0.0, prefill_seconds=0.0, running=64)
BASE = QueueSettings(
    rollouts=RolloutsSection(groups_per_batch=4, group_size=4, max_staleness_steps=4, max_in_flight=64),
    engines=2,
    decoding=SPEED,
    lengths=Lengths((1000,)),
    train_seconds=1.0,
    publish_seconds=0.5,
    steps=40,
    warm_up=20,
)


def pipeline(k, **settings):
    return replace(BASE, rollouts=BASE.rollouts.model_copy(update={"max_staleness_steps": k}), **settings)


def phases(updates, **settings):
    schedule = {"schedule": "ppo_off_policy", "updates_per_phase": updates}
    return replace(BASE, rollouts=BASE.rollouts.model_copy(update=schedule), **settings)


@pytest.mark.parametrize("updates", [1, 4])
def test_phases_are_the_sum_of_their_parts(updates):
    """16 completions of 10 s on two engines with room for 64 each, one step of 1 s after another, one update."""
    t = simulate(phases(updates))
    phase_s = 10.0 + updates * 1.0 + 0.5
    assert t.step_seconds == pytest.approx(phase_s / updates)
    assert t.trainer_waits == pytest.approx(10.0 / phase_s)
    assert t.engines_idle == pytest.approx(updates * 1.0 / phase_s)
    assert (t.staleness_mean, t.staleness_max) == ((updates - 1) / 2, updates - 1)


def test_a_phase_waits_for_its_longest_completion_and_a_pipeline_does_not():
    setting = {"lengths": SPREAD, "train_seconds": 3.0}
    assert simulate(phases(4, **setting)).step_seconds > simulate(pipeline(4, **setting)).step_seconds
    assert simulate(phases(1, **setting)) == simulate(pipeline(0, **setting))


def test_a_slow_trainer_sets_the_pace():
    t = simulate(replace(BASE, train_seconds=30.0, lengths=SPREAD))
    assert t.trainer_waits == 0 and t.step_seconds == pytest.approx(30.5, rel=0.1)
    assert t.engines_idle > 0.3
    assert t.engine_tokens_per_second == pytest.approx(16 * SPREAD.mean / t.step_seconds / 2)


def test_slow_engines_set_the_pace():
    # each token costs 10 ms for each completion that runs: an engine makes 100 tokens/s whatever it holds
    speed = Decoding(fixed_seconds=0.0, per_completion_seconds=0.01, prefill_seconds=0.0, running=64)
    t = simulate(replace(BASE, decoding=speed, publish_seconds=0.0))
    assert t.step_seconds == pytest.approx(16 * 1000 / 200, rel=0.02)
    assert t.trainer_waits == pytest.approx(1 - 1.0 / t.step_seconds, abs=0.02)
    assert t.engines_idle < 0.01


@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_nothing_older_than_k_is_trained(k):
    t = simulate(pipeline(k, lengths=SPREAD, train_seconds=3.0))
    assert t.staleness_max <= k


def test_pipelining_is_faster_until_the_longest_completion_holds_it():
    steps = [simulate(pipeline(k, lengths=SPREAD, train_seconds=3.0)).step_seconds for k in (0, 1, 8)]
    assert steps[0] > steps[1] > steps[2]
    # 19 s for 1,900 tokens: no k steps can be shorter than the longest completion in them
    assert steps[1] > 19 / 2 * 0.8


def test_prompts_cost_time():
    t = simulate(pipeline(0, decoding=replace(SPEED, prefill_seconds=0.25)))
    assert t.step_seconds == pytest.approx(10.0 + 8 * 0.25 + 1.5)


def test_assumed_lengths_keep_the_budget():
    data = {"name": "t", "steps": 1, "policy": {"path": "x"}, "prompts": {"path": "y"}}
    lengths = assumed_lengths(Recipe.model_validate(data), Assumptions())
    assert max(lengths.tokens) <= 12_288 + 2_048
    at_least_cut = sum(n >= 10_240 for n in lengths.tokens) / len(lengths.tokens)
    assert 0.08 < at_least_cut < 0.20
    short = assumed_lengths(Recipe.model_validate(data), Assumptions(thinking_median=0.1))
    assert short.mean < lengths.mean / 2
    assert Lengths((10, 30)).mean_resident == (100 + 900) / 2 / (2 * 20)


def episodes(waiting, **settings):
    """16 episodes of 1,000 tokens, which wait for their environment."""
    return pipeline(0, lengths=Lengths((1000,), replies=2, waiting=waiting), **settings)


def test_a_synchronous_step_has_the_wait_too():
    t = simulate(episodes(3.0))
    assert t.step_seconds == pytest.approx(10.0 + 3.0 + 1.0 + 0.5)
    assert t.engines_idle == pytest.approx((3.0 + 1.0) / 14.5)
    assert t.running == pytest.approx(8 * 10.0 / 14.5)  # those that wait decode nothing
    assert t.engine_tokens_per_second == pytest.approx(8 * 1000 / 14.5)


def test_an_episode_that_waits_keeps_its_cache_and_its_slot():
    few = replace(SPEED, running=2)
    assert simulate(episodes(3.0, decoding=few)).step_seconds == pytest.approx(4 * 13.0 + 1.5)
    narrow = episodes(3.0)
    narrow = replace(narrow, rollouts=narrow.rollouts.model_copy(update={"max_in_flight": 4}))
    assert simulate(narrow).step_seconds == pytest.approx(2 * 13.0 + 1.5)


def test_other_episodes_decode_meanwhile():
    """32 episodes of 1 s of decoding keep an engine busy while some wait for 3 s; 60 s are more than they decode."""
    speed = Decoding(fixed_seconds=0.0, per_completion_seconds=0.001, prefill_seconds=0.0, running=32)
    rates = []
    for waiting in (0.0, 3.0, 60.0):
        spread = Lengths(SPREAD.tokens, replies=2, waiting=waiting)
        setting = pipeline(8, lengths=spread, decoding=speed, train_seconds=0.1, publish_seconds=0.0, steps=200)
        setting = replace(setting, rollouts=setting.rollouts.model_copy(update={"max_in_flight": 32}))
        rates.append(simulate(setting).engine_tokens_per_second)
    assert rates[1] == pytest.approx(rates[0], rel=0.02)
    assert rates[2] == pytest.approx(32 * 1000 / (60 + 1), rel=0.1)


def test_the_estimate_counts_the_wait():
    """Two engines, 8 episodes on each, 10 s of decoding and 3 s of waiting."""
    assert generate_seconds(episodes(3.0), Split(trainer=1, engines=2)) == pytest.approx(13.0)
    assert generate_seconds(episodes(0.0), Split(trainer=1, engines=2)) == pytest.approx(10.0)
