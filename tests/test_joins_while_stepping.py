"""An engine that joins while the trainer steps: with a store of weights it serves before the step ends.

In virtual time, with stand-ins for trainer, engines and weight updates; the store itself:
`weights/test_weight_store`, `engine/test_rejoin`, `e2e/test_joins_from_the_store`.
"""

import asyncio
from types import SimpleNamespace

import pytest
from fakes.engine import StandInEngine
from fakes.run import PUBLISH_S, attempt, recipe
from fakes.sync import StandInSync
from fakes.trainer import TRAIN_S
from waiting import passes

from megatron_scalerl.controller.overlap import Overlap
from megatron_scalerl.engine.membership import EngineState
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.trainer.client import TrainerError


def join_at(folder, at_s, monkeypatch, *, store, **changes):
    """A run in which engine 1 joins again then; (outcome, what happened: (what, when, version))."""
    settings = recipe(
        folder, engine={"count": 2}, weights={"probe_every": 0, "store": "/x" if store else ""}, **changes
    )
    happened, publishing = [], StandInSync.update

    def join(engines):
        if engines.members[1].version is None:  # before the first update
            return
        engines.evict(engines.members[1].client, "engine-1: gone")
        engines.lose(1, "gone")
        engines.start(1)
        engines.join(1, StandInEngine("engine-1"))
        happened.append(("joined", at_s, None))

    async def update(self, version, engines):
        found = await publishing(self, version, engines)
        kind = "store" if self._trainer.stepping else "trainer"
        now = asyncio.get_running_loop().time()
        happened.append((kind, now, version))
        assert {m.version for m in self._engines.members if m.state is EngineState.SERVING} <= {version}
        return found

    monkeypatch.setattr(StandInSync, "update", update)
    outcome = attempt(settings, changes=[(at_s, join)])
    monkeypatch.undo()
    return outcome, happened


MOMENTS = [7.1 + 1.9 * i for i in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("store", [True, False])
def test_it_serves_what_the_others_serve_before_the_step_ends(tmp_path, monkeypatch, store):
    from_store, waited = 0, []
    for number, at_s in enumerate(MOMENTS):
        outcome, happened = join_at(tmp_path / str(number), at_s, monkeypatch, store=store)
        assert outcome.reason == "all 6 steps are made" and outcome.trained == [1, 2, 3, 4, 5, 6]
        joined = [i for i, (kind, *_) in enumerate(happened) if kind == "joined"]
        for place in joined:
            kind, when, version = happened[place + 1]
            before = [v for k, _, v in happened[:place] if k != "joined"]
            waited.append(when - at_s)
            if kind == "store":
                from_store += 1
                assert version == before[-1] and when - at_s < 3 * PUBLISH_S  # an update may have to end first
    if store:
        assert from_store >= 2
    else:
        assert from_store == 0 and max(waited) > PUBLISH_S + 0.25 * TRAIN_S


def test_not_in_a_deterministic_run(tmp_path):
    """Whether it joins a round would depend on how long it took to start."""
    settings = recipe(tmp_path, rollouts={"deterministic": True, "max_staleness_steps": 0}, weights={"store": "/x"})
    controller = SimpleNamespace(_recipe=settings)  # without a weight update to ask

    async def step():
        return 3

    assert asyncio.run(Overlap.while_stepping(controller, step())) == 3


def stepping(step, join):
    """`while_stepping` of a step beside an engine that joins."""
    controller = SimpleNamespace(_recipe=Recipe.model_validate(MINIMAL), _join_from_store=join)
    return Overlap.while_stepping(controller, step)


MINIMAL = {"name": "r", "steps": 1, "policy": {"path": "p"}, "prompts": {"path": "q"}}


def test_an_engine_that_is_reading_when_the_step_ends_is_waited_for():
    done, stepped = [], asyncio.Event()

    async def join(reading):
        async with reading:
            await stepped.wait()
            await passes()
            done.append("read")
        await asyncio.Event().wait()

    async def step():
        await passes()
        done.append("step")
        stepped.set()
        return 7

    assert asyncio.run(asyncio.wait_for(stepping(step(), join), 120)) == 7 and done == ["step", "read"]


def test_a_bug_of_the_joining_is_raised_after_the_step_and_a_failed_step_before_it():
    async def join(reading):
        raise KeyError("bug")

    async def step(failure=None):
        await passes()
        if failure:
            raise failure

    with pytest.raises(KeyError, match="bug"):
        asyncio.run(stepping(step(), join))
    with pytest.raises(TrainerError, match="rank 0"):
        asyncio.run(stepping(step(TrainerError("rank 0 exited")), join))


def test_a_cancellation_after_the_step_is_not_lost():
    """The step has ended, the engine reads on, and the run is told to stop."""

    stepped = asyncio.Event()

    async def join(reading):
        async with reading:
            await asyncio.Event().wait()

    async def step():
        await passes()
        stepped.set()

    async def scenario():
        task = asyncio.create_task(stepping(step(), join))
        await stepped.wait()
        await passes()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(scenario(), 120))
