"""rollouts.deterministic in stream and validation: what reaches the engines is the same with and without a restart.

The stand-in engine's answers depend on the requests that it runs together, as real ones do in their last bits.
"""

import asyncio
import hashlib
from collections import Counter

import pytest
from fakes.engine import StandInEngine
from fakes.sampler import StandInSampler
from recipe_files import small_recipe
from streams import prompts
from waiting import passes, until

from megatron_scalerl.controller.measured_prompts import HeldOut, PinnedVersion
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.engine.rounds import Rounds
from megatron_scalerl.evaluation.completing import Completer
from megatron_scalerl.prompts.curriculum import Curriculum
from megatron_scalerl.rollouts.history import BatchRecord, read_groups, read_history, replay_draws
from megatron_scalerl.rollouts.journal import Journal
from megatron_scalerl.rollouts.stream import Admission, RolloutStream

GROUPS, SIZE = 3, 4


class RoundsEngine(StandInEngine):
    """A stand-in whose answers, while it is not paused, depend on all requests that it held when it was resumed."""

    def __init__(self, name, version):
        super().__init__(name, version)
        self.held, self.batches, self.resumed = {}, [], asyncio.Event()

    def abort(self, reason):
        raise AssertionError(f"evicted: {reason}")

    async def pause(self, *, clear_cache):
        assert not self.held, "something else runs on the engine"
        await super().pause(clear_cache=clear_cache)

    async def resume(self):
        await super().resume()
        self.batches.append(tuple(draw for _, draw in sorted(self.held.items())))
        assert len(set(self.held)) == len(self.held)
        self.resumed.set()
        self.resumed = asyncio.Event()


class RoundsSampler(StandInSampler):
    """A stand-in: requests arrive late and out of order, and answers take different times."""

    def __init__(self, stop_after=None):
        super().__init__(self.answer, tokens=lambda draw: (draw.group + 1, draw.index + 1), logprobs=self.bits)
        self.finished, self.stop_after = 0, stop_after
        self.answered, self.together = Counter(), {}
        self.stopped = asyncio.Event()

    async def answer(self, engine, draw, priority):
        await passes(priority * 7 % 5)
        assert engine.paused, "submitted after the round began to run"
        assert priority not in engine.held
        engine.held[priority] = draw
        await engine.resumed.wait()
        self.together[draw] = hashlib.sha256(str(list(map(str, engine.batches[-1]))).encode()).digest()
        await passes(priority * 3 % 7)
        if self.finished == self.stop_after:
            self.stopped.set()
            await asyncio.Event().wait()
        self.finished += 1
        self.answered[draw.group] += 1
        del engine.held[priority]

    def bits(self, draw, size):
        return (-1.0, -self.together[draw][0] / 256 - self.together[draw][1] / 65536)


def recipe(max_in_flight, updates=None):
    schedule = {"max_staleness_steps": 0}
    if updates is not None:
        schedule = {"schedule": "ppo_off_policy", "updates_per_phase": updates}
    rollouts = {"groups_per_batch": GROUPS, "group_size": SIZE, "max_in_flight": max_in_flight, "deterministic": True}
    validation = {"prompts": 5, "generations": 3, "end_generations": 3}
    return small_recipe(seed=1, rollouts=rollouts | schedule, engine={"count": 2}, validation=validation)


PROMPTS = prompts(50)


async def train(folder, versions, *, max_in_flight, stop_after=None, updates=None, prompts=None, finished=0):
    """Batches of one attempt, from its journal on; it stops in the middle of a round after so many completions.

    updates: batches of a phase of ppo_off_policy; None: the pipeline. prompts: how many there are, for one epoch.
    finished: groups that are on the disk when it ends.
    """
    engines = [RoundsEngine("engine-0", versions[0]), RoundsEngine("engine-1", versions[0])]
    members = Membership.of(engines, version=versions[0])
    sampler = RoundsSampler(stop_after)
    history = read_history(folder)
    curriculum = Curriculum(PROMPTS[:prompts], 7, None, prompts and 1)
    replay_draws(curriculum, history)
    journal = Journal(folder, history)
    stream = RolloutStream(
        recipe(max_in_flight, updates),
        curriculum=curriculum,
        engines=members,
        sampler=sampler,
        journal=journal,
        next_group_id=history.admitted,
        rounds=Rounds(members, timeout_s=600),
    )
    ready = read_groups(folder, history, history.unbatched())
    by_id = {p.prompt_id: p for p in PROMPTS}
    unfinished = [
        Admission(group_id=e.group_id, prompt=by_id[e.prompt_id], epoch=e.epoch) for e in history.to_reissue(ready)
    ]
    stream.restore(list(ready.values()), unfinished, len(history.batches))
    stream.start(versions[0])
    batches = []
    try:
        for version in versions:
            batch = asyncio.create_task(stream.next_batch())
            stopped = asyncio.create_task(sampler.stopped.wait())
            await asyncio.wait({batch, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if not batch.done():
                await on_disk(folder, {group for group, draws in sampler.answered.items() if draws == SIZE})
                batch.cancel()
                break
            if batch.result() is None:
                break
            number, ids = len(history.batches) + len(batches), tuple(g.group_id for g in batch.result())
            record = BatchRecord(batch=number, step=number + 1, policy_version=version, group_ids=ids)
            await journal.batch(record)
            batches.append([(g.group_id, g.prompt.prompt_id, g.completions) for g in batch.result()])
            if len(batches) % (updates or 1) == 0:
                for engine in engines:
                    engine.version = version + 1
            await stream.trained(engines[0].version)
        await on_disk(folder, set(range(finished)))
    finally:
        await stream.close()
    return batches, len(ready), engines


async def on_disk(folder, groups):
    await until(lambda: groups <= set(read_history(folder).finished))


@pytest.mark.parametrize(
    "updates, max_in_flight, stop_after",
    [(None, 4, 5), (None, 8, 11), (None, 64, 0), (None, 64, 11), (2, 4, 23), (2, 8, 5), (2, 8, 17), (2, 64, 17)],
)
def test_what_is_interrupted_is_generated_as_without_the_interruption(tmp_path, updates, max_in_flight, stop_after):
    """A round may hold groups of several batches of a phase, so the phase is repeated as a whole."""
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    whole.mkdir()
    interrupted.mkdir()
    batches, options = updates or 1, {"max_in_flight": max_in_flight, "updates": updates}
    expected, _, engines = asyncio.run(train(whole, range(batches + 1), **options))
    assert {len(batch) for engine in engines for batch in engine.batches} <= set(range(0, max_in_flight + 1, 4))
    versions = [{c.first_version for _, _, completions in batch for c in completions} for batch in expected]
    assert versions == [{0}] * batches + [{batches}]
    nothing, _, _ = asyncio.run(train(interrupted, [0], stop_after=stop_after, **options))
    assert nothing == []
    found, ready, _ = asyncio.run(train(interrupted, range(batches), **options))
    assert found == expected[:batches] and ready < batches * GROUPS
    if stop_after == 11:
        assert ready, "something had finished, and is generated once more for the others"


def test_a_last_phase_that_is_repeated_does_not_end_the_run(tmp_path):
    """10 prompts: a phase of two batches, then one of 4 groups, all finished when the attempt ends.

    The next attempt finds no further prompt when it begins the round of the 4, which it repeats before it trains.
    """
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    whole.mkdir()
    interrupted.mkdir()
    options = {"max_in_flight": 64, "updates": 2, "prompts": 10}
    expected, _, _ = asyncio.run(train(whole, range(4), **options))
    assert [[group for group, _, _ in batch] for batch in expected] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    asyncio.run(train(interrupted, range(2), finished=10, **options))
    found, ready, engines = asyncio.run(train(interrupted, [2, 3], **options))
    assert found == expected[2:] and ready == 4
    assert sum(len(batch) for engine in engines for batch in engine.batches) == 4 * SIZE


def test_validation_in_rounds_reaches_the_engines_the_same_way_each_time():
    def validate():
        async def run():
            engines = [RoundsEngine("engine-0", 3), RoundsEngine("engine-1", 3)]
            members = Membership.of(engines, version=3)
            held_out = HeldOut(recipe(4), PROMPTS, RoundsSampler(), metrics=None, progress=None)
            axis = {"compute": 0.0, "compute_total": 0.0, "unit": "device_hours"}
            rounds = Rounds(members, timeout_s=600)
            completer = Completer(members=members, version=3, at_once=4, rounds=rounds)
            result, by_prompt = await held_out.validate(PinnedVersion(step=3, digest="", axis=axis), completer)
            return result, by_prompt, [engine.batches for engine in engines]

        return asyncio.run(run())

    first, second = validate(), validate()
    assert first == second
    assert sum(len(batch) for batches in first[2] for batch in batches) == 5 * 3
    assert max(len(batch) for batches in first[2] for batch in batches) <= 8


@pytest.mark.parametrize("setting", [{"max_staleness_steps": 1}, {"max_staleness_steps": 0, "routing_replay": True}])
def test_deterministic_excludes_what_overlaps(setting):
    """Phases of ppo_off_policy overlap with nothing, however many batches they have."""
    assert recipe(4, updates=8).rollouts.staleness_bound == 7
    with pytest.raises(ValueError, match="deterministic needs max_staleness_steps 0 and routing_replay false"):
        small_recipe(rollouts={"deterministic": True, **setting})
