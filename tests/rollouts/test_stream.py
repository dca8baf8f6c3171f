"""The rollout stream with a stand-in engine of drawn durations, in virtual time: order, bounds, failures, restart."""

import asyncio
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from fakes.engine import StandInEngine
from fakes.run import in_virtual_time
from fakes.sampler import StandInSampler
from streams import make_stream, prompts
from waiting import passes

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.prompts.curriculum import Curriculum
from megatron_scalerl.rollouts.history import Admit, read_groups, read_history, replay_draws
from megatron_scalerl.types import CompletionLost


def sampler_of(*, seed=0, slowest_s=0.01, fail_at=None, lost=lambda draw: False):
    """Each completion takes a drawn time; the first one that fails is number `fail_at`."""
    durations, running = random.Random(seed), Counter()

    async def wait(engine, draw, priority):
        if len(made.asked) == fail_at:
            raise RuntimeError("rewards.verifier: no process left")
        if lost(draw):
            raise CompletionLost("no log-probabilities", reason="no_logprobs")
        running[engine] += 1
        made.most = max(made.most, running[engine])
        await asyncio.sleep(slowest_s * durations.random() ** 3)
        running[engine] -= 1

    made = StandInSampler(wait)
    made.most = 0
    return made


async def step(seconds):
    """A stand-in for a step, and for any other time that passes."""
    await asyncio.sleep(seconds)


def batches(tmp_path, *, version=0, most=1, moves=False, engines=None, k=2, **settings):
    """(batches until there are none, the stream). moves: whether the one engine has a new version after each."""
    engines = engines or [StandInEngine(version=version)]

    async def run():
        stream = make_stream(tmp_path, k=k, engines=engines, **{"sampler": sampler_of()} | settings)
        stream.start(version)
        found = []
        try:
            while len(found) < most and (groups := await stream.next_batch()):
                found.append(groups)
                if moves:
                    engines[0].version += 1
                await stream.trained(version + moves * len(found))
        finally:
            await stream.close()
        return found, stream

    return in_virtual_time(run())


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_batches_taken_ahead_keep_the_bound_and_an_attempt_that_is_given_up_loses_nothing(tmp_path, k):
    """The steps end at random moments: attempts are given up while they wait, and when they could just take."""
    engines, sampler, source = [StandInEngine(), StandInEngine()], sampler_of(), random.Random(k)

    async def run():
        stream = make_stream(tmp_path, k=k, engines=engines, sampler=sampler)
        stream.start(0)
        seen, ahead, taken_ahead = [], None, 0
        for version in range(40):
            groups = ahead or await stream.next_batch()
            assert len(groups) == 3
            assert all(version - g.first_token_version <= k for g in groups)
            seen += [g.group_id for g in groups]
            taking = asyncio.create_task(stream.next_batch_ahead())
            await passes(source.randrange(12))
            await step(0.004 * source.randrange(2))
            ahead = taking.result() if taking.done() else None
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            taken_ahead += ahead is not None
            assert stream.in_flight + stream.ready <= (k + 1) * 3 - 3 * (1 + (ahead is not None))
            for engine in engines:
                engine.version = version + 1
            await stream.trained(version + 1)
        left = [g.group_id for g in ahead or ()] + list(stream._ready)
        await stream.close()
        return seen, left, taken_ahead

    seen, left, taken_ahead = in_virtual_time(run())
    assert len(seen) == len(set(seen)) == 120 and sampler.most <= 8
    history = read_history(tmp_path)
    assert sorted(seen + left) == sorted(history.finished)
    assert (taken_ahead > 0) == (k > 0)


def test_the_tokens_that_are_counted_are_those_of_the_policy(tmp_path):
    mask, counted = (True, False, False, True), []
    sampler = StandInSampler(tokens=lambda draw: (5, 6, 7, 8), mask=mask, environment=((1, 2),))
    [groups], _ = batches(tmp_path, k=0, sampler=sampler, count_tokens=counted.append)
    assert counted == [3] * 12 and [g.positions for g in groups] == [(0, 1, 2, 3)] * 3
    assert {c.environment_tokens for g in groups for c in g.completions} == {1}


def test_only_engines_that_serve_are_idle(tmp_path):
    engines = Membership(1)

    def joined(engine):
        engines.join(0, engine)
        engines.serve(engine, 0)

    async def run():
        first = StandInEngine()
        joined(first)
        stream = make_stream(tmp_path, k=0, engines=engines, sampler=sampler_of())
        stream.start(0)
        await stream.next_batch()
        found = []
        for change in (lambda: None, lambda: engines.evict(first, "gone"), lambda: joined(StandInEngine())):
            change()
            await passes()
            stream.take_idle_seconds()
            await passes()
            found.append(stream.take_idle_seconds() > 0)
        await stream.close()
        return found

    assert in_virtual_time(run()) == [True, False, True]


def test_a_failing_verifier_ends_the_stream_with_its_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"rewards.verifier: no process left"):
        batches(tmp_path, sampler=sampler_of(fail_at=9), most=5, moves=True)


@pytest.mark.parametrize("ahead, accepted", [(1, True), (2, False), (999999, False)])
def test_an_engine_with_an_unpublished_version_is_evicted(tmp_path, ahead, accepted):
    members = Membership.of([StandInEngine(version=3 + ahead), StandInEngine(version=3)])
    found, _ = batches(tmp_path, engines=members, version=3, most=3)
    member = members.members[0]
    newest = max(c.last_version for groups in found for g in groups for c in g.completions)
    if accepted:  # its weight update is in progress
        assert member.state == "serving" and newest <= 4
        return
    assert member.state == "draining" and newest == 3
    assert re.match(rf"engine-0: .* policy version {3 + ahead}, .* 4 ", member.reason)


def test_an_engine_with_an_old_version_is_evicted(tmp_path):
    members = Membership.of([StandInEngine(version=2), StandInEngine(version=3)])
    [groups], _ = batches(tmp_path, engines=members, version=3)
    assert members.members[0].state == "draining"
    assert re.match("engine-0: .* policy version 2, .* version 3 when the request", members.members[0].reason)
    assert {v for g in groups for c in g.completions for v in (c.first_version, c.last_version)} == {3}


def test_an_exhausted_curriculum_ends_the_stream_with_its_reason(tmp_path):
    found, stream = batches(tmp_path, count=7, max_epochs=1, most=9, moves=True)
    assert list(map(len, found)) == [3, 3] and stream.exhausted == "curriculum.max_epochs 1 reached"


def test_a_group_whose_draws_are_always_lost_gets_others(tmp_path):
    losses = sampler_of(lost=lambda draw: draw.group == 1 and draw.index < 8)  # of its first two rounds
    [batch], _ = batches(tmp_path, k=0, sampler=losses)  # the batch has all groups
    groups = {g.group_id: g for g in batch}
    assert len(groups[1].completions) == 4 and groups[1].lost_completions == 0


def test_the_reasons_of_lost_completions_outlive_an_eviction_and_a_restart(tmp_path):
    """The first is lost before the engine of its group is evicted, the second on the other engine."""
    evicted = []

    async def wait(engine, draw, priority):
        if draw.group == 0 and draw.index == 0:
            raise CompletionLost("no log-probabilities", reason="no_logprobs")
        if draw.group == 0 and draw.index == 1:
            if evicted:
                raise CompletionLost("the environment hangs", reason="environment_hung")
            await passes(5)
            evicted.append(engine)
            raise EngineError(f"{engine.name}: gone")

    sampler = StandInSampler(wait)
    [batch], _ = batches(tmp_path, k=0, engines=[StandInEngine(), StandInEngine("engine-1")], sampler=sampler)
    group, *others = sorted(batch, key=lambda group: group.group_id)
    assert group.lost_reasons == {"no_logprobs": 1, "environment_hung": 1}
    assert (group.lost_completions, len(group.completions), len(evicted)) == (2, 2, 1)
    assert Counter(draw.index for _, draw in sampler.asked if draw.group == 0) == {0: 1, 1: 2, 2: 1, 3: 1}
    assert [other.lost_reasons for other in others] == [{}, {}]
    assert read_groups(tmp_path, read_history(tmp_path), [0]) == {0: group}


class ChangingSampler(StandInSampler):
    """The prompts of some draws have other tokens, as where a reset says something else."""

    def __init__(self, changed):
        super().__init__()
        self.changed = changed

    async def complete(self, engine, prompt, draw, **options):
        result = await super().complete(engine, prompt, draw, **options)
        if draw.index not in self.changed:
            return result
        return replace(result, prompt=replace(prompt, token_ids=(1, 2 + draw.index)))


def test_an_episode_that_began_with_other_messages_is_lost(tmp_path):
    [groups], _ = batches(tmp_path, k=0, sampler=ChangingSampler({2}))
    for group in groups:
        assert group.prompt.token_ids == (1,) and len(group.completions) == 3
        assert (group.lost_completions, group.lost_reasons) == (1, {"prompt_changed": 1})


def test_messages_that_differ_in_half_of_a_group_end_the_run(tmp_path):
    with pytest.raises(RuntimeError, match="messages depend on the row alone"):
        batches(tmp_path, k=0, sampler=ChangingSampler({2, 3}))


def test_a_prompt_whose_problem_appears_later_is_left_out(tmp_path):
    """Its problem was asked for once, when all was well; then a whole group is lost."""
    sampler = sampler_of(lost=lambda draw: draw.group == 0)
    sampler.unusable.add(Curriculum(prompts(500), 7, None, None).draw()[0].prompt_id)
    [groups], _ = batches(tmp_path, k=0, sampler=sampler, problems={f"p{i:03d}": "" for i in range(500)})
    assert [group.group_id for group in groups] == [1, 2, 3]


@pytest.mark.parametrize("rollouts", [{}, {"schedule": "ppo_off_policy", "updates_per_phase": 2}])
def test_a_prompt_that_cannot_be_learned_from_leaves_no_group_and_is_not_drawn_again(tmp_path, rollouts):
    problems = {"p001": "known before", "p002": None, "p003": None}
    sampler = sampler_of()
    sampler.unusable = {"p002"}
    options = {"rollouts": rollouts, "problems": problems, "sampler": sampler}
    found, _ = batches(tmp_path, k=1, count=6, max_epochs=3, most=9, moves=True, **options)
    assert Counter(group.prompt.prompt_id for groups in found for group in groups) == {
        f"p{i:03d}": 3 for i in (0, 3, 4, 5)
    }
    assert problems == {"p001": "known before", "p002": sampler.problem, "p003": ""}
    admitted = {e.group_id: e.prompt_id for e in read_history(tmp_path).events if isinstance(e, Admit)}
    assert Counter(admitted.values()) == {f"p{i:03d}": 3 for i in range(6)}
    asked = Counter(admitted[draw.group] for _, draw in sampler.asked)
    assert asked == {"p002": 4} | {f"p{i:03d}": 12 for i in (0, 3, 4, 5)}
    replay_draws(Curriculum(prompts(6), 7, None, 3), read_history(tmp_path))  # whatever is known then


def test_a_stream_of_prompts_that_cannot_be_learned_from_fails(tmp_path):
    with pytest.raises(RuntimeError, match="the last 1000 drawn prompts"):
        batches(tmp_path, count=4, problems={f"p{i:03d}": "its tests pay all" for i in range(4)})
