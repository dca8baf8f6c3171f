"""The probe compares log-probs of sampled tokens and rejects another version or other weights."""

import asyncio

import pytest

from megatron_scalerl.controller.probe import Probe, ProbeError
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.launch.fleet import Devices, Fleet
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.types import Prompt, Rollout, Score

RECIPE = Recipe(name="r", steps=1, policy={"path": "p", "dtype": "float32"}, prompts={"path": "q"})
PROMPTS = [Prompt(prompt_id=f"p{i}", text="", answer="", token_ids=(1, 2, 3)) for i in range(6)]


class StandInEngine:
    name = "engine-0"


class StandInSampler:
    """Three tokens a completion, the second one forced."""

    def __init__(self, version):
        self.version = version

    def draw(self, seed, group_id, index):
        return index

    async def complete(self, engine, prompt, draw, *, priority):
        rollout = Rollout(
            token_ids=(7, 8, 9),
            rollout_logprobs=(-1.0, 0.0, -2.0),
            policy_versions=(self.version,) * 3,
            loss_mask=(True, False, True),
            interrupted=True,
            truncated=False,
            thinking_cut=1,
            seed=0,
        )
        return rollout, Score(correct=False, reward=-1.0)


class StandInTrainer:
    def __init__(self, last):
        self.last = last

    async def logprobs(self, sequences):
        assert all(s == [1, 2, 3, 7, 8, 9] for s in sequences)
        # tokens 2 and 3 of the prompt, then the three of the completion; the forced one would be far off
        return [[-5.0, -5.0, -1.0, -9.0, self.last] for _ in sequences]


def check(*, last=-2.0, version=4):
    fleet = Fleet(
        trainer=StandInTrainer(last),
        info=None,
        engines=Membership.of([StandInEngine()], version=4),
        devices=Devices(unit="device_hours", trainer=1, engine=1),
    )
    return asyncio.run(Probe(RECIPE, StandInSampler(version), fleet, PROMPTS).check(4))


def test_equal_logprobs_pass_and_forced_tokens_do_not_count():
    assert check() == {"probe_mismatch_mean": 0.0, "probe_mismatch_max": 0.0}


def test_a_small_difference_is_reported():
    found = check(last=-2.0005)
    assert found["probe_mismatch_max"] == pytest.approx(5e-4)
    assert found["probe_mismatch_mean"] == pytest.approx(2.5e-4)


def test_other_weights_end_the_run():
    with pytest.raises(ProbeError, match=r"engine-0 at policy version 4: .* within 0.001 nats .* found 0.5"):
        check(last=-2.5)


def test_another_version_ends_the_run():
    with pytest.raises(ProbeError, match=r"expected policy version 4, found \[3\]"):
        check(version=3)
