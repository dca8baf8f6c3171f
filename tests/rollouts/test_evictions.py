"""The stream while engines are killed at random moments and started again, in virtual time.

The stand-in engine takes one second for a token. A completion's length is a function of its draw, as it is with real
engines and the same weights.
"""

import asyncio
import random

import pytest
from fakes.clock import VirtualTimeLoop
from fakes.engine import StandInEngine
from fakes.sampler import StandInSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import make_stream

from megatron_scalerl.engine.answers import EngineLost
from megatron_scalerl.engine.membership import EngineState, Membership
from megatron_scalerl.rollouts.history import Admit, Finish, read_history

G, SIZE = 3, 4


@pytest.fixture(autouse=True, scope="module")
def stand_in_disk():
    """Its syncs return at once: thousands of groups are finished here, and none of it is read after a crash."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.fsync", lambda handle: None)
        yield


def sampler_of():
    """One second per token; long completions are wrong."""
    lengths = {}

    async def wait(engine, draw, priority):
        lengths[draw] = 1 + int(random.Random(str(draw)).expovariate(1 / 20))
        try:
            async with asyncio.timeout(lengths[draw]):
                await engine.gone.wait()
            raise EngineLost(f"{engine.name}: {engine.aborted}")
        except TimeoutError:
            pass

    return StandInSampler(wait, correct=lambda draw: lengths[draw] < 20, tokens=lambda draw: (5,) * lengths[draw])


async def supervise(members, engines, kills, restart_s, loop):
    """Evict the named engine at each moment, and start it again after `restart_s`: it is stale then."""
    restarts = []

    async def restart(index):
        members.lose(index, "killed")
        await asyncio.sleep(restart_s)
        members.start(index)
        engines[index] = StandInEngine(f"engine-{index}", -1)
        members.join(index, engines[index])

    for at_s, index in kills:
        await asyncio.sleep(max(0.0, at_s - loop.time()))
        if members.members[index].state in (EngineState.SERVING, EngineState.STALE):
            members.evict(engines[index], "killed")
            restarts.append(asyncio.create_task(restart(index)))
    await asyncio.gather(*restarts)


async def batches_of(folder, loop, *, k, batches, kills, engines=2, restart_s=7.0, phases=False):
    """The groups of each batch, with the staleness bound checked; one step takes 10 s. phases: of k + 1 batches."""
    made = [StandInEngine(f"engine-{i}") for i in range(engines)]
    members = Membership.of(made)
    rollouts = {"max_in_flight": 16}
    if phases:
        rollouts |= {"schedule": "ppo_off_policy", "updates_per_phase": k + 1}
    served, sampler = 0, sampler_of()
    stream = make_stream(folder, k=k, engines=members, count=2000, sampler=sampler, rollouts=rollouts)
    supervisor = asyncio.create_task(supervise(members, made, kills, restart_s, loop))
    found = []

    def catch_up(version):
        for engine in members.alive:
            engine.version = version
            members.serve(engine, version)

    stream.start(0)
    for version in range(batches):
        waiting = asyncio.create_task(stream.next_batch())
        while not waiting.done():
            joined = asyncio.create_task(members.until(lambda: bool(members.stale)))
            await asyncio.wait({waiting, joined}, return_when=asyncio.FIRST_COMPLETED)
            joined.cancel()
            catch_up(served)
        groups = await waiting
        assert all(0 <= version - g.first_token_version <= k for g in groups)
        assert stream.in_flight + stream.ready <= (k + 1) * G
        found.append(groups)
        await asyncio.sleep(10)
        if not phases or (version + 1) % (k + 1) == 0:
            served = version + 1
            catch_up(served)
        await stream.trained(served)
    supervisor.cancel()
    await asyncio.gather(supervisor, return_exceptions=True)
    await stream.close()
    return found, stream, [[draw for at, draw in sampler.asked if at is engine] for engine in made]


def run(folder, **options):
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(batches_of(folder, loop, **options))
    finally:
        loop.close()


def facts(batches):
    """Group -> length and reward of each of its completions."""
    groups = [group for batch in batches for group in batch]
    return {g.group_id: [(c.tokens, s.reward) for c, s in zip(g.completions, g.scores, strict=True)] for g in groups}


@pytest.mark.slow
@given(
    k=st.sampled_from([0, 1, 3, 8]),
    kills=st.lists(st.tuples(st.floats(0, 400), st.integers(0, 1)), max_size=30).map(sorted),
    phases=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_kills_at_any_moment_keep_the_bound_and_lose_repeat_and_change_nothing(tmp_path_factory, k, kills, phases):
    """Each group has the lengths and rewards that it has without kills: the distribution cannot favor short ones."""
    folder = tmp_path_factory.mktemp("run")
    batches, _, _ = run(folder, k=k, batches=12, kills=kills, phases=phases)
    whole, _, _ = run(tmp_path_factory.mktemp("run"), k=k, batches=12, kills=[], phases=phases)
    found, expected = facts(batches), facts(whole)
    assert len(found) == 12 * G and all(len(completions) == SIZE for completions in found.values())
    assert all(found[group] == expected[group] for group in found.keys() & expected.keys())
    history = read_history(folder)
    admitted = [e.group_id for e in history.events if isinstance(e, Admit)]
    finished = [e.group_id for e in history.events if isinstance(e, Finish)]
    assert admitted == sorted(set(admitted)), "a group that is issued again keeps its id and its one admission"
    assert len(set(finished)) == len(finished) and set(found) <= set(finished)
    if phases:
        assert list(found) == list(range(12 * G)), "the same groups in the same batches"
        for version, groups in enumerate(batches):
            start = version - version % (k + 1)
            assert {v for g in groups for c in g.completions for v in (c.first_version, c.last_version)} == {start}


def test_a_group_stays_on_one_engine_and_keeps_what_had_finished(tmp_path):
    """Only missing completions are generated again, and the deadline stays that of the kept ones."""
    batches, stream, drawn = run(tmp_path, k=2, batches=6, kills=[(15.0, 0)], restart_s=10_000.0)
    assert stream.reissued_groups > 0
    ended = {draw.group for draw in drawn[0]} & {draw.group for draw in drawn[1]}
    assert len(ended) == stream.reissued_groups
    again = [draw for draw in drawn[1] if draw.group in ended]
    assert 0 < len(again) < SIZE * len(ended), "only what was missing"
    groups = {g.group_id: g for groups in batches for g in groups}
    kept = [g for g in groups.values() if 0 < sum(draw.group == g.group_id for draw in again) < SIZE]
    assert kept and all(g.first_token_version == 0 for g in kept), "the deadline is that of the kept completions"


def test_an_evicted_engine_gets_nothing_until_it_serves_again():
    async def scenario():
        first, second = StandInEngine("engine-0"), StandInEngine("engine-1")
        members = Membership.of([first, second])
        epoch = members.epoch
        first.produced_tokens, first.received_tokens = 70, 30
        members.evict(first, "engine-0: no answer\nwith a second line")
        members.evict(first, "again")
        assert members.epoch == epoch + 1 and first.aborted
        assert members.serving == members.alive == [second]
        assert await members.evicted(first) == "engine-0: no answer"
        assert members.members[0].lost_tokens == 40
        members.serve(first, 3)
        assert members.serving == [second], "an update that ends after the eviction does not bring it back"
        members.lose(0, "killed")
        members.start(0)
        again = StandInEngine()
        members.join(0, again)
        assert members.stale == [again] and members.serving == [second] and members.members[0].restarts == 1
        members.serve(again, 3)
        assert members.serving == [again, second] and members.members[0].version == 3

    asyncio.run(scenario())
