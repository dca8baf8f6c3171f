"""The work that overlaps with a trainer's step: sending the next batch, and serving engines that join.

The life of a batch, in calls of the train loop:

    next_batch     takes the groups of the early batch, or else waits for the gate's next batch
    send           filters, computes advantages, assigns samples to ranks and sends the samples, unless sent early
    step           makes the optimizer step; meanwhile takes and sends the next batch if the gate releases a batch

While the trainer waits for a batch or a measurement (`while_waiting`), engines that join get the trainer's weights
and are probed.

A batch that is sent during the step on the previous batch is early. The journal records an early batch only when the
train loop takes the batch, before the batch's own step. After a crash in between, the stream still has the groups as
finished groups without a batch, and a batch is composed and sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from megatron_scalerl.algorithms import algorithm_of
from megatron_scalerl.batching.assignment import plan_step
from megatron_scalerl.controller.meter import Meter
from megatron_scalerl.controller.probe import Probe
from megatron_scalerl.controller.run_folder import RunState
from megatron_scalerl.controller.samples import BatchPlan, samples_of
from megatron_scalerl.controller.weight_sync import WeightSync
from megatron_scalerl.launch.placement import Fleet
from megatron_scalerl.processes.child_process import cancelled
from megatron_scalerl.processes.signals import SaveAndExit
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.completions import completions_of
from megatron_scalerl.rollouts.stream import RolloutStream
from megatron_scalerl.types import RolloutGroup, StepReport

T = TypeVar("T")


@record
class SentBatch:
    """A filtered and planned batch whose samples the trainer's ranks have. Produced by `Sender.send`."""

    groups: tuple[RolloutGroup, ...]
    """All groups of the batch, in order."""
    plan: BatchPlan
    """The samples that the filters left, with advantages, and the dropped groups."""
    step: int | None
    """The optimizer step for which the trainer has the batch; None if the filters left no sample to send."""


class Sender:
    """Filters and plans batches, and sends them to the trainer's ranks."""

    def __init__(self, recipe: Recipe, fleet: Fleet, run_dir: Path):
        self._recipe = recipe
        self._algorithm = algorithm_of(recipe)
        self._fleet = fleet
        self._run_dir = run_dir

    async def send(self, groups: Sequence[RolloutGroup], policy_version: int) -> SentBatch:
        """Filter a batch, plan the step that trains `policy_version`, and send the remaining samples.

        Raises the errors of `plan_step`, `TrainerClient.prepare` and `completions_of`, which reads the store.
        """
        recipe = self._recipe
        plan = samples_of(groups, self._algorithm)
        if not plan.samples:
            return SentBatch(groups=tuple(groups), plan=plan, step=None)
        step = plan_step(
            plan.samples,
            step=policy_version + 1,
            dp_size=self._fleet.info.dp_size,
            micro_batch_tokens=recipe.micro_batch_tokens,
            policy_version=policy_version,
        )
        await self._fleet.trainer.prepare(step, completions_of(self._run_dir, plan.sources))
        return SentBatch(groups=tuple(groups), plan=plan, step=step.step)


class EarlyBatch:
    """Takes and sends a batch in a task while the block of this context manager runs an optimizer step.

    Consumes: at most one batch. Waits for: `take`, then the trainer's socket and the disk. The task is cancelled at
    the end of the block, or by `batch` if `take` has returned no groups yet.
    """

    def __init__(self, sender: Sender, take: Callable[[], Awaitable[Sequence[RolloutGroup]]], policy_version: int):
        """take: waits for the groups of the batch and returns them; must take no group if cancelled. policy_version:
        the version that trains on the groups."""
        self._sender = sender
        self._take = take
        self._policy_version = policy_version
        self._groups_taken = False

    async def batch(self) -> SentBatch | None:
        """Return the batch, once sent; None if the gate has released no batch. Raises the errors of `Sender.send`."""
        if not self._groups_taken:
            # If the gate releases a batch later, `Overlap.next_batch` takes the batch for the new policy version.
            self._task.cancel()
            return None
        return await self._task

    async def _send(self) -> SentBatch:
        groups = await self._take()
        # Once groups are taken, `batch` waits for the sending and no longer cancels the task.
        self._groups_taken = True
        return await self._sender.send(groups, self._policy_version)

    async def __aenter__(self) -> EarlyBatch:
        self._task = asyncio.create_task(self._send(), name="early batch")
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancelled(self._task)


class Overlap:
    """Sends batches to the trainer during steps, and weights to joining engines while the trainer waits."""

    def __init__(
        self,
        recipe: Recipe,
        fleet: Fleet,
        run_dir: Path,
        state: RunState,
        stream: RolloutStream,
        *,
        sync: WeightSync,
        probe: Probe,
        meter: Meter,
        saving: SaveAndExit,
    ):
        self._recipe = recipe
        self._fleet = fleet
        self._state = state
        self._stream = stream
        self._sync = sync
        self._probe = probe
        self._meter = meter
        self._saving = saving
        self._sender = Sender(recipe, fleet, run_dir)
        self._early: SentBatch | None = None
        """The batch that was sent during the last step, for the next step; None if no batch was released in time."""
        self.send_seconds = 0.0
        """Seconds that the trainer waited for the samples of the last batch before the step, and after the step for
        the samples of the early batch."""

    async def next_batch(self) -> Sequence[RolloutGroup] | None:
        """The groups of the early batch, or else of the stream's next batch; None if no prompt is left."""
        if self._early is not None:
            return self._early.groups
        return await self.while_waiting(self._stream.next_batch())

    async def send(self, groups: Sequence[RolloutGroup]) -> SentBatch:
        """Send the batch of these groups, or return the early batch. Raises the errors of `Sender.send`."""
        begin = self._meter.elapsed
        batch = self._early or await self._sender.send(groups, self._state.step)
        self._early = None
        self.send_seconds = self._meter.elapsed - begin
        return batch

    async def step(self, step: int) -> StepReport:
        """Make an optimizer step, and meanwhile send the next batch early if the gate releases a batch in time."""
        # After the last step of the run no batch is needed.
        if step == self._recipe.steps:
            return await self._fleet.trainer.step(step)
        # Step N makes policy version N, and version N trains on the early batch.
        async with EarlyBatch(self._sender, self._stream.next_batch_ahead, step) as early:
            report = await self._fleet.trainer.step(step)
            begin = self._meter.elapsed
            self._early = await early.batch()
            self.send_seconds += self._meter.elapsed - begin
            return report

    async def while_waiting(self, work: Awaitable[T]) -> T:
        """Wait for `work` while the trainer is idle; returns the result of `work`.

        Engines that join meanwhile get the trainer's weights and are probed before the result is returned. With
        rollouts.deterministic these engines are probed after the next step, because requests of a probe would disturb
        a round (`engine.rounds`). Within a phase of ppo_off_policy joining engines get no weights, because the
        trainer has a later version than all engines.
        """
        if self._state.step != self._state.served:
            return await work
        task = asyncio.ensure_future(work)
        engines = self._fleet.engines
        try:
            while not task.done():
                engine_joined = asyncio.create_task(engines.until(lambda: bool(engines.stale)))
                try:
                    await asyncio.wait({task, engine_joined}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    engine_joined.cancel()
                if not task.done():
                    # Cancelling an update, as a signal to save and exit would, leaves engines paused.
                    async with self._saving.uninterrupted():
                        await self._sync.catch_up(self._state.step)
                        if not self._recipe.rollouts.deterministic:
                            await self._probe.check(self._state.step, new_only=True)
            return await task
        finally:
            task.cancel()
