"""PipelineRL-k: completions are generated continuously while the weights change; batches leave in order of deadlines.

    curriculum --draw--> admission --group task--> engines --> verifier --> journal --> ready --> batch
                            ^ gate: outstanding <= (k + 1) * G              gate: earliest deadline first

The life of a group:

    _draw        a prompt of the curriculum, written to the journal; or a group that is issued again
    _submit      to the free engine with the fewest completions, as soon as the gate admits the group
    _group       one engine generates all completions of the group, with one prefix cache; the verifier scores them
    _finish      the group is on the disk, then in the gate, and ready
    _take        the group leaves in the batch that the gate releases: the earliest deadlines first
    trained      the batch is done, and the gate admits new groups

G is rollouts.groups_per_batch, and k bounds the age of a token in optimizer steps (`gate`).

Four loops share one condition variable, `_changed`, which is notified of every change of state: a finished group, a
finished batch, freed engine slots, an engine that joins or leaves, a failure.

* Admission (`_admit`, one task). Consumes: groups to reissue, then the curriculum. Waits for: the gate
  (outstanding < (k + 1) * groups_per_batch) and for a serving engine with slots for a whole group (`max_in_flight`
  completions per engine). Unblocked by: a batch that is done (`trained`), a completion that frees a slot, an engine
  that joins.
* Group tasks (`_group`, one per outstanding group). Consume: the completions of a group. Wait for: these completions,
  the scores, and the disk. Unblocked by: the engine, the verifier and the journal. Group tasks never wait for the
  trainer, so every admitted group finishes or is issued again. A group task ends by moving the group to `_ready` or
  to `_reissue`, or by dropping a group whose prompt cannot be learned from.
* `_follow_engines` (one task) notifies the condition when an engine joins or leaves.
* `next_batch` (the controller's training loop). Consumes: `_ready`, bounded by the gate. Waits for: a batch that the
  gate may release. Unblocked by: group tasks. Returns None when the curriculum is exhausted and nothing is
  outstanding. `next_batch_ahead` does the same for the next version, until the call is cancelled.

An engine that fails a request is evicted (`engine.membership`). The evicted engine's groups are issued again on
another engine, under the same ids. Finished completions stay. Unfinished completions are generated again with the
same interruption point and, if requests have seeds (`engine.options.training_seeds`), with the same seed. Completions
in flight are longer than average: a new draw would favor short completions, while the same draw gives the same
completion again as far as the weights are the same. A group without finished completions starts with a new deadline;
a group with finished completions keeps the deadline and stays in the gate.

With `rollouts.deterministic`, admission is `_admit_in_rounds`: whole rounds (`engine.rounds`), each after the end of
the previous round. After a restart the interrupted round is generated again as a whole, finished groups included,
since finished and unfinished groups shared batches of the engines. Only the new groups are trained on.

Any failure of a task other than an eviction or a lost completion ends the stream: `next_batch` raises the first
failure. `close` cancels all tasks.

Khatri et al. 2025, section 2 (PipelineRL, k = 8); the staleness bound is proved in `gate`. The schedule
ppo_off_policy has the same loops behind another gate (`gate.PhaseGate`).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import field, replace
from typing import Any

from megatron_scalerl.algorithms import algorithm_of
from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.engine.rounds import Rounds
from megatron_scalerl.processes.child_process import cancelled
from megatron_scalerl.prompts.curriculum import Curriculum, CurriculumDry
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.columns import Teachers, with_columns
from megatron_scalerl.rollouts.engine_loads import EngineLoads
from megatron_scalerl.rollouts.gate import gate_of
from megatron_scalerl.rollouts.journal import Journal
from megatron_scalerl.rollouts.plans import TRAINING_PRIORITY, Draw
from megatron_scalerl.rollouts.sampler import Sampler, ScoredCompletion
from megatron_scalerl.rollouts.store import positions_of
from megatron_scalerl.types import CompletionLost, Prompt, RolloutGroup

logger = logging.getLogger(__name__)

MOST_PAUSE_S = 600.0
"""Longest pause of a group after all of the group's completions were lost (s)."""
PAUSE_S = 10.0
"""Pause of a group after all of the group's completions were lost for the third time (s).

Each further loss of all completions about doubles the pause, up to MOST_PAUSE_S.
"""
MOST_UNUSABLE = 1000
"""Number of prompts drawn in a row that cannot be learned from, after which the run ends."""


Results = dict[int, ScoredCompletion | CompletionLost]
"""Index of a completion in a group -> the scored completion, or the error that says why the completion was lost."""


@record
class Admission:
    """A group that is to be sent to an engine: a new group, or a group with completions to generate again."""

    group_id: int
    prompt: Prompt
    epoch: int
    kept: Results = field(default_factory=dict)
    """Results of the completions that ended before the group's engine was evicted."""
    redraws: int = 0
    """Number of times that all completions of the group were lost, and drawn again with new random choices."""

    @property
    def counted(self) -> bool:
        """True if the gate still counts the group: a finished completion in `kept` fixes the group's deadline."""
        return any(isinstance(result, ScoredCompletion) for result in self.kept.values())


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
        """count_tokens: called with the number of generated tokens of each finished completion. rounds: starts groups
        in rounds, for rollouts.deterministic; None: groups start singly. problems: `PromptSet.problems`, to which the
        stream adds the reasons why prompts cannot be learned from."""
        self.reissued_groups = 0
        """Number of groups that were sent to an engine again after an eviction."""
        self.policy_version = 0
        self.exhausted: str | None = None
        """The reason why the curriculum has no prompt left; None while prompts are left."""
        self._curriculum = curriculum
        self._sampler = sampler
        self._journal = journal
        self._problems = problems or {}
        self._gate = gate_of(recipe.rollouts)
        self._group_size = recipe.rollouts.group_size
        self._algorithm = algorithm_of(recipe)
        self._score = Teachers(recipe, engines).score if recipe.algorithm.teachers else None
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
        )
        self._reissue: list[Admission] = []
        self._put_off = 0
        """Number of groups that pause before being sent to an engine again."""
        self._ready: dict[int, RolloutGroup] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._admission: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def start(self, policy_version: int) -> None:
        """Start to send groups to the engines, which serve `policy_version`."""
        assert self._admission is None
        self.policy_version = policy_version
        self._following = asyncio.create_task(self._guarded(self._follow_engines), name="engines")
        self._start_admission()

    def restore(self, ready: Sequence[RolloutGroup], unfinished: Sequence[Admission], batches: int) -> None:
        """Restore the groups that are in no batch, after a restart and before `start`.

        ready: finished groups. unfinished: groups to generate again. batches: number of finished batches of the run.
        """
        self._gate.resume(batches)
        for group in ready:
            self._gate.restore(group.group_id, group.first_token_version)
            self._ready[group.group_id] = group
        admissions = list(unfinished)
        # If the ready groups fill no batch, the restart interrupted a round: the engines computed the finished groups
        # together with unfinished groups, so both are generated again.
        if self._rounds is not None and self._gate.batch(self.policy_version) is None:
            admissions += [Admission(group_id=g.group_id, prompt=g.prompt, epoch=g.epoch) for g in ready]
            self._ready.clear()
            self._gate.forget_ready()
        self._reissue = sorted(admissions, key=lambda admission: admission.group_id)

    async def trained(self, policy_version: int) -> None:
        """Note that a batch is done. Every engine now serves `policy_version`, a new version if a step was made."""
        async with self._changed:
            self.policy_version = policy_version
            self._gate.trained()
            self._changed.notify_all()

    async def next_batch(self) -> list[RolloutGroup] | None:
        """The next groups to train on at the current policy version, earliest deadline first; waits for the groups.

        None if the curriculum is exhausted and no full batch is left. Raises the first failure of a task, if any.
        """
        async with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                batch = self._take(self.policy_version)
                if batch is not None:
                    return batch
                # When no prompt and no group is left, the ready groups do not fill a batch and stay unused.
                groups_to_come = self._gate.in_flight or self._reissue or self._put_off
                if self.exhausted and not groups_to_come:
                    return None
                await self._changed.wait()

    async def next_batch_ahead(self) -> list[RolloutGroup]:
        """The groups to train on after the batch that trains now; waits for the groups.

        If no batch comes or the stream has failed, the call waits until cancelled. A cancelled call takes no group.
        """
        async with self._changed:
            # A failure is not raised here: the controller calls `next_batch` after the step in progress.
            while (batch := self._take(self.policy_version + 1)) is None:
                await self._changed.wait()
            return batch

    def _take(self, policy_version: int) -> list[RolloutGroup] | None:
        group_ids = self._gate.batch(policy_version)
        if group_ids is None:
            return None
        self._gate.take(group_ids)
        self._changed.notify_all()
        return [self._ready.pop(group_id) for group_id in group_ids]

    @property
    def in_flight(self) -> int:
        """Number of groups that are being generated or scored."""
        return self._gate.in_flight

    @property
    def ready(self) -> int:
        """Number of finished groups that are in no batch yet."""
        return self._gate.ready

    def take_idle_seconds(self) -> float:
        """Seconds since the last call during which the staleness bound left every serving engine without work."""
        return self._loads.take_idle_seconds()

    async def close(self) -> None:
        """Stop admission and cancel all groups in flight."""
        await cancelled(*self._tasks, *(task for task in (self._admission, self._following) if task is not None))

    def _start_admission(self) -> None:
        admit = self._admit if self._rounds is None else self._admit_in_rounds
        self._admission = asyncio.create_task(self._guarded(admit), name="admission")

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run a task of the stream; the first failure of any task is kept, and raised by `next_batch`."""
        try:
            await work(*arguments)
        except asyncio.CancelledError:
            raise
        except BaseException as failure:
            # The TaskGroup of a group's completions wraps the failure of a completion.
            if isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
            async with self._changed:
                self._failure = self._failure or failure
                self._changed.notify_all()

    async def _follow_engines(self) -> None:
        """Notify `_changed`, for which all loops wait, whenever an engine changes state."""
        epoch = self._engines.epoch
        while True:
            await self._engines.until(lambda: self._engines.epoch != epoch)  # noqa: B023
            # The epoch is read before the notification, so that a change during the notification is noticed.
            epoch = self._engines.epoch
            async with self._changed:
                self._loads.note_idle()
                self._changed.notify_all()

    async def _admit(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._may_start() and self._loads.free_engine() is not None)
                admission = self._draw()
                if admission is None:
                    self._changed.notify_all()
                    return
                engine = self._loads.free_engine()
                assert engine is not None
                self._submit(engine, admission, TRAINING_PRIORITY)

    def _submit(self, engine: EngineClient, admission: Admission, priority: int) -> asyncio.Task[None]:
        self._loads.add(engine, self._group_size - len(admission.kept))
        name = f"group {admission.group_id}"
        task = asyncio.create_task(self._guarded(self._group, engine, admission, priority), name=name)
        # asyncio keeps only weak references to tasks, so the stream keeps the task.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _admit_in_rounds(self) -> None:
        """Start groups in rounds, for rollouts.deterministic: a round's groups reach the paused engines together.

        Consumes groups as `_admit` does. Waits until the gate admits a group, all engines that are not given up
        serve, and the groups of the last round have ended. Unblocked by: a batch that is done, an engine that joins,
        group tasks that end.
        """
        assert self._rounds is not None
        while True:
            async with self._changed:
                await self._changed.wait_for(self._may_start)
            next_round = await self._rounds.begin()
            async with self._changed:
                admissions = self._draw_round(self._groups_per_engine * next_round.size)
                self._changed.notify_all()
            # `begin` has paused the engines, so `go` has to resume the engines even if no request is sent.
            if not admissions:
                return await next_round.go([])
            groups = []
            requests = []
            for rank, admission in enumerate(admissions):
                # Engine and priority depend only on the group's rank in the round, so that the engines form the same
                # batches in every run.
                engine = next_round.engine(rank)
                first = TRAINING_PRIORITY + rank * self._group_size
                groups.append(self._submit(engine, admission, first))
                requests += [engine] * (self._group_size - len(admission.kept))
            await next_round.go(requests)
            await asyncio.wait(groups)

    def _draw_round(self, limit: int) -> list[Admission]:
        """The groups of the next round, at most `limit`; empty if the curriculum is exhausted."""
        admissions: list[Admission] = []
        while len(admissions) < limit and self._may_start():
            admission = self._draw()
            if admission is None:
                break
            admissions.append(admission)
        return admissions

    def _may_start(self) -> bool:
        # The gate already counts such a group as outstanding, so sending the group again needs no room in the gate.
        return bool(self._reissue and self._reissue[0].counted) or self._gate.may_start()

    def _draw(self) -> Admission | None:
        """The next group with a prompt that can be learned from, counted by the gate from now on.

        None if the curriculum is exhausted. Raises RuntimeError after MOST_UNUSABLE unusable prompts in a row.
        """
        for _ in range(MOST_UNUSABLE):
            # `_next` also journals draws of unusable prompts, so that a replay draws in the same order, whenever a
            # prompt was found to be unusable.
            admission = self._next()
            if admission is None:
                return None
            if not self._problems.get(admission.prompt.prompt_id):
                if not admission.counted:
                    self._gate.start(admission.group_id, self.policy_version)
                return admission
        raise RuntimeError(f"none of the last {MOST_UNUSABLE} drawn prompts can be learned from; check the answers")

    def _next(self) -> Admission | None:
        """The next group: a group to generate again, or a new group. None if the curriculum is exhausted."""
        if self._reissue:
            return self._reissue.pop(0)
        try:
            prompt, epoch = self._curriculum.draw()
        except CurriculumDry as end:
            self.exhausted = str(end)
            self._gate.exhaust()
            return None
        group_id = self._next_group_id
        self._next_group_id += 1
        self._journal.admit(group_id, prompt.prompt_id, epoch)
        return Admission(group_id=group_id, prompt=prompt, epoch=epoch)

    async def _group(self, engine: EngineClient, admission: Admission, priority: int) -> None:
        """Generate the missing completions of a group; then store the group, send the group again, or drop the group.

        priority: priority of the first completion; in a round, later completions have consecutive priorities.
        """
        results = await self._completions(engine, admission, priority)
        completions = [result for _, result in sorted(results.items()) if isinstance(result, ScoredCompletion)]
        evicted = len(results) < self._group_size
        problem = await self._problem_of(admission.prompt, retry=not completions and not evicted)
        if problem:
            logger.warning(
                "group %d is dropped, since prompt %s cannot be learned from: %s",
                admission.group_id,
                admission.prompt.prompt_id,
                problem,
            )
            async with self._changed:
                self._gate.drop(admission.group_id)
                self._changed.notify_all()
            return
        if completions and not evicted:
            lost = Counter(result.reason for result in results.values() if isinstance(result, CompletionLost))
            await self._finish(admission, completions, lost)
            return
        if not completions:
            # Without a finished completion the group starts anew, with a new deadline and without the lost results.
            results = {}
        await self._reissue_group(admission, results, evicted=evicted)

    async def _completions(self, engine: EngineClient, admission: Admission, priority: int) -> Results:
        """Index -> result of each completion of a group, kept or generated now; arguments as for `_group`.

        The result lacks completions that were unfinished when the engine was evicted.
        """
        first_draw = admission.redraws * self._group_size
        tasks_by_index = {}
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._group_size):
                if index in admission.kept:
                    continue
                completion = self._completion(
                    engine,
                    admission.prompt,
                    self._sampler.draw(admission.prompt, self._seed, admission.group_id, first_draw + index),
                    priority=priority if self._rounds is None else priority + index,
                    label=f"group {admission.group_id}, completion {first_draw + index}",
                )
                tasks_by_index[index] = tasks.create_task(completion)
        results = dict(admission.kept)
        for index, task in tasks_by_index.items():
            result = task.result()
            if not isinstance(result, EngineError):
                results[index] = result
        return results

    async def _finish(
        self, admission: Admission, completions: Sequence[ScoredCompletion], lost: Counter[str]
    ) -> None:
        """Write a group to the store, and make the group ready. lost: reason -> number of lost completions."""
        [(tokens, number)] = Counter(scored.prompt.token_ids for scored in completions).most_common(1)
        if 2 * number <= len(completions) > 1:
            raise RuntimeError(
                f"prompt {admission.prompt.prompt_id}: reset returned different messages for the same row, but all "
                "episodes of a group need the same prompt; let reset's messages depend on the row alone"
            )
        if number < len(completions):
            lost += Counter({"prompt_changed": len(completions) - number})
            completions = [scored for scored in completions if scored.prompt.token_ids == tokens]
        prompt = completions[0].prompt
        group = RolloutGroup(
            group_id=admission.group_id,
            prompt=prompt,
            completions=tuple(scored.completion for scored in completions),
            positions=positions_of(scored.completion for scored in completions),
            scores=tuple(scored.score for scored in completions),
            first_token_version=min(scored.completion.first_version for scored in completions),
            epoch=admission.epoch,
            lost_completions=lost.total(),
            lost_reasons=lost,
        )
        samples = [part for scored in completions for part in scored.parts]
        if self._algorithm.columns:
            samples = await with_columns(self._algorithm, group, samples, self._score)
        group = await self._journal.finish(group, samples)
        # Nothing is awaited between the finish event in the journal and this call, so that a replay of the journal
        # gives the curriculum the pass rates in the same order.
        self._curriculum.observe(prompt.prompt_id, group.pass_rate)
        async with self._changed:
            self._gate.finish(group.group_id, group.first_token_version)
            self._ready[group.group_id] = group
            self._changed.notify_all()

    async def _problem_of(self, prompt: Prompt, *, retry: bool) -> str:
        """The reason why a prompt cannot be learned from, else empty. The verifier tries a prompt that has no result.

        retry: the verifier tries a usable prompt again, since all completions of a group were lost.
        """
        known_problem = self._problems.get(prompt.prompt_id, "")
        if known_problem or (known_problem == "" and not retry):
            return known_problem
        try:
            problem = await self._sampler.problem_of(prompt)
        except CompletionLost as lost:
            # The verifier could not try the prompt. A prompt without a result is tried again at the next draw.
            return str(lost) if known_problem is None else ""
        self._problems[prompt.prompt_id] = problem
        return problem

    async def _reissue_group(self, admission: Admission, results: Results, *, evicted: bool) -> None:
        """Queue a group, under the same id, to generate the missing completions again.

        After an eviction the completions get the same random choices; engine.max_restarts limits the evictions. If
        all completions were lost, the completions get new random choices, since the same choices might be lost for
        ever. From the third such loss on, the group pauses first: the prompt may be at fault, or an outage may pass.
        """
        redraws = admission.redraws
        pause_s = 0.0
        if not evicted:
            pause_s = min(PAUSE_S * (2.0 ** max(redraws - 1, 0) - 1), MOST_PAUSE_S)
            redraws += 1
        reissued = replace(admission, kept=results, redraws=redraws)
        if pause_s:
            async with self._changed:
                # The gate drops the paused group, so that another group may start instead.
                self._gate.drop(admission.group_id)
                self._put_off += 1
                self._changed.notify_all()
            await asyncio.sleep(pause_s)
        async with self._changed:
            if evicted:
                self.reissued_groups += 1
            if pause_s:
                self._put_off -= 1
            elif not reissued.counted:
                self._gate.abandon(admission.group_id)
            self._reissue.append(reissued)
            # The admission task has ended if the curriculum was exhausted; a new task has to send this group.
            if self._admission is not None and self._admission.done():
                self._start_admission()
            self._changed.notify_all()

    async def _completion(
        self, engine: EngineClient, prompt: Prompt, draw: Draw, *, priority: int, label: str
    ) -> ScoredCompletion | CompletionLost | EngineError:
        """Generate a scored completion; returns an exception if the completion was lost or the engine evicted."""
        result: ScoredCompletion | CompletionLost | EngineError
        served_version = self.policy_version
        try:
            result = await self._sampler.complete(engine, prompt, draw, priority=priority)
            completion = result.completion
            # During a weight update, engines may already serve the next version.
            newest_version = self.policy_version + 1
            if completion.last_version > newest_version:
                raise EngineError(
                    f"{engine.name}: a token of a completion has policy version {completion.last_version}, but no "
                    f"version after {newest_version} has been sent to engines"
                )
            # The gate's staleness bound holds only if no token is older than the version served at the request.
            if completion.first_version < served_version:
                raise EngineError(
                    f"{engine.name}: a token of a completion has policy version {completion.first_version}, but the "
                    f"engine served version {served_version} when the request was sent"
                )
            self._count_tokens(completion.generated_tokens)
        except CompletionLost as lost:
            logger.warning("%s is lost, and left out of the group: %s", label, lost)
            result = lost
        except EngineError as error:
            self._engines.evict(engine, str(error))
            result = error
        async with self._changed:
            self._loads.remove(engine)
            self._changed.notify_all()
        return result
