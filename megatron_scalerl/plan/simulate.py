"""Discrete-event simulation of a run's timing: the queue between engines and trainer under the recipe's schedule.

An event is the end of a completion, of an episode's wait, or of a trainer step. Engines decode at the speed of
`engine.Decoding`, and pause during weight updates. As in `rollouts.stream`, whole groups go to the least loaded
engine with room for the group. As in a real run, `rollouts.gate` decides when a group may start and when the trainer
gets a batch.

An episode waits for all replies of its environment together, after the last token. So the episode occupies a slot and
a KV cache as long as if the waits were between turns.
"""

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from megatron_scalerl.plan.engine import Decoding
from megatron_scalerl.plan.work import Lengths
from megatron_scalerl.recipe.sections import RolloutsSection
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.gate import gate_of


@record
class QueueSettings:
    """The run to simulate: its schedule, engines, speeds, and number of steps."""

    rollouts: RolloutsSection
    engines: int
    decoding: Decoding
    lengths: Lengths
    train_seconds: float
    """Seconds of a step on a batch of mean size. The time of a batch is proportional to the batch's tokens."""
    publish_seconds: float
    """Seconds for which a weight update pauses the engines."""
    other_seconds: float = 0.0
    """Seconds between two trainer steps, while engines run."""
    steps: int
    """Number of simulated steps, warm-up included: whole phases, if the schedule has phases of several steps."""
    warm_up: int
    """Number of first steps, while the pipeline fills, that the means leave out: whole phases, if the schedule has
    phases."""
    takes_turns: bool = False
    """Whether trainer and engines run at the same time on shared devices, and so slow down (`split.queue_of`)."""

    @property
    def batch_tokens(self) -> float:
        """Mean completion tokens of a batch."""
        return self.rollouts.groups_per_batch * self.rollouts.group_size * self.lengths.mean


@record
class Timing:
    """Means over the steps after the warm-up."""

    step_seconds: float
    steps_per_hour: float
    trainer_waits: float
    """Share of the time in which the trainer waits for a batch."""
    engines_idle: float
    """Share of the time in which engines decode nothing, because the gate admits no group or all episodes wait."""
    running: float
    """Concurrent completions per engine, averaged over time."""
    staleness_mean: float
    """Mean number of optimizer steps between a completion's first token and its training."""
    staleness_max: int
    engine_tokens_per_second: float
    """Tokens per second of an engine, idle time included."""


@dataclass
class _Engine:
    decoding: Decoding
    clock: float = 0.0
    """Simulated time up to which `progress` counts. During weight updates and prefill the clock is ahead of the run's
    time."""
    progress: float = 0.0
    """Number of tokens that a completion would have if it had run since the start of the simulation."""
    running: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (value of `progress` at which a completion ends, number of the completion's group)."""
    away: deque[tuple[float, int]] = field(default_factory=deque)
    """(time at which the wait ends, number of the group) of each episode that waits for the environment."""
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """(length in tokens, number of the group) of each queued completion."""
    load: int = 0
    """Number of running, waiting and queued completions."""
    stamp: int = 0
    """Sequence number of the engine's latest event. Earlier events that are still in the run's heap are void."""
    idle: float = 0.0
    """Seconds without a running completion."""
    busy: float = 0.0
    """Number of running completions, integrated over time (completions x seconds)."""

    def advance(self, now: float) -> None:
        """Decode up to the time `now`."""
        # All running completions progress at the same rate, so `progress` counts the tokens of each.
        if now <= self.clock:
            return
        elapsed = now - self.clock
        if self.running:
            self.progress += elapsed / self.decoding.step_seconds(len(self.running))
            self.busy += elapsed * len(self.running)
        else:
            self.idle += elapsed
        self.clock = now

    def add(self, lengths: Sequence[int], group: int) -> None:
        self.waiting.extend((length, group) for length in lengths)
        self.load += len(lengths)
        self.fill()

    def fill(self) -> None:
        """Start queued completions while the engine has room. Each prefill delays the decoding of all completions."""
        while self.waiting and len(self.running) + len(self.away) < self.decoding.running:
            length, group = self.waiting.popleft()
            heapq.heappush(self.running, (self.progress + length, group))
            # The engine does not decode while its clock is ahead of the run's time.
            self.clock += self.decoding.prefill_seconds


class _Run:
    def __init__(self, s: QueueSettings):
        self.rollouts = s.rollouts
        self.publish_seconds = s.publish_seconds
        self.lengths = s.lengths.tokens
        self.waiting = s.lengths.waiting
        self.rng = random.Random(0)
        self.gate = gate_of(s.rollouts)
        self.engines = [_Engine(s.decoding) for _ in range(s.engines)]
        self.events: list[tuple[float, int, int]] = []
        """Heap of events, as (time, index of the engine, `stamp` of the engine at that time)."""
        self.unfinished_counts: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        self.started: dict[int, int] = {}
        self.groups = 0
        self.version = self.served = 0
        self.now = 0.0
        self.lacks_room = False
        """Whether the gate admits a further group, but no engine has room for the group."""

    def admit(self) -> None:
        """Start groups as long as the gate admits groups and an engine has room."""
        while self.gate.may_start():
            loads = [engine.load for engine in self.engines]
            index = loads.index(min(loads))
            engine = self.engines[index]
            self.lacks_room = not self.has_room(engine)
            if self.lacks_room:
                return
            group = self.groups
            self.groups += 1
            self.gate.start(group, self.served)
            self.started[group] = self.served
            self.unfinished_counts[group] = self.rollouts.group_size
            engine.advance(self.now)
            lengths = [self.rng.choice(self.lengths) for _ in range(self.rollouts.group_size)]
            self.tokens[group] = sum(lengths)
            engine.add(lengths, group)
            self.schedule(index)

    def has_room(self, engine: _Engine) -> bool:
        """Whether the engine has room for one more group."""
        return engine.load + self.rollouts.group_size <= self.rollouts.max_in_flight

    def schedule(self, index: int) -> None:
        engine = self.engines[index]
        engine.stamp += 1
        if engine.away:
            heapq.heappush(self.events, (engine.away[0][0], index, engine.stamp))
        if engine.running:
            seconds = engine.decoding.step_seconds(len(engine.running))
            end = engine.clock + (engine.running[0][0] - engine.progress) * seconds
            heapq.heappush(self.events, (end, index, engine.stamp))

    def until(self, end: float) -> None:
        """Process the events of the engines up to the time `end`."""
        while self.events and self.events[0][0] <= end:
            self.one_event()
        self.now = max(self.now, end)

    def one_event(self) -> bool:
        """Process the next end of a completion or a wait. True if a group is then complete."""
        time, index, stamp = heapq.heappop(self.events)
        engine = self.engines[index]
        # A newer event of the engine has replaced the popped event.
        if stamp != engine.stamp:
            return False
        ready = self.gate.ready
        self.now = max(self.now, time)
        engine.advance(time)
        # Completions of one length end together, up to the rounding of sums.
        while engine.running and engine.running[0][0] <= engine.progress + 1e-6:
            _, group = heapq.heappop(engine.running)
            engine.away.append((time + self.waiting, group))
        while engine.away and engine.away[0][0] <= time:
            _, group = engine.away.popleft()
            engine.load -= 1
            self.unfinished_counts[group] -= 1
            if not self.unfinished_counts[group]:
                del self.unfinished_counts[group]
                self.gate.finish(group, self.started[group])
        engine.fill()
        self.schedule(index)
        if self.lacks_room and self.has_room(engine):
            self.admit()
        return self.gate.ready > ready

    def end_step(self) -> None:
        """End a trainer step.

        If a weight update is due, the update pauses all engines. Then groups start as far as the gate admits groups.
        """
        self.version += 1
        if self.version % self.rollouts.batches_per_update == 0:
            for index, engine in enumerate(self.engines):
                engine.advance(self.now)
                engine.clock = max(engine.clock, self.now) + self.publish_seconds
                self.schedule(index)
            self.now += self.publish_seconds
            self.served = self.version
        self.gate.trained()
        self.admit()


def simulate(s: QueueSettings) -> Timing:
    """Run the queue for `steps` steps, and return the means after the warm-up."""
    run = _Run(s)
    run.admit()
    ages: list[int] = []
    waited = start_time = idle = busy = 0.0
    for step in range(s.steps):
        if step == s.warm_up:
            start_time = run.now
            waited = 0.0
            ages = []
            idle = sum(engine.idle for engine in run.engines)
            busy = sum(engine.busy for engine in run.engines)
        wait_begin = run.now
        batch = run.gate.batch(run.version)
        while batch is None:
            while not run.one_event():
                assert run.events, "bug in the simulation: the trainer waits for a batch, but no completion runs"
            batch = run.gate.batch(run.version)
        waited += run.now - wait_begin
        run.gate.take(batch)
        run.admit()
        ages += [run.version - run.started.pop(g) for g in batch]
        work = sum(run.tokens.pop(g) for g in batch) / s.batch_tokens
        run.until(run.now + s.train_seconds * work + s.other_seconds)
        run.end_step()
    wall = run.now - start_time
    counted = s.steps - s.warm_up
    engine_time = wall * s.engines
    return Timing(
        step_seconds=wall / counted,
        steps_per_hour=3600 * counted / wall,
        trainer_waits=waited / wall,
        engines_idle=(sum(engine.idle for engine in run.engines) - idle) / engine_time,
        running=(sum(engine.busy for engine in run.engines) - busy) / engine_time,
        staleness_mean=fmean(ages),
        staleness_max=max(ages),
        engine_tokens_per_second=s.batch_tokens * counted / wall / s.engines,
    )
