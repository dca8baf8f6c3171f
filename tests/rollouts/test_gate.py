"""The staleness gate under random durations: never older than k, never stuck, nothing dropped."""

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_scalerl.rollouts.gate import StalenessGate


def simulate(k, groups_per_batch, slots, durations, step_times, steps, empty_steps, late_first_token):
    """A discrete-event run: engine with `slots` groups at a time, trainer that waits for the gate."""
    gate = StalenessGate(groups_per_batch=groups_per_batch, max_staleness_steps=k)
    now, version, next_id, batches = 0.0, 0, 0, 0
    running: list[tuple[float, int, int]] = []
    first_version: dict[int, int] = {}
    trained_at: dict[int, int] = {}
    step_ends: float | None = None
    while batches < steps:
        while gate.may_start() and len(running) < slots:
            gate.start(next_id, version)
            heapq.heappush(running, (now + durations(next_id), next_id, version))
            next_id += 1
        assert gate.outstanding <= (k + 1) * groups_per_batch
        if step_ends is not None and now >= step_ends:
            version += not empty_steps(batches)
            gate.trained()
            step_ends = None
            batches += 1
            continue
        chosen = gate.batch(version) if step_ends is None else None
        if chosen is not None:
            gate.take(chosen)
            for group in chosen:
                assert version - first_version[group] <= k, "a group trained older than k"
                trained_at[group] = version
            step_ends = now + step_times(batches)
        events = [running[0][0]] if running else []
        if step_ends is not None:
            events.append(step_ends)
        assert events, "stuck: nothing is running and no batch may train"
        now = min(events)
        while running and running[0][0] <= now:
            _, group, started = heapq.heappop(running)
            first_version[group] = version if late_first_token(group) else started
            gate.finish(group, first_version[group])
    return trained_at, version


@settings(max_examples=300, deadline=None)
@given(
    k=st.integers(0, 9),
    groups_per_batch=st.integers(1, 5),
    slots=st.integers(1, 40),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    trainer=st.sampled_from([0.0, 0.3, 3.0]),
    seed=st.integers(0, 2**20),
)
def test_never_older_than_k_and_never_stuck(k, groups_per_batch, slots, spread, trainer, seed):
    def draw(name, n):
        return random.Random(f"{seed}{name}{n}").random()

    trained, version = simulate(
        k,
        groups_per_batch,
        slots,
        durations=lambda g: 0.1 + spread * draw("d", g) ** 4,
        step_times=lambda b: trainer * draw("t", b),
        steps=40,
        empty_steps=lambda b: draw("e", b) < 0.1,
        late_first_token=lambda g: draw("l", g) < 0.3,
    )
    assert len(trained) == 40 * groups_per_batch
    assert version <= 40


def test_waiting_only_for_the_deadline_itself_would_break_the_bound():
    """Three slow groups share one deadline; a quick younger one may not jump the queue twice."""
    gate = StalenessGate(groups_per_batch=1, max_staleness_steps=2)
    for group in (0, 1, 2):
        gate.start(group, 0)
    gate.finish(0, 0)
    assert gate.batch(0) == (0,)
    gate.take((0,))
    gate.trained()
    gate.start(3, 1)
    gate.finish(3, 1)
    assert gate.batch(1) is None, "groups 1 and 2 both have deadline 2: one of them must train now"
    gate.finish(1, 0)
    assert gate.batch(1) == (1,)


def test_k_zero_is_synchronous():
    gate = StalenessGate(groups_per_batch=2, max_staleness_steps=0)
    gate.start(0, 0)
    gate.start(1, 0)
    assert not gate.may_start()
    gate.finish(1, 0)
    assert gate.batch(0) is None
    gate.finish(0, 0)
    assert gate.batch(0) == (0, 1)
    gate.take((0, 1))
    assert not gate.may_start(), "the old version is still served"
    gate.trained()
    assert gate.may_start()


def test_admission_stops_at_k_plus_one_batches():
    gate = StalenessGate(groups_per_batch=3, max_staleness_steps=2)
    for group in range(9):
        gate.start(group, 0)
    assert not gate.may_start()
    with pytest.raises(AssertionError):
        gate.start(9, 0)


def test_earliest_deadline_first():
    gate = StalenessGate(groups_per_batch=1, max_staleness_steps=4)
    gate.start(0, 1)
    gate.start(1, 1)
    gate.finish(0, 3)
    gate.finish(1, 2)
    assert gate.batch(3) == (1,)


def test_counts_of_groups_on_their_way():
    gate = StalenessGate(groups_per_batch=2, max_staleness_steps=1)
    for group in range(3):
        gate.start(group, 0)
    gate.finish(1, 0)
    gate.finish(0, 0)
    assert (gate.in_flight, gate.ready, gate.outstanding) == (1, 2, 3)
    gate.take((0, 1))
    assert (gate.in_flight, gate.ready, gate.outstanding) == (1, 0, 3), "what trains is still outstanding"
    gate.trained()
    assert gate.outstanding == 1


def test_an_abandoned_group_holds_up_no_batch_and_may_start_again():
    gate = StalenessGate(groups_per_batch=1, max_staleness_steps=1)
    gate.start(0, 0)
    gate.start(1, 0)
    gate.finish(1, 0)
    assert gate.batch(1) is None, "group 0 is due now as well"
    gate.abandon(0)
    assert gate.batch(1) == (1,) and gate.in_flight == 0
    gate.start(0, 1)
    assert gate.batch(1) == (1,), "its deadline is version 2 now"


@pytest.mark.parametrize("restored", [True, False], ids=["restored", "started and finished"])
def test_a_group_that_may_wait_for_the_next_version_holds_up_nothing(restored):
    """k = 1: two groups of version 1 are due at version 2; at version 1 one may wait, at version 2 none."""
    gate = StalenessGate(groups_per_batch=1, max_staleness_steps=1)
    for group in (0, 1):
        if restored:
            gate.restore(group, 1)
        else:
            gate.start(group, 1)
    if not restored:
        assert gate.batch(1) is None, "nothing is ready"
        gate.finish(0, 1)
    assert gate.batch(1) == (0,)
    assert gate.batch(2) is None


def test_one_batch_trains_at_a_time():
    gate = StalenessGate(groups_per_batch=1, max_staleness_steps=1)
    for group in (0, 1):
        gate.restore(group, 0)
    gate.take((0,))
    with pytest.raises(AssertionError, match="one batch trains at a time"):
        gate.take((1,))


def test_a_group_in_flight_or_ready_is_not_started_again():
    gate = StalenessGate(groups_per_batch=2, max_staleness_steps=1)
    gate.start(0, 0)
    with pytest.raises(AssertionError):
        gate.start(0, 0)
    gate.finish(0, 0)
    with pytest.raises(AssertionError):
        gate.start(0, 0)


def test_a_first_token_from_before_the_admission_is_refused():
    gate = StalenessGate(groups_per_batch=2, max_staleness_steps=1)
    gate.start(7, 3)
    with pytest.raises(AssertionError, match="group 7: first token older than its admission"):
        gate.finish(7, 2)


def test_nothing_starts_above_the_bound_either():
    """A journal may hold more finished groups than a smaller batch or staleness of the resumed run admits."""
    gate = StalenessGate(groups_per_batch=2, max_staleness_steps=0)
    for group in range(3):
        gate.restore(group, 0)
    assert not gate.may_start()


@pytest.mark.parametrize(("groups_per_batch", "k"), [(0, 0), (0, -1), (1, -1)])
def test_a_gate_without_a_batch_or_with_a_negative_bound_is_refused(groups_per_batch, k):
    with pytest.raises(AssertionError):
        StalenessGate(groups_per_batch=groups_per_batch, max_staleness_steps=k)
