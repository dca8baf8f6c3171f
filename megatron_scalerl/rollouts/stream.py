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
  again. Each ends by moving its group to `_ready` or to `_reissue`.
* `_follow_engines` (one task) notifies the condition when an engine joins or leaves.
* `next_batch` (the controller's training loop). Consumes: `_ready`, bounded by the gate. Waits for: a batch that the
  gate may release. Unblocked by: group tasks. Returns None when the curriculum is exhausted and nothing is
  outstanding. `next_batch_ahead` does the same for the version after the current one, until it is cancelled.

An engine that fails a request is evicted (`engine.membership`). The groups on it are issued again on another engine,
under their ids. Completions that had finished stay. The others are generated again with the same seed and the same
interruption point, because a completion in flight is longer than average: a new draw in its place would favor short
completions, while the same draw gives the same completion again as far as the weights are the same. A group of which
nothing is left starts with a new deadline; one with finished completions keeps its deadline and stays in the gate.

The first other failure in admission or a group task is raised by `next_batch`. `close` cancels all tasks.

Khatri et al. 2025, section 2 (PipelineRL, k = 8); the staleness bound is proved in `gate`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.prompts.curriculum import Curriculum, CurriculumDry
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.gate import StalenessGate
from megatron_scalerl.rollouts.journal import Journal
from megatron_scalerl.rollouts.sampler import TRAINING_PRIORITY, Sampler, ScoredCompletion
from megatron_scalerl.types import CompletionLost, Prompt, RolloutGroup

logger = logging.getLogger(__name__)

_FORGET = 0.02
"""Weight of the newest completion in the running mean of their lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """A group to generate."""

    group_id: int
    prompt: Prompt
    epoch: int
    kept: dict[int, ScoredCompletion | None] = field(default_factory=dict)
    """Completions that finished before their engine was evicted, by index; None for a lost one."""
    redraws: int = 0
    """How often all of its completions were lost: each time, they get draws that the group has not had."""

    @property
    def holds_deadline(self) -> bool:
        """True if a kept completion fixes the group's deadline: the gate counts the group as in flight."""
        return any(result is not None for result in self.kept.values())


class _Load:
    """Work of one engine that this stream has submitted."""

    def __init__(self) -> None:
        self.completions = 0
        self.tokens = 0.0
        """Prompt tokens and expected completion tokens of the completions."""


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
    ) -> None:
        """count_tokens: called with the number of tokens of every finished completion."""
        self.reissued_groups = 0
        """Groups that were issued again because their engine was evicted."""
        self.policy_version = 0
        self.exhausted: str | None = None
        """Why no prompt is left, None while there are prompts."""
        self._curriculum = curriculum
        self._sampler = sampler
        self._journal = journal
        self._gate = StalenessGate(
            groups_per_batch=recipe.rollouts.groups_per_batch,
            max_staleness_steps=recipe.rollouts.max_staleness_steps,
        )
        self._group_size = recipe.rollouts.group_size
        self._max_in_flight = recipe.rollouts.max_in_flight
        self._seed = recipe.seed
        self._next_group_id = next_group_id
        self._count_tokens = count_tokens
        self._engines = engines
        self._load: dict[EngineClient, _Load] = {}
        self._expected_tokens = float(recipe.max_completion_tokens)
        self._idle_since: float | None = None
        self._idle_seconds = 0.0
        self._reissue: list[Admission] = []
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

    def restore(self, ready: Sequence[RolloutGroup], unfinished: Sequence[Admission]) -> None:
        """Before `start`: restore finished groups of an earlier attempt, and reissue its unfinished ones."""
        for group in ready:
            self._gate.restore(group.group_id, group.first_token_version)
            self._ready[group.group_id] = group
        self._reissue = list(unfinished)

    async def trained(self, policy_version: int) -> None:
        """The last batch is done; every engine serves `policy_version` (the old one if there was no step)."""
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
                ids = self._gate.batch(self.policy_version)
                if ids is not None:
                    return self._take(ids)
                if self.exhausted and self._gate.in_flight == 0 and not self._reissue:
                    return None
                await self._changed.wait()

    async def next_batch_ahead(self) -> list[RolloutGroup]:
        """While a batch trains, the groups to train on after it, as `next_batch`.

        Waits, also if there is none or the stream has failed, until it is cancelled; it has taken nothing then.
        """
        async with self._changed:
            while (ids := self._gate.batch(self.policy_version + 1)) is None:
                await self._changed.wait()
            return self._take(ids)

    def _take(self, ids: tuple[int, ...]) -> list[RolloutGroup]:
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
        """Seconds since the last call in which the staleness bound left all engines without work."""
        now = time.monotonic()
        idle = self._idle_seconds + (now - self._idle_since if self._idle_since is not None else 0.0)
        self._idle_seconds = 0.0
        self._idle_since = now if self._idle_since is not None else None
        return idle

    async def close(self) -> None:
        """Stop admission and cancel all groups in flight."""
        tasks = [*self._tasks, *(task for task in (self._admission, self._following) if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_admission(self) -> None:
        self._admission = asyncio.create_task(self._guarded(self._admit), name="admission")

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
                self._changed.notify_all()

    async def _admit(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._may_start() and self._free_engine() is not None)
                admission = self._draw()
                if admission is None:
                    self._changed.notify_all()
                    return
                engine = self._free_engine()
                assert engine is not None
                if not admission.holds_deadline:
                    self._gate.start(admission.group_id, self.policy_version)
                weight = self._add_load(engine, admission)
                if self._idle_since is not None:
                    self._idle_seconds += time.monotonic() - self._idle_since
                    self._idle_since = None
            name = f"group {admission.group_id}"
            task = asyncio.create_task(self._guarded(self._group, engine, admission, weight), name=name)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _may_start(self) -> bool:
        return bool(self._reissue and self._reissue[0].holds_deadline) or self._gate.may_start()

    def _draw(self) -> Admission | None:
        """The next group: one to reissue, otherwise a new prompt; None if the curriculum is exhausted."""
        if self._reissue:
            return self._reissue.pop(0)
        try:
            prompt, epoch = self._curriculum.draw()
        except CurriculumDry as end:
            self.exhausted = str(end)
            return None
        group_id = self._next_group_id
        self._next_group_id += 1
        self._journal.admit(group_id, prompt.prompt_id, epoch)
        return Admission(group_id=group_id, prompt=prompt, epoch=epoch)

    def _free_engine(self) -> EngineClient | None:
        """The serving engine with the fewest expected tokens, of those with slots for a whole group."""
        serving = self._engines.serving
        self._load = {engine: self._load.get(engine) or _Load() for engine in serving}
        free = [e for e in serving if self._load[e].completions + self._group_size <= self._max_in_flight]
        return min(free, key=lambda engine: self._load[engine].tokens, default=None)

    def _add_load(self, engine: EngineClient, admission: Admission) -> float:
        """Count the completions of a group that starts; returns the expected tokens of each, with its prompt's."""
        load, count = self._load[engine], self._group_size - len(admission.kept)
        weight = len(admission.prompt.token_ids) + self._expected_tokens
        load.completions += count
        load.tokens += count * weight
        return weight

    async def _group(self, engine: EngineClient, admission: Admission, weight: float) -> None:
        group_id, prompt = admission.group_id, admission.prompt
        missing = [index for index in range(self._group_size) if index not in admission.kept]
        drawn = admission.redraws * self._group_size
        async with asyncio.TaskGroup() as tasks:
            running = {
                index: tasks.create_task(self._completion(engine, prompt, group_id, drawn + index, weight))
                for index in missing
            }
        results = dict(admission.kept)
        for index, task in running.items():
            if (finished := task.result()) is not None:
                results[index] = finished[0]
        kept = [result for _, result in sorted(results.items()) if result is not None]
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
            if not again.holds_deadline:
                self._gate.abandon(admission.group_id)
            self._reissue.append(again)
            if self._admission is not None and self._admission.done():  # it ended when the curriculum was exhausted
                self._start_admission()
            self._changed.notify_all()

    async def _completion(
        self, engine: EngineClient, prompt: Prompt, group_id: int, index: int, weight: float
    ) -> tuple[ScoredCompletion | None] | None:
        """(one scored completion, None if it was lost); None if its engine was evicted before it finished."""
        draw = self._sampler.draw(self._seed, group_id, index)
        result: tuple[ScoredCompletion | None] | None = None
        served = self.policy_version
        try:
            found = await self._sampler.complete(engine, prompt, draw, priority=TRAINING_PRIORITY)
            newest = found.completion.last_version
            if newest > self.policy_version + 1:  # during a weight update, engines may serve the next version already
                raise EngineError(
                    f"{engine.name}: policy versions: expected at most {self.policy_version + 1}, found {newest}"
                )
            if found.completion.first_version < served:  # the gate relies on it
                raise EngineError(
                    f"{engine.name}: policy versions: expected none below {served}, which it served when the request "
                    f"was sent, found {found.completion.first_version}"
                )
            self._count_tokens(found.completion.tokens)
            self._expected_tokens += _FORGET * (found.completion.tokens - self._expected_tokens)
            result = (found,)
        except CompletionLost as lost:
            logger.warning("group %d, completion %d is left out: %s", group_id, index, lost)
            result = (None,)
        except EngineError as error:
            self._engines.evict(engine, str(error))
        async with self._changed:
            if (load := self._load.get(engine)) is not None:
                load.completions -= 1
                load.tokens -= weight
            if not any(load.completions for load in self._load.values()):
                self._idle_since = self._idle_since or time.monotonic()
            self._changed.notify_all()
        return result
