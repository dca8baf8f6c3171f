"""PipelineRL-k: completions are generated continuously while the weights change; batches leave by deadline.

    curriculum --draw--> admission --group task--> engines --> verifier --> journal --> ready --> batch
                            ^ gate: outstanding <= (k + 1) * G              gate: earliest deadline first

Three loops share one condition variable, `_changed`, which is notified of every change of state: a finished group, a
finished batch, freed engine slots, a failure.

* Admission (`_admit`, one task). Consumes: the curriculum, and groups to reissue. Waits for: the gate
  (outstanding < (k + 1) * groups_per_batch) and for an engine with slots for a whole group (`max_in_flight`
  completions per engine). Unblocked by: a batch that is done (`trained`), a completion that frees its slot.
* Group tasks (`_group`, one per outstanding group). Consume: `group_size` completions of one engine. Wait for: these
  completions and their scores. Unblocked by: the engine and the verifier; they never wait for the trainer, so every
  admitted group finishes. Each ends by moving its group to `_ready`.
* `next_batch` (the controller's training loop). Consumes: `_ready`, bounded by the gate. Waits for: a batch that the
  gate may release. Unblocked by: group tasks. Returns None when the curriculum is exhausted and nothing is
  outstanding.

The first failure in admission or a group task is raised by `next_batch`. `close` cancels all tasks.

Khatri et al. 2025, section 2 (PipelineRL, k = 8); the staleness bound is proved in `gate`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from megatron_scalerl.batching.rollout_bytes import read, rollout_of
from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.prompts.curriculum import Curriculum, CurriculumDry
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.gate import StalenessGate
from megatron_scalerl.rollouts.journal import Journal
from megatron_scalerl.rollouts.sampler import TRAINING_PRIORITY, Sampler, ScoredCompletion
from megatron_scalerl.types import CompletionLost, Prompt, RolloutGroup

logger = logging.getLogger(__name__)

Admission = tuple[int, Prompt, int]
"""(group id, prompt, epoch)"""


class RolloutStream:
    """Keeps the engines busy within the staleness bound and returns batches of scored groups."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        curriculum: Curriculum,
        engines: Sequence[EngineClient],
        sampler: Sampler,
        journal: Journal,
        next_group_id: int = 0,
        count_tokens: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """count_tokens: called with the number of tokens of every finished completion."""
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
        self._load = dict.fromkeys(engines, 0)
        self._idle_since: float | None = None
        self._idle_seconds = 0.0
        self._reissue: list[Admission] = []
        self._ready: dict[int, RolloutGroup] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._admission: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def start(self, policy_version: int) -> None:
        """Start to admit groups; the engines serve `policy_version`."""
        assert self._admission is None
        self.policy_version = policy_version
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
                    self._gate.take(ids)
                    self._changed.notify_all()
                    return [self._ready.pop(g) for g in ids]
                if self.exhausted and self._gate.in_flight == 0 and not self._reissue:
                    return None
                await self._changed.wait()

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
        tasks = [*self._tasks, *([self._admission] if self._admission else [])]
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

    async def _admit(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._gate.may_start() and self._free_engine() is not None)
                drawn = self._draw()
                if drawn is None:
                    self._changed.notify_all()
                    return
                engine = self._free_engine()
                assert engine is not None
                self._gate.start(drawn[0], self.policy_version)
                self._load[engine] += self._group_size
                if self._idle_since is not None:
                    self._idle_seconds += time.monotonic() - self._idle_since
                    self._idle_since = None
            task = asyncio.create_task(self._guarded(self._group, engine, *drawn), name=f"group {drawn[0]}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

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
        return group_id, prompt, epoch

    def _free_engine(self) -> EngineClient | None:
        """The least loaded engine, if it has slots for a whole group."""
        engine = min(self._load, key=lambda e: self._load[e])
        return engine if self._load[engine] + self._group_size <= self._max_in_flight else None

    async def _group(self, engine: EngineClient, group_id: int, prompt: Prompt, epoch: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._completion(engine, prompt, group_id, index))
                for index in range(self._group_size)
            ]
        kept = [result for task in running if (result := task.result()) is not None]
        if not kept:
            await self._reissue_group(group_id, prompt, epoch)
            return
        group = RolloutGroup(
            group_id=group_id,
            prompt=prompt,
            rollouts=tuple(rollout_of(read(found.data)) for found in kept),
            scores=tuple(found.score for found in kept),
            first_token_version=min(found.completion.first_version for found in kept),
            epoch=epoch,
            lost_completions=len(running) - len(kept),
        )
        self._journal.finish(group)
        self._curriculum.observe(prompt.prompt_id, group.pass_rate)
        async with self._changed:
            self._gate.finish(group_id, group.first_token_version)
            self._ready[group_id] = group
            self._changed.notify_all()

    async def _reissue_group(self, group_id: int, prompt: Prompt, epoch: int) -> None:
        """Generate a group whose completions are all lost again, under its id.

        This cannot repeat forever: many lost completions in a row end the run (engine.max_lost_in_a_row).
        """
        async with self._changed:
            self._gate.abandon(group_id)
            self._reissue.append((group_id, prompt, epoch))
            if self._admission is not None and self._admission.done():  # it ended when the curriculum was exhausted
                self._start_admission()
            self._changed.notify_all()

    async def _completion(
        self, engine: EngineClient, prompt: Prompt, group_id: int, index: int
    ) -> ScoredCompletion | None:
        """One scored completion, None if it was lost."""
        draw = self._sampler.draw(self._seed, group_id, index)
        result: ScoredCompletion | None = None
        try:
            result = await self._sampler.complete(engine, prompt, draw, priority=TRAINING_PRIORITY)
            newest = result.completion.last_version
            if newest > self.policy_version + 1:  # during a weight update, engines may serve the next version already
                raise EngineError(
                    f"{engine.name}: policy versions: expected at most {self.policy_version + 1}, found {newest}"
                )
            self._count_tokens(result.completion.tokens)
        except CompletionLost as lost:
            logger.warning("group %d, completion %d is left out: %s", group_id, index, lost)
        async with self._changed:
            self._load[engine] -= 1
            if not any(self._load.values()):
                self._idle_since = time.monotonic()
            self._changed.notify_all()
        return result
