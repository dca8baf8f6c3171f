"""PipelineRL-k: completions flow continuously, weights change under them, batches leave by deadline.

    curriculum --draw--> admission --group task--> engines --> verifier --> journal --> ready --> batch
                            ^ gate: outstanding <= (k + 1) * G              gate: earliest deadline first

Who fills what, who empties it, and its bound:

* group tasks: started by `_admit`, at most (k + 1) * groups_per_batch outstanding (the gate), at most
  `max_in_flight` completions on one engine; each ends by putting its group into `_ready`.
* `_ready`: emptied by `next_batch`, bounded by the same gate.

One condition variable carries every change of state: a finished group, a finished step, a failure. It
closes when the curriculum is dry and nothing is outstanding, or by `close`. A failing group task ends the
stream: `next_batch` raises its exception.

Khatri et al. 2025, section 2 (PipelineRL, k = 8); the staleness rules are proved in `gate`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.prompts.curriculum import Curriculum, CurriculumDry
from megatron_scalerl.rollouts.gate import StalenessGate
from megatron_scalerl.rollouts.journal import Journal
from megatron_scalerl.rollouts.sampler import TRAINING_PRIORITY, Sampler
from megatron_scalerl.types import CompletionLost, Prompt, Rollout, RolloutGroup, Score

logger = logging.getLogger(__name__)


class RolloutStream:
    """Keeps the engines busy within the staleness bound and hands out batches of scored groups."""

    def __init__(
        self,
        *,
        curriculum: Curriculum,
        engines: Sequence[EngineClient],
        sampler: Sampler,
        journal: Journal,
        gate: StalenessGate,
        group_size: int,
        max_in_flight: int,
        seed: int,
        next_group_id: int = 0,
        count_tokens: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """count_tokens: told the number of tokens of every completion when it is finished."""
        self.policy_version = 0
        self.completions = 0
        """Completions finished since the start of this process."""
        self._count_tokens = count_tokens
        self._idle_since: float | None = None
        self._idle_seconds = 0.0
        self._curriculum = curriculum
        self._load = dict.fromkeys(engines, 0)
        self._sampler = sampler
        self._journal = journal
        self._gate = gate
        self._group_size = group_size
        self._max_in_flight = max_in_flight
        self._seed = seed
        self._next_group_id = next_group_id
        self._reissue: list[tuple[int, Prompt, int]] = []
        self._ready: dict[int, RolloutGroup] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._admission: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self.dry: str | None = None
        """Why no prompt is left, once that is so."""

    def start(self, policy_version: int) -> None:
        """Begin to admit groups; the engines serve `policy_version`."""
        assert self._admission is None
        self.policy_version = policy_version
        self._admission = asyncio.create_task(self._admit(), name="admission")

    def restore(self, ready: Sequence[RolloutGroup], unfinished: Sequence[tuple[int, Prompt, int]]) -> None:
        """Before `start`: finished groups of an earlier life, and (group_id, prompt, epoch) to issue again."""
        for group in ready:
            self._gate.restore(group.group_id, group.first_token_version)
            self._ready[group.group_id] = group
        self._reissue = list(unfinished)

    async def trained(self, policy_version: int) -> None:
        """The last batch is done with; every engine serves `policy_version` (the old one if it made no step)."""
        async with self._changed:
            self.policy_version = policy_version
            self._gate.trained()
            self._changed.notify_all()

    async def next_batch(self) -> list[RolloutGroup] | None:
        """The next groups to train on at the present version, earliest deadline first.

        None once the curriculum is dry and no full batch is left. Raises what ended the stream.
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
                if self.dry and self._gate.in_flight == 0 and not self._reissue:
                    return None
                await self._changed.wait()

    @property
    def in_flight(self) -> int:
        """Groups that are being generated or scored."""
        return self._gate.in_flight

    @property
    def ready(self) -> int:
        """Finished groups that wait for a batch."""
        return self._gate.ready

    def take_idle_seconds(self) -> float:
        """Seconds since the last call in which the bound on staleness left the engines without work."""
        idle = self._idle_seconds + (time.monotonic() - self._idle_since if self._idle_since is not None else 0.0)
        self._idle_seconds = 0.0
        self._idle_since = time.monotonic() if self._idle_since is not None else None
        return idle

    async def close(self) -> None:
        """Stop admission and cancel what is in flight."""
        tasks = [*self._tasks, *([self._admission] if self._admission else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _admit(self) -> None:
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._gate.may_start() and self._engine() is not None)
                    drawn = self._draw()
                    if drawn is None:
                        self._changed.notify_all()
                        return
                    group_id, prompt, epoch = drawn
                    engine = self._engine()
                    assert engine is not None
                    self._gate.start(group_id, self.policy_version)
                    self._load[engine] += self._group_size
                    if self._idle_since is not None:
                        self._idle_seconds += time.monotonic() - self._idle_since
                        self._idle_since = None
                task = asyncio.create_task(self._group(engine, group_id, prompt, epoch), name=f"group {group_id}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except asyncio.CancelledError:
            raise
        except BaseException as failure:
            await self._fail(failure)

    def _draw(self) -> tuple[int, Prompt, int] | None:
        """The next group: one to issue again, else a fresh prompt; None when the curriculum is dry."""
        if self._reissue:
            return self._reissue.pop(0)
        try:
            prompt, epoch = self._curriculum.draw()
        except CurriculumDry as end:
            self.dry = str(end)
            return None
        group_id = self._next_group_id
        self._next_group_id += 1
        self._journal.admit(group_id, prompt.prompt_id, epoch)
        return group_id, prompt, epoch

    def _engine(self) -> EngineClient | None:
        """The least loaded engine that has room for a whole group."""
        engine = min(self._load, key=lambda e: self._load[e])
        return engine if self._load[engine] + self._group_size <= self._max_in_flight else None

    async def _group(self, engine: EngineClient, group_id: int, prompt: Prompt, epoch: int) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._completion(engine, prompt, group_id, index))
                    for index in range(self._group_size)
                ]
            done = [task.result() for task in running]
            kept = [result for result in done if result is not None]
            if not kept:
                await self._again(group_id, prompt, epoch)
                return
            group = RolloutGroup(
                group_id=group_id,
                prompt=prompt,
                rollouts=tuple(rollout for rollout, _ in kept),
                scores=tuple(score for _, score in kept),
                first_token_version=min(rollout.policy_versions[0] for rollout, _ in kept),
                epoch=epoch,
                lost_completions=len(done) - len(kept),
            )
            self._journal.finish(group)
            self._curriculum.observe(prompt.prompt_id, group.pass_rate)
            async with self._changed:
                self._gate.finish(group_id, group.first_token_version)
                self._ready[group_id] = group
                self._changed.notify_all()
        except asyncio.CancelledError:
            raise
        except BaseException as failure:
            await self._fail(failure)

    async def _again(self, group_id: int, prompt: Prompt, epoch: int) -> None:
        """Every completion of a group was lost: issue it again under its id. What loses them all ends the run."""
        async with self._changed:
            self._gate.abandon(group_id)
            self._reissue.append((group_id, prompt, epoch))
            if self._admission is not None and self._admission.done():  # it ended when the curriculum was dry
                self._admission = asyncio.create_task(self._admit(), name="admission")
            self._changed.notify_all()

    async def _completion(
        self, engine: EngineClient, prompt: Prompt, group_id: int, index: int
    ) -> tuple[Rollout, Score] | None:
        """One scored completion, None if it was lost."""
        draw = self._sampler.draw(self._seed, group_id, index)
        result: tuple[Rollout, Score] | None = None
        try:
            result = await self._sampler.complete(engine, prompt, draw, priority=TRAINING_PRIORITY)
            newest = max(result[0].policy_versions)
            if newest > self.policy_version + 1:  # the next one while it is being handed over
                raise EngineError(
                    f"{engine.name}: policy versions: expected at most {self.policy_version + 1}, found {newest}"
                )
            self.completions += 1
            self._count_tokens(len(result[0].token_ids))
        except CompletionLost as lost:
            logger.warning("group %d, completion %d is left out: %s", group_id, index, lost)
        async with self._changed:
            self._load[engine] -= 1
            if not any(self._load.values()):
                self._idle_since = time.monotonic()
            self._changed.notify_all()
        return result

    async def _fail(self, failure: BaseException) -> None:
        """Keep the first failure; `next_batch` raises it."""
        if isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        async with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()
