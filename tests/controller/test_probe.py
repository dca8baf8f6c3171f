"""The probe compares log-probs of sampled tokens and rejects another version or other weights."""

import asyncio
from types import SimpleNamespace

import pytest
from rollout_groups import scored
from waiting import passes

from megatron_scalerl.controller.loop import Controller
from megatron_scalerl.controller.probe import Probe, ProbeError
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.launch.placement import Devices, Fleet
from megatron_scalerl.processes.signals import SaveAndExit
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.types import CompletionLost, Prompt, Rollout, Score

RECIPE = Recipe(name="r", steps=1, policy={"path": "p", "dtype": "float32"}, prompts={"path": "q"})
PROMPTS = [Prompt(prompt_id=f"p{i}", text="", answer="", token_ids=(1, 2, 3)) for i in range(6)]


class StandInEngine:
    name = "engine-0"
    produced_tokens = received_tokens = 0

    def abort(self, reason):
        """No request notices it."""


class StandInSampler:
    """Three tokens a completion, the second one forced."""

    def __init__(self, version):
        self.version = version
        self.engines = []

    def draw(self, seed, group_id, index):
        return index

    async def complete(self, engine, prompt, draw, *, priority, max_tokens):
        assert max_tokens == 256, "the trainer waits for the probe"
        self.engines.append(engine)
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
        return scored(rollout, Score(correct=False, reward=-1.0))


class StandInTrainer:
    def __init__(self, last):
        self.last = last

    async def logprobs(self, sequences):
        assert all(s == [1, 2, 3, 7, 8, 9] for s in sequences)
        # tokens 2 and 3 of the prompt, then the three of the completion; the forced one would be far off
        return [[-5.0, -5.0, -1.0, -9.0, self.last] for _ in sequences]


def fleet_of(engines, last=-2.0):
    devices = Devices(unit="device_hours", trainer=1, engine=1)
    return Fleet(trainer=StandInTrainer(last), info=None, engines=engines, devices=devices)


def check(*, last=-2.0, version=4):
    fleet = fleet_of(Membership.of([StandInEngine()], version=4), last)
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


def test_an_engine_that_joins_while_the_trainer_waits_is_probed_once():
    """Before the batch that the trainer waited for is returned; engines that were probed are not probed again."""
    old, new = StandInEngine(), StandInEngine()
    engines, sampler = Membership(2), StandInSampler(4)
    probe = Probe(RECIPE, sampler, fleet_of(engines), PROMPTS)

    async def catch_up(version):
        for engine in engines.stale:
            engines.serve(engine, version)

    async def batch():
        engines.join(1, new)
        await engines.until(lambda: new in engines.serving)
        return "batch"

    async def run():
        engines.join(0, old)
        engines.serve(old, 4)
        await probe.check(4)
        assert set(sampler.engines) == {old}
        sampler.engines.clear()
        loop = SimpleNamespace(
            _fleet=SimpleNamespace(engines=engines),
            _sync=SimpleNamespace(catch_up=catch_up),
            _probe=probe,
            _step=4,
            _served=4,
            _recipe=RECIPE,
            _saving=SaveAndExit(),
        )
        assert await Controller._while_current(loop, batch()) == "batch"
        assert set(sampler.engines) == {new}
        assert await probe.check(4, new_only=True) == {}

    asyncio.run(run())


def test_an_engine_that_joins_within_a_phase_gets_no_weights_that_the_others_do_not_have():
    engines, joined = Membership(1), StandInEngine()

    async def batch():
        engines.join(0, joined)
        await passes()
        return "batch"

    loop = SimpleNamespace(_fleet=SimpleNamespace(engines=engines), _sync=None, _step=5, _served=4)
    assert asyncio.run(Controller._while_current(loop, batch())) == "batch"
    assert engines.stale == [joined]


def test_a_server_that_is_started_again_is_new():
    first, second = StandInEngine(), StandInEngine()
    engines, sampler = Membership.of([first], version=4), StandInSampler(4)
    probe = Probe(RECIPE, sampler, fleet_of(engines), PROMPTS)
    asyncio.run(probe.check(4))
    engines.evict(first, "gone")
    engines.join(0, second)
    engines.serve(second, 4)
    sampler.engines.clear()
    asyncio.run(probe.check(4, new_only=True))
    assert set(sampler.engines) == {second}


class LosingSampler(StandInSampler):
    """A stand-in that loses its third completion."""

    async def complete(self, engine, prompt, draw, *, priority, max_tokens):
        if draw == 2 and len(self.engines) < 4:
            raise CompletionLost("no process left to score it", reason="verifier_lost")
        return await super().complete(engine, prompt, draw, priority=priority, max_tokens=max_tokens)


def test_a_lost_completion_puts_the_probe_off(caplog):
    members = Membership.of([StandInEngine()], version=4)
    probe = Probe(RECIPE, LosingSampler(4), fleet_of(members), PROMPTS)
    assert asyncio.run(probe.check(4, new_only=True)) == {}
    assert members.serving and "is not probed: a completion is lost" in caplog.text
    assert asyncio.run(probe.check(4, new_only=True)) == {"probe_mismatch_mean": 0.0, "probe_mismatch_max": 0.0}
