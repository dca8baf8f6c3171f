"""PipelineRL-k: completions are generated continuously while the weights change; batches leave by deadline.

    curriculum --draw--> admission --group task--> engines --> verifier --> journal --> ready --> batch
                            ^ gate: outstanding <= (k + 1) * G              gate: earliest deadline first

Four loops share one condition variable, `_changed`, which is notified of every change of state: a finished group, a
finished batch, freed engine slots, an engine that joins or leaves, a failure.

* Admission (`_admit`, one task). Consumes: groups to reissue, then the curriculum. Waits for: the gate
  (outstanding < (k + 1) * groups_per_batch) and for a serving engine with slots for a whole group (`max_in_flight`
  completions per engine). Unblocked by: a batch that is done (`trained`), a completion that frees its slot, an engine
  that joins.
* Group tasks (`_group`, one per outstanding group). Consume: the completions of a group, all from one engine, so that
  they share its prefix cache. Wait for: these completions and their scores, and for the disk. Unblocked by: the
  engine, the verifier and the journal; they never wait for the trainer, so every admitted group finishes or is issued
  again. Each ends by moving its group to `_ready` or to `_reissue`, or drops it: its prompt cannot be learned from.
* `_follow_engines` (one task) notifies the condition when an engine joins or leaves.
* `next_batch` (the controller's training loop). Consumes: `_ready`, bounded by the gate. Waits for: a batch that the
  gate may release. Unblocked by: group tasks. Returns None when the curriculum is exhausted and nothing is
  outstanding. `next_batch_ahead` does the same for the version after the current one, until it is cancelled.

An engine that fails a request is evicted (`engine.membership`). The groups on it are issued again on another engine,
under their ids. Completions that had finished stay. The others are generated again with the same interruption point
and, where requests have seeds (`engine.options.training_seeds`), with the same seed. A completion in flight is longer
than average: a new draw in its place would favor short completions, while the same draw gives the same completion
again as far as the weights are the same. A group of which nothing is left starts with a new deadline; one with
finished completions keeps its deadline and stays in the gate.

With `rollouts.deterministic`, admission is `_admit_in_rounds`: whole rounds (`engine.rounds`), each after the last
one has ended. After a restart the round that was interrupted is generated again as a whole, those of its groups that
had finished too, since the others shared batches of the engines with them. The recorded ones are trained on.

The first other failure in admission or a group task is raised by `next_batch`. `close` cancels all tasks.

Khatri et al. 2025, section 2 (PipelineRL, k = 8); the staleness bound is proved in `gate`. The schedule
ppo_off_policy has the same loops behind another gate (`gate.PhaseGate`).

`Admission` is a group on its way to an engine: new, issued again after an eviction, or repeated after a restart.
`EngineLoads` is the work that the stream has submitted to each engine: who gets the next group, and how long nobody
had any.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import field, replace
from typing import Any

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.engine.rounds import Rounds
from megatron_scalerl.processes.child_process import cancelled
from megatron_scalerl.prompts.curriculum import Curriculum, CurriculumDry
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.gate import gate_of
from megatron_scalerl.rollouts.journal import Journal
from megatron_scalerl.rollouts.plans import TRAINING_PRIORITY, Draw
from megatron_scalerl.rollouts.sampler import Sampler, ScoredCompletion
from megatron_scalerl.types import Completion, CompletionLost, Prompt, RolloutGroup

MOST_UNUSABLE = 1000
"""Draws in a row of prompts that cannot be learned from, after which the run ends."""
_FORGET = 0.02
"""Weight of the newest completion in the running mean of their lengths."""


class _Load:
    """Work of one engine."""

    def __init__(self) -> None:
        self.completions = 0
        self.tokens = 0.0
        """Prompt tokens and expected completion tokens of the completions."""


class EngineLoads:
    """Completions and expected tokens per engine. Not safe for several threads."""

    def __init__(self, engines: Membership, *, group_size: int, max_in_flight: int, expected_tokens: float):
        """max_in_flight: completions per engine. expected_tokens: of a completion, before the first has finished."""
        self._engines = engines
        self._group_size = group_size
        self._max_in_flight = max_in_flight
        self._expected_tokens = expected_tokens
        self._loads: dict[EngineClient, _Load] = {}
        self._idle_since: float | None = None
        self._idle_seconds = 0.0

    def free_engine(self) -> EngineClient | None:
        """The serving engine with the fewest expected tokens, of those with slots for a whole group."""
        serving = self._engines.serving
        self._loads = {engine: self._loads.get(engine) or _Load() for engine in self._engines.there}
        free = [e for e in serving if self._loads[e].completions + self._group_size <= self._max_in_flight]
        return min(free, key=lambda engine: self._loads[engine].tokens, default=None)

    def add(self, engine: EngineClient, prompt: Prompt, completions: int) -> float:
        """Count so many completions of a prompt; returns the expected tokens of each, with its prompt's."""
        there = self._engines.there  # one that is held goes on with its requests, and comes back
        self._loads = {e: load for e, load in self._loads.items() if e in there}
        load = self._loads.setdefault(engine, _Load())
        weight = len(prompt.token_ids) + self._expected_tokens
        load.completions += completions
        load.tokens += completions * weight
        self.note_idle()
        return weight

    def remove(self, engine: EngineClient, weight: float) -> None:
        """A completion with the weight that `add` returned is over."""
        if (load := self._loads.get(engine)) is not None:
            load.completions -= 1
            load.tokens -= weight
        self.note_idle()

    def note_idle(self) -> None:
        """Begin or end the time in which engines serve and none has work; to be called when one joins or leaves, too.

        Time in which no engine serves is not idle: the engines are being started then.
        """
        serving = self._engines.serving
        now = time.monotonic()
        idle = bool(serving) and not any(self._loads[e].completions for e in serving if e in self._loads)
        if not idle and self._idle_since is not None:
            self._idle_seconds += now - self._idle_since
        self._idle_since = (self._idle_since or now) if idle else None

    def observe(self, tokens: int) -> None:
        """A completion was so long."""
        self._expected_tokens += _FORGET * (tokens - self._expected_tokens)

    def take_idle_seconds(self) -> float:
        """Seconds since the last call in which engines served and none had work."""
        now = time.monotonic()
        idle = self._idle_seconds + (now - self._idle_since if self._idle_since is not None else 0.0)
        self._idle_seconds = 0.0
        self._idle_since = now if self._idle_since is not None else None
        return idle


@record
class Admission:
    """A group to generate."""

    group_id: int
    prompt: Prompt
    epoch: int
    kept: dict[int, ScoredCompletion | None] = field(default_factory=dict)
    """Completions that finished before their engine was evicted, by index; None for a lost one."""
    redraws: int = 0
    """How often all of its completions were lost: each time, they get draws that the group has not had."""
    recorded: RolloutGroup | None = None
    """The group itself if it had finished before a restart and is only generated for the others of its round."""

    @property
    def counted(self) -> bool:
        """True if the gate counts the group: it is recorded, or a kept completion fixes its deadline."""
        return self.recorded is not None or any(result is not None for result in self.kept.values())


logger = logging.getLogger(__name__)


class RolloutStream:
    """Keeps the engines busy within the staleness bound and returns batches of scored groups."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        curriculum: Curriculum,
        engines: Membership,
        sampler: Sampler,
        journal: Journal,
        next_group_id: int = 0,
        count_tokens: Callable[[int], None] = lambda tokens: None,
        rounds: Rounds | None = None,
        problems: dict[str, str | None] | None = None,
    ):
        """count_tokens: called with the number of tokens of every finished completion. rounds: for
        rollouts.deterministic. problems: `PromptSet.problems`, completed here."""
        self.reissued_groups = 0
        """Groups that were issued again because their engine was evicted."""
        self.policy_version = 0
        self.exhausted: str | None = None
        """Why no prompt is left, None while there are prompts."""
        self._curriculum = curriculum
        self._sampler = sampler
        self._journal = journal
        self._problems = problems or {}
        self._gate = gate_of(recipe.rollouts)
        self._group_size = recipe.rollouts.group_size
        self._seed = recipe.seed
        self._next_group_id = next_group_id
        self._count_tokens = count_tokens
        self._engines = engines
        self._rounds = rounds
        self._groups_per_engine = recipe.rollouts.max_in_flight // self._group_size
        self._loads = EngineLoads(
            engines,
            group_size=self._group_size,
            max_in_flight=recipe.rollouts.max_in_flight,
            expected_tokens=float(recipe.max_completion_tokens),
        )
        self._reissue: list[Admission] = []
        self._repeating = 0  # recorded groups that are being generated once more, or will be
        self._ready: dict[int, RolloutGroup] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._admission: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def start(self, policy_version: int) -> None:
        """Start to admit groups; the engines serve `policy_version`."""
        assert self._admission is None
        self.policy_version = policy_version
        self._following = asyncio.create_task(self._guarded(self._follow_engines), name="engines")
        self._start_admission()

    def restore(self, ready: Sequence[RolloutGroup], unfinished: Sequence[Admission], batches: int) -> None:
        """Before `start`: after so many batches, restore finished groups and reissue the unfinished ones."""
        self._gate.resume(batches)
        for group in ready:
            self._gate.restore(group.group_id, group.first_token_version)
            self._ready[group.group_id] = group
        again = list(unfinished)
        if self._rounds is not None and self._gate.batch(self.policy_version) is None:
            again += [Admission(group_id=g.group_id, prompt=g.prompt, epoch=g.epoch, recorded=g) for g in ready]
            self._repeating = len(ready)
        self._reissue = sorted(again, key=lambda admission: admission.group_id)

    async def trained(self, policy_version: int) -> None:
        """The last batch is done; every engine serves `policy_version` (the old one if there was no update)."""
        async with self._changed:
            self.policy_version = policy_version
            self._gate.trained()
            self._changed.notify_all()

    async def next_batch(self) -> list[RolloutGroup] | None:
        """The next groups to train on at the current version, earliest deadline first.

        None if the curriculum is exhausted and no full batch is left. Raises the failure that ended the stream.
        """
        async with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if (batch := self._take(self.policy_version)) is not None:
                    return batch
                if self.exhausted and self._gate.in_flight == 0 and not self._reissue:
                    return None
                await self._changed.wait()

    async def next_batch_ahead(self) -> list[RolloutGroup]:
        """While a batch trains, the groups to train on after it, as `next_batch`.

        Waits, also if there is none or the stream has failed, until it is cancelled; it has taken nothing then.
        """
        async with self._changed:
            while (batch := self._take(self.policy_version + 1)) is None:
                await self._changed.wait()
            return batch

    def _take(self, policy_version: int) -> list[RolloutGroup] | None:
        ids = None if self._repeating else self._gate.batch(policy_version)
        if ids is None:
            return None
        self._gate.take(ids)
        self._changed.notify_all()
        return [self._ready.pop(g) for g in ids]

    @property
    def in_flight(self) -> int:
        """Groups that are being generated or scored."""
        return self._gate.in_flight

    @property
    def ready(self) -> int:
        """Finished groups that are not in a batch yet."""
        return self._gate.ready

    def take_idle_seconds(self) -> float:
        """Seconds since the last call in which engines served and the staleness bound left all without work."""
        return self._loads.take_idle_seconds()

    async def close(self) -> None:
        """Stop admission and cancel all groups in flight."""
        await cancelled(*self._tasks, *(task for task in (self._admission, self._following) if task is not None))

    def _start_admission(self) -> None:
        admit = self._admit if self._rounds is None else self._admit_in_rounds
        self._admission = asyncio.create_task(self._guarded(admit), name="admission")

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """A task of the stream: keep the first failure for `next_batch`."""
        try:
            await work(*arguments)
        except asyncio.CancelledError:
            raise
        except BaseException as failure:
            first = failure.exceptions[0] if isinstance(failure, BaseExceptionGroup) else failure
            async with self._changed:
                self._failure = self._failure or first
                self._changed.notify_all()

    async def _follow_engines(self) -> None:
        """Notify the other loops of every change of the engines."""
        epoch = self._engines.epoch
        while True:
            await self._engines.until(lambda: self._engines.epoch != epoch)  # noqa: B023
            epoch = self._engines.epoch
            async with self._changed:
                self._loads.note_idle()
                self._changed.notify_all()

    async def _admit(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._may_start() and self._loads.free_engine() is not None)
                if (admission := self._draw()) is None:
                    self._changed.notify_all()
                    return
                engine = self._loads.free_engine()
                assert engine is not None
                if not admission.counted:
                    self._gate.start(admission.group_id, self.policy_version)
                self._submit(engine, admission, TRAINING_PRIORITY)

    def _submit(self, engine: EngineClient, admission: Admission, priority: int) -> asyncio.Task[None]:
        weight = self._loads.add(engine, admission.prompt, self._group_size - len(admission.kept))
        name = f"group {admission.group_id}"
        task = asyncio.create_task(self._guarded(self._group, engine, admission, weight, priority), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _admit_in_rounds(self) -> None:
        """Admission with rollouts.deterministic: the groups of a round reach their paused engines together.

        Consumes: as `_admit`. Waits for: the gate, all engines that are not given up, and the groups of the last
        round. Unblocked by: a batch that is done, an engine that joins, group tasks that end.
        """
        assert self._rounds is not None
        while True:
            async with self._changed:
                await self._changed.wait_for(self._may_start)
            together = await self._rounds.begin()
            async with self._changed:
                admissions = self._draw_round(self._groups_per_engine * together.size)
                self._changed.notify_all()
            if not admissions:
                return await together.go([])
            groups = []
            requests = []
            for rank, admission in enumerate(admissions):
                engine = together.engine(rank)
                first = TRAINING_PRIORITY + rank * self._group_size
                groups.append(self._submit(engine, admission, first))
                requests += [engine] * (self._group_size - len(admission.kept))
            await together.go(requests)
            await asyncio.wait(groups)

    def _draw_round(self, most: int) -> list[Admission]:
        """The groups of the next round, none if the curriculum is exhausted. The gate counts them from now on."""
        drawn: list[Admission] = []
        while len(drawn) < most and self._may_start():
            if (admission := self._draw()) is None:
                break
            if not admission.counted:
                self._gate.start(admission.group_id, self.policy_version)
            drawn.append(admission)
        return drawn

    def _may_start(self) -> bool:
        return bool(self._reissue and self._reissue[0].counted) or self._gate.may_start()

    def _draw(self) -> Admission | None:
        """The next group of a prompt that can be learned from; None if the curriculum is exhausted.

        The journal has draws of other prompts, too: the order does not depend on when a problem is found. Raises
        RuntimeError for MOST_UNUSABLE in a row.
        """
        for _ in range(MOST_UNUSABLE):
            admission = self._next()
            if admission is None or admission.recorded or not self._problems.get(admission.prompt.prompt_id):
                return admission
        raise RuntimeError(f"the last {MOST_UNUSABLE} prompts that were drawn cannot be learned from")

    def _next(self) -> Admission | None:
        """The next group: one to reissue, otherwise a new prompt; None if the curriculum is exhausted."""
        if self._reissue:
            return self._reissue.pop(0)
        try:
            prompt, epoch = self._curriculum.draw()
        except CurriculumDry as end:
            self.exhausted = str(end)
            self._gate.exhaust()
            return None
        group_id = self._next_group_id
        self._next_group_id = self._next_group_id + 1
        self._journal.admit(group_id, prompt.prompt_id, epoch)
        return Admission(group_id=group_id, prompt=prompt, epoch=epoch)

    async def _group(self, engine: EngineClient, admission: Admission, weight: float, priority: int) -> None:
        """priority: of its first completion; in a round, those of the others follow it."""
        group_id = admission.group_id
        prompt = admission.prompt
        missing = [index for index in range(self._group_size) if index not in admission.kept]
        drawn = admission.redraws * self._group_size
        async with asyncio.TaskGroup() as tasks:
            running = {
                index: tasks.create_task(
                    self._completion(
                        engine,
                        prompt,
                        self._sampler.draw(self._seed, group_id, drawn + index),
                        weight=weight,
                        priority=priority + (0 if self._rounds is None else index),
                        where=f"group {group_id}, completion {drawn + index}",
                    )
                )
                for index in missing
            }
        results = dict(admission.kept)
        for index, task in running.items():
            if not isinstance(finished := task.result(), EngineError):
                results[index] = None if isinstance(finished, CompletionLost) else finished
        kept = [result for _, result in sorted(results.items()) if result is not None]
        if admission.recorded is not None:
            complete = len(results) == self._group_size
            await self._repeated(admission.recorded, [found.completion for found in kept] if complete else None)
            return
        if problem := await self._problem_of(prompt):
            logger.warning(
                "group %d is left out: prompt %s cannot be learned from: %s", group_id, prompt.prompt_id, problem
            )
            async with self._changed:
                self._gate.drop(group_id)
                self._changed.notify_all()
            return
        if len(results) < self._group_size or not kept:
            await self._reissue_group(admission, results if kept else {}, evicted=len(results) < self._group_size)
            return
        group = RolloutGroup(
            group_id=group_id,
            prompt=prompt,
            completions=tuple(found.completion for found in kept),
            positions=tuple(range(len(kept))),
            scores=tuple(found.score for found in kept),
            first_token_version=min(found.completion.first_version for found in kept),
            epoch=admission.epoch,
            lost_completions=len(results) - len(kept),
        )
        group = await self._journal.finish(group, [found.data for found in kept])
        self._curriculum.observe(prompt.prompt_id, group.pass_rate)
        async with self._changed:
            self._gate.finish(group_id, group.first_token_version)
            self._ready[group_id] = group
            self._changed.notify_all()

    async def _problem_of(self, prompt: Prompt) -> str:
        """Why a prompt cannot be learned from, or nothing; found out at its first use where it is not known."""
        problem = self._problems.get(prompt.prompt_id, "")
        if problem is None:
            try:
                problem = self._problems[prompt.prompt_id] = await self._sampler.problem_of(prompt)
            except CompletionLost as lost:
                problem = str(lost)
        return problem

    async def _reissue_group(
        self, admission: Admission, kept: dict[int, ScoredCompletion | None], *, evicted: bool
    ) -> None:
        """Generate the missing completions of a group again, under its id.

        After an eviction with the same draws; every eviction counts as a restart of an engine (engine.max_restarts).
        A group whose completions are all lost gets other draws, since the same might be lost again for ever.
        """
        again = replace(admission, kept=kept, redraws=admission.redraws + (not evicted))
        async with self._changed:
            self.reissued_groups += evicted
            if not again.counted:
                self._gate.abandon(admission.group_id)
            self._reissue.append(again)
            if self._admission is not None and self._admission.done():  # it ended when the curriculum was exhausted
                self._start_admission()
            self._changed.notify_all()

    async def _repeated(self, recorded: RolloutGroup, found: Sequence[Completion] | None) -> None:
        """A recorded group was generated once more, for the others of its round; None if its engine was evicted."""
        if found is not None and tuple(found) != recorded.completions:
            logger.warning(
                "group %d: the completions differ from those before the restart: this run is not deterministic",
                recorded.group_id,
            )
        async with self._changed:
            self._repeating -= 1
            self._changed.notify_all()

    async def _completion(
        self, engine: EngineClient, prompt: Prompt, draw: Draw, *, weight: float, priority: int, where: str
    ) -> ScoredCompletion | CompletionLost | EngineError:
        """One scored completion, or why there is none: it is lost, or its engine was evicted before it finished."""
        result: ScoredCompletion | CompletionLost | EngineError
        served = self.policy_version
        try:
            found = await self._sampler.complete(engine, prompt, draw, priority=priority)
            newest = found.completion.last_version
            if newest > self.policy_version + 1:  # during a weight update, engines may serve the next version already
                raise EngineError(
                    f"{engine.name}: a token of its completion has policy version {newest}, and no version after "
                    f"{self.policy_version + 1} can have been published"
                )
            if found.completion.first_version < served:  # the gate relies on it
                raise EngineError(
                    f"{engine.name}: a token of its completion has policy version {found.completion.first_version}, "
                    f"and it served version {served} when the request was sent"
                )
            self._count_tokens(found.completion.tokens)
            self._loads.observe(found.completion.tokens)
            result = found
        except CompletionLost as lost:
            logger.warning("%s is left out: %s", where, lost)
            result = lost
        except EngineError as error:
            self._engines.evict(engine, str(error))
            result = error
        async with self._changed:
            self._loads.remove(engine, weight)
            self._changed.notify_all()
        return result
