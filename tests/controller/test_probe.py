"""The probe compares log-probs of sampled tokens and rejects another version or other weights."""

import asyncio
from types import SimpleNamespace

import pytest
from fakes.engine import StandInEngine
from fakes.sampler import StandInSampler
from fakes.trainer import StandInTrainer
from recipe_files import small_recipe
from waiting import passes

from megatron_scalerl.controller.overlap import Overlap
from megatron_scalerl.controller.probe import Probe, ProbeError, Scored, judged
from megatron_scalerl.controller.run_folder import RunState
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.launch.placement import Devices, Fleet
from megatron_scalerl.processes.signals import SaveAndExit
from megatron_scalerl.types import CompletionLost, Prompt

RECIPE = small_recipe(policy={"path": "p", "dtype": "float32"})
PROMPTS = [Prompt(prompt_id=f"p{i}", text="", answer="", token_ids=(1, 2, 3)) for i in range(6)]


def sampler_of(last=-2.0, wait=None):
    """Three tokens a completion, the second one forced: -9 at the trainer. last: log-prob of the third one."""
    return StandInSampler(
        wait,
        correct=lambda draw: False,
        tokens=lambda draw: (1, 9, 2),
        logprobs=lambda draw, size: (-1.0, 0.0, last),
        mask=(True, False, True),
    )


def fleet_of(engines):
    devices = Devices(unit="device_hours", trainer=1, engine=1)
    return Fleet(trainer=StandInTrainer(), info=None, engines=engines, devices=devices)


def check(*, last=-2.0, version=4):
    fleet, sampler = fleet_of(Membership.of([StandInEngine(version=version)], version=4)), sampler_of(last)
    found = asyncio.run(Probe(RECIPE, sampler, fleet, PROMPTS).check(4))
    assert sampler.limits == {256}, "the trainer waits for the probe"
    return found


def test_equal_logprobs_pass_and_forced_tokens_do_not_count():
    assert check() == {"probe_mismatch_mean": 0.0, "probe_mismatch_max": 0.0}


def test_a_small_difference_is_reported():
    found = check(last=-2.0005)
    assert found["probe_mismatch_max"] == pytest.approx(5e-4)
    assert found["probe_mismatch_mean"] == pytest.approx(2.5e-4)


def test_other_weights_end_the_run():
    expected = (
        r"engine-0 at policy version 4: .* by 0.25 nats on average, and by 0.5 in token 2 of p0 \(id 2: trainer -2, "
        r"engine -2.5\); weights.probe_tolerance allows 0.0005 and 0.01"
    )
    with pytest.raises(ProbeError, match=expected):
        check(last=-2.5)


def test_one_token_far_from_the_trainers_is_not_hidden_by_many_that_are_near():
    near = [Scored("p", place, 7, -1.0, -1.01) for place in range(200)]
    assert judged(near, 0.15) == ""
    assert judged([*near, Scored("p", 200, 7, -1.0, -1.6)], 0.15) == "", "one in hundreds of bf16's tokens is so far"
    assert "by 0.0299 nats on average, and by 4 in token 200" in judged(
        [*near, Scored("p", 200, 7, -1.0, -5.0)], 0.15
    )
    assert "id 9" in judged([*near, Scored("p", 200, 9, float("nan"), -1.0)], 0.15)


def test_another_version_ends_the_run():
    with pytest.raises(ProbeError, match=r"engine-0 .* policy versions \[3\], .* 4$"):
        check(version=3)


async def test_an_engine_that_joins_while_the_trainer_waits_is_probed_once():
    """Before the batch that the trainer waited for is returned; engines that were probed are not probed again."""
    old, new = StandInEngine(version=4), StandInEngine(version=4)
    engines, sampler = Membership(2), sampler_of()
    probe = Probe(RECIPE, sampler, fleet_of(engines), PROMPTS)

    async def catch_up(version):
        for engine in engines.stale:
            engines.serve(engine, version)

    async def batch():
        engines.join(1, new)
        await engines.until(lambda: new in engines.serving)
        return "batch"

    engines.join(0, old)
    engines.serve(old, 4)
    await probe.check(4)
    assert {engine for engine, _ in sampler.asked} == {old}
    sampler.asked.clear()
    loop = SimpleNamespace(
        _fleet=SimpleNamespace(engines=engines),
        _sync=SimpleNamespace(catch_up=catch_up),
        _probe=probe,
        _state=RunState(step=4, batches=4, served=4),
        _recipe=RECIPE,
        _saving=SaveAndExit(),
    )
    assert await Overlap.while_waiting(loop, batch()) == "batch"
    assert {engine for engine, _ in sampler.asked} == {new}
    assert await probe.check(4, new_only=True) == {}


def test_an_engine_that_joins_within_a_phase_gets_no_weights_that_the_others_do_not_have():
    engines, joined = Membership(1), StandInEngine()

    async def batch():
        engines.join(0, joined)
        await passes()
        return "batch"

    loop = SimpleNamespace(
        _fleet=SimpleNamespace(engines=engines), _sync=None, _state=RunState(step=5, batches=5, served=4)
    )
    assert asyncio.run(Overlap.while_waiting(loop, batch())) == "batch"
    assert engines.stale == [joined]


def test_a_server_that_is_started_again_is_new():
    first, second = StandInEngine(version=4), StandInEngine(version=4)
    engines, sampler = Membership.of([first], version=4), sampler_of()
    probe = Probe(RECIPE, sampler, fleet_of(engines), PROMPTS)
    asyncio.run(probe.check(4))
    engines.evict(first, "gone")
    engines.join(0, second)
    engines.serve(second, 4)
    sampler.asked.clear()
    asyncio.run(probe.check(4, new_only=True))
    assert {engine for engine, _ in sampler.asked} == {second}


def test_a_lost_completion_puts_the_probe_off(caplog):
    async def lose(engine, draw, priority):
        if draw.index == 2 and len(losing.asked) <= 4:
            raise CompletionLost("no process left to score it", reason="verifier_lost")

    losing, members = sampler_of(wait=lose), Membership.of([StandInEngine(version=4)], version=4)
    probe = Probe(RECIPE, losing, fleet_of(members), PROMPTS)
    assert asyncio.run(probe.check(4, new_only=True)) == {}
    assert members.serving and "is not probed: a completion is lost" in caplog.text
    assert asyncio.run(probe.check(4, new_only=True)) == {"probe_mismatch_mean": 0.0, "probe_mismatch_max": 0.0}
