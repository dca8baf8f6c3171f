"""The gates of both schedules under random durations: never older than k, never stuck, nothing dropped."""

import heapq
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_scalerl.rollouts.gate import PhaseGate, StalenessGate


class Simulation(SimpleNamespace):
    """A discrete-event run: engine with `slots` groups at a time, trainer that waits for the gate.

    chance: (name, number) -> uniform in [0, 1), always the same one. At a share `looks` of the events of a step the
    trainer takes a batch ahead if there is one; after a share `kills` of all events the run is killed. Then finished
    groups come back from the journal, as do those of a batch taken ahead, and the batch in training is trained again.
    losses: share of the groups that are abandoned at their first end and started again. phases: of k + 1 batches.
    """

    looks = kills = losses = now = 0.0
    phases = False
    version = batches = events = served = started = taken_ahead = 0
    step_ends, ahead = None, ()

    def __init__(self, **options):
        super().__init__(**options, lost=set(), running=[], reissue=[], first_version={}, ready=set(), trained=[])
        self.gate = self.new_gate()

    def new_gate(self):
        if self.phases:
            return PhaseGate(groups_per_batch=self.groups_per_batch, updates_per_phase=self.k + 1)
        return StalenessGate(groups_per_batch=self.groups_per_batch, max_staleness_steps=self.k)

    def run(self, batches):
        while self.batches < batches:
            self.events += 1
            self.start_groups()
            if self.step_ends is not None and self.now >= self.step_ends:
                self.end_step()
                continue
            self.take()
            if self.chance("kill", self.events) < self.kills:
                self.kill()
                continue
            self.advance()
        return self

    def start_groups(self):
        while self.gate.may_start() and len(self.running) < self.slots:
            if self.reissue:
                group = self.reissue.pop(0)
            else:
                group, self.started = self.started, self.started + 1
            assert not self.phases or self.batches % (self.k + 1) == 0, "a group started while a phase was trained on"
            self.gate.start(group, self.served)
            seconds = 0.1 + self.spread * self.chance("duration", group) ** 4
            heapq.heappush(self.running, (self.now + seconds, group, self.served))
        assert self.gate.outstanding <= (self.k + 1) * self.groups_per_batch

    def take(self):
        if self.step_ends is None:
            self.train(self.gate.batch(self.version), taken=False)
        elif not self.ahead and self.chance("look", self.events) < self.looks:
            chosen = self.gate.batch(self.version + 1)
            if chosen is not None:
                self.gate.take(chosen)
                self.ready -= set(chosen)
                self.ahead = chosen
                self.taken_ahead += 1

    def train(self, chosen, taken):
        if chosen is None:
            return
        if not taken:
            self.gate.take(chosen)
            self.ready -= set(chosen)
        for group in chosen:
            assert self.version - self.first_version[group] <= self.k, "a group trained older than k"
        if self.phases:
            first = self.batches * self.groups_per_batch
            assert chosen == tuple(range(first, first + self.groups_per_batch)), "another composition"
            assert not self.running, "a batch was released while its phase was generated"
        self.trained += chosen
        self.step_ends = self.now + self.trainer * self.chance("step", self.batches)

    def end_step(self):
        self.version += self.chance("empty", self.batches) >= 0.1
        self.batches += 1
        if not self.phases or self.batches % (self.k + 1) == 0:
            self.served = self.version
        self.gate.trained()
        self.step_ends = None
        if self.ahead:
            chosen, self.ahead = self.ahead, ()
            self.train(chosen, taken=True)

    def kill(self):
        if self.step_ends is not None:
            self.version += self.chance("empty", self.batches) >= 0.1
            self.batches += 1
        self.served = self.version  # a new attempt begins with a weight update
        self.gate = self.new_gate()
        self.gate.resume(self.batches)
        self.ready |= set(self.ahead)
        for group in self.ready:
            self.gate.restore(group, self.first_version[group])
        self.reissue += sorted(group for _, group, _ in self.running)
        self.running, self.step_ends, self.ahead = [], None, ()

    def advance(self):
        events = [self.running[0][0]] if self.running else []
        if self.step_ends is not None:
            events.append(self.step_ends)
        assert events, "stuck: nothing is running and no batch may train"
        self.now = max(self.now, min(events))
        while self.running and self.running[0][0] <= self.now:
            _, group, started = heapq.heappop(self.running)
            if group not in self.lost and self.chance("lost", group) < self.losses:
                self.lost.add(group)
                self.gate.abandon(group)
                self.reissue.append(group)
                continue
            self.first_version[group] = self.served if self.chance("late", group) < 0.3 else started
            self.gate.finish(group, self.first_version[group])
            self.ready.add(group)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    options=st.fixed_dictionaries(
        {
            "k": st.sampled_from([0, 1, 2, 3, 8]),
            "groups_per_batch": st.integers(1, 5),
            "slots": st.integers(1, 40),
            "spread": st.sampled_from([0.0, 1.0, 30.0]),
            "trainer": st.sampled_from([0.0, 0.3, 3.0, 30.0]),
            "looks": st.sampled_from([0.0, 0.3, 1.0]),
            "kills": st.sampled_from([0.0, 0.02]),
            "losses": st.sampled_from([0.0, 0.2]),
            "phases": st.booleans(),
        }
    ),
    seed=st.integers(0, 2**20),
)
def test_never_older_than_k_never_stuck_and_nothing_lost(options, seed):
    def chance(name, number):
        return random.Random(f"{seed}{name}{number}").random()

    run = Simulation(chance=chance, **options).run(40)
    assert run.version <= 40
    trained = set(run.trained)
    assert len(trained) == len(run.trained) >= 40 * run.groups_per_batch, "each once"
    left = {group for _, group, _ in run.running} | set(run.reissue) | run.ready | set(run.ahead)
    assert trained | left == set(range(run.started)) and not trained & left
    assert run.k > 0 or run.taken_ahead == 0


def test_a_batch_taken_ahead_is_outstanding_and_no_third_one_is_taken():
    """k = 1: a group that started at version 0 beside both batches would be due at version 1, when one trains."""
    gate = StalenessGate(groups_per_batch=1, max_staleness_steps=1)
    for group in (0, 1):
        gate.start(group, 0)
        gate.finish(group, 0)
    gate.take(gate.batch(0))
    assert gate.batch(1) == (1,)
    gate.take((1,))
    assert (gate.ready, gate.outstanding, gate.may_start()) == (0, 2, False)
    gate.trained()
    assert gate.outstanding == 1
    gate.start(2, 1)
    gate.finish(2, 1)
    gate.take(gate.batch(2))
    gate.restore(3, 2)
    with pytest.raises(AssertionError, match="one batch trains and one is taken ahead"):
        gate.take((3,))
    gate.trained()
    gate.trained()
    assert gate.outstanding == 1


def test_a_batch_is_taken_ahead_only_if_the_others_can_wait_for_the_version_after_it():
    """k = 2: beside the batch of version 0, four groups are due at version 2, one batch of which trains at 1."""
    gate = StalenessGate(groups_per_batch=2, max_staleness_steps=2)
    for group in range(6):
        gate.start(group, 0)
    for group in (0, 1):
        gate.finish(group, 0)
    gate.take(gate.batch(0))
    for group in (2, 3):
        gate.finish(group, 1)
    assert gate.batch(1) == (2, 3), "4 and 5 train at version 2"
    gate.abandon(5)
    gate.start(5, 0)
    assert gate.batch(1) == (2, 3)
    gate.finish(4, 0)
    assert gate.batch(1) == (4, 2)
    assert gate.batch(2) is None, "5 is due at version 2"


def test_where_the_prompts_end_the_phase_has_the_groups_that_it_has():
    gate = PhaseGate(groups_per_batch=2, updates_per_phase=3)
    for group in range(5):
        gate.start(group, 0)
    for group in reversed(range(5)):
        gate.finish(group, 0)
    assert gate.batch(0) is None
    gate.exhaust()
    gate.take(gate.batch(0))
    gate.trained()
    assert gate.batch(1) == (2, 3)
    gate.take((2, 3))
    gate.trained()
    assert gate.batch(2) is None and gate.ready == 1, "one group does not fill a batch"


def test_a_last_phase_waits_for_an_abandoned_group_too():
    gate = PhaseGate(groups_per_batch=1, updates_per_phase=3)
    gate.start(0, 0)
    gate.start(1, 0)
    gate.finish(1, 0)
    gate.exhaust()
    gate.abandon(0)
    assert gate.batch(0) is None
    gate.start(0, 0)
    gate.finish(0, 0)
    assert gate.batch(0) == (0,)


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
    with pytest.raises(AssertionError, match="group 7: the first token is older than its start"):
        gate.finish(7, 2)


def test_nothing_starts_above_the_bound_either():
    """A journal may hold more finished groups than a smaller batch or staleness of the resumed run admits."""
    gate = StalenessGate(groups_per_batch=2, max_staleness_steps=0)
    for group in range(3):
        gate.restore(group, 0)
    assert not gate.may_start()
