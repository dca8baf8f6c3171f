"""Rounds: pause, submit, wait until the engines hold everything, resume; and engines that fail in between."""

import asyncio

import pytest
from fakes.engine import StandInEngine
from fakes.run import in_virtual_time
from waiting import passes, until

from megatron_scalerl.engine.membership import EngineState, Membership
from megatron_scalerl.engine.rounds import Rounds


def test_engines_resume_once_they_hold_their_requests_or_have_none():
    engines = [StandInEngine(f"engine-{number}") for number in range(3)]

    async def run():
        together = await Rounds(Membership.of(engines), timeout_s=240).begin()
        assert [e.calls for e in engines] == [["pause"]] * 3
        assert [together.engine(rank) for rank in range(4)] == [*engines, engines[0]]
        going = asyncio.create_task(together.go([engines[0], engines[1], engines[0]]))
        engines[1].held = ["a"]
        await until(lambda: "resume" in engines[1].calls)
        engines[0].held, looks = ["a"], len(engines[0].calls)
        await until(lambda: len(engines[0].calls) > looks + 2)
        assert "resume" not in engines[0].calls, "one of its two requests has not arrived"
        engines[0].held = ["a", "b"]
        await going

    in_virtual_time(run())
    assert engines[0].calls[-1] == engines[2].calls[-1] == "resume"


def test_a_round_waits_for_every_engine_that_is_not_given_up():
    async def run():
        members = Membership(2)
        first, second = StandInEngine("engine-0"), StandInEngine("engine-1")
        members.join(0, first)
        members.serve(first, 3)
        begun = asyncio.create_task(Rounds(members, timeout_s=240).begin())
        await passes()
        assert not begun.done() and not first.calls, "engine-1 is starting"
        members.join(1, second)
        members.serve(second, 3)
        together = await begun
        assert together.engine(1) is second
        members.lose(0, "exit code 1", given_up=True)
        alone = await Rounds(members, timeout_s=240).begin()
        assert alone.engine(0) is alone.engine(1) is second

    in_virtual_time(run())


@pytest.mark.parametrize("fails_in", ["pause", "progress"])
def test_an_engine_that_fails_is_evicted_and_the_others_go_on(fails_in):
    engines = [StandInEngine("engine-0"), StandInEngine("engine-1", fails=fails_in)]
    members = Membership.of(engines)

    async def run():
        together = await Rounds(members, timeout_s=240).begin()
        used = [together.engine(rank) for rank in range(2)]
        engines[0].held = [each for each in used if each is engines[0]]
        await together.go(used)

    in_virtual_time(run())
    assert engines[1].aborted == f"engine-1: {fails_in}: 500"
    assert members.members[1].state is EngineState.DRAINING
    assert engines[0].calls[-1] == "resume"


def test_an_engine_that_does_not_receive_its_requests_is_evicted():
    engine = StandInEngine("engine-0")
    engine.held = ["a"]
    members = Membership.of([engine])

    async def run():
        together = await Rounds(members, timeout_s=0.05).begin()
        await together.go([engine, engine])

    in_virtual_time(run())
    assert engine.aborted == (
        "engine-0: the engine has 1 of 2 requests and has not resumed within 0.05 s of submission (weights.timeout_s)"
    )
    assert "resume" not in engine.calls


@pytest.mark.parametrize("hangs_in", ["pause", "resume"])
def test_an_engine_that_hangs_is_evicted(hangs_in):
    hung, other = StandInEngine("engine-0"), StandInEngine("engine-1")
    members = Membership.of([hung, other])

    async def hang(**_):
        await asyncio.Event().wait()

    setattr(hung, hangs_in, hang)

    async def run():
        rounds = Rounds(members, timeout_s=0.05)
        together = await rounds.begin() if hangs_in == "resume" else None
        if together is not None:
            hung.held = ["a"]
            await together.go([hung])
        else:
            members._supervised = True
            begun = asyncio.create_task(rounds.begin())
            await members.until(lambda: hung not in members.serving)
            begun.cancel()

    in_virtual_time(asyncio.wait_for(run(), 30))
    assert members.members[0].state is EngineState.DRAINING and hung.aborted.endswith("(weights.timeout_s)")
