"""What goes on beside the trainer: the next batch is sent while it steps, and engines that join are served.

    trainer waits (`while_waiting`)   engines that join get its weights, the current ones, and are probed
    trainer steps (`step`)            the next batch is taken and sent, if the gate releases it for the next version;

What is sent ahead is a copy: its groups stay finished and in no batch until the journal records their batch, before
the step that trains on it. A crash or a failure in between costs the sending, and the batch is composed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from megatron_scalerl.batching.advantages import samples_of
from megatron_scalerl.batching.assignment import plan_step
from megatron_scalerl.controller.meter import Meter
from megatron_scalerl.controller.probe import Probe
from megatron_scalerl.controller.run_folder import RunState
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
    """A batch after the filters. Produced by `Sender.send`."""

    groups: tuple[RolloutGroup, ...]
    """All of its groups, in order."""
    stats: Mapping[str, float]
    """Counts of the filters (`batching.advantages.BatchPlan`)."""
    step: int | None
    """The optimizer step for which the trainer holds it; None if nothing is left to train on and nothing was sent."""


class Sender:
    """Plans batches and sends them to the trainer's ranks."""

    def __init__(self, recipe: Recipe, fleet: Fleet, run_dir: Path):
        self._recipe = recipe
        self._fleet = fleet
        self._run_dir = run_dir

    async def send(self, groups: Sequence[RolloutGroup], policy_version: int) -> SentBatch:
        """Filter a batch, plan the step that trains `policy_version` on it, and send what is left.

        Raises as `TrainerClient.prepare`, `plan_step` and the reader of `completions_of` do.
        """
        recipe = self._recipe
        plan = samples_of(
            groups,
            normalize=recipe.advantages.normalize,
            truncated=recipe.rewards.truncated,
            zero_variance=recipe.filters.zero_variance,
            reduction=recipe.loss.reduction,
        )
        if not plan.samples:
            return SentBatch(groups=tuple(groups), stats=plan.stats, step=None)
        step = plan_step(
            plan.samples,
            step=policy_version + 1,
            dp_size=self._fleet.info.dp_size,
            micro_batch_tokens=recipe.micro_batch_tokens,
            policy_version=policy_version,
        )
        await self._fleet.trainer.prepare(step, completions_of(self._run_dir, plan.sources))
        return SentBatch(groups=tuple(groups), stats=plan.stats, step=step.step)


class Ahead:
    """A batch that is taken and sent while the block of this context manager runs a step; leaves no task behind.

    One task. Consumes: at most one batch. Waits for: `take`, then the trainer's socket and the disk. It is cancelled
    at the end of the block, or by `batch` if nothing was taken.
    """

    def __init__(self, sender: Sender, take: Callable[[], Awaitable[Sequence[RolloutGroup]]], policy_version: int):
        """take: returns the groups; cancelled before that, it takes none. policy_version: trains on them."""
        self._sender = sender
        self._take = take
        self._policy_version = policy_version
        self._taken = False

    async def batch(self) -> SentBatch | None:
        """The batch, once it is sent; None if none was taken, and none will be. Raises as `Sender.send` does."""
        if not self._taken:
            self._task.cancel()
            return None
        return await self._task

    async def _send(self) -> SentBatch:
        groups = await self._take()
        self._taken = True
        return await self._sender.send(groups, self._policy_version)

    async def __aenter__(self) -> Ahead:
        self._task = asyncio.create_task(self._send(), name="batch ahead")
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancelled(self._task)


class Overlap:
    """The work beside the trainer of one attempt."""

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
        self._ahead: SentBatch | None = None
        self.send_seconds = 0.0
        """For which the trainer waited until the last batch, and the one sent ahead of the next, was on its way."""

    async def next_batch(self) -> Sequence[RolloutGroup] | None:
        """The batch that was sent ahead, else the stream's next one; None if no prompt is left."""
        if self._ahead is not None:
            return self._ahead.groups
        return await self.while_waiting(self._stream.next_batch())

    async def send(self, groups: Sequence[RolloutGroup]) -> SentBatch:
        """The batch of these groups on the trainer's ranks, where it may be already. Raises as `Sender.send` does."""
        begin = self._meter.elapsed
        sent = self._ahead
        self._ahead = None
        sent = sent or await self._sender.send(groups, self._state.step)
        self.send_seconds = self._meter.elapsed - begin
        return sent

    async def step(self, step: int) -> StepReport:
        """The trainer's step; meanwhile the next batch is sent."""
        if step == self._recipe.steps:
            return await self._fleet.trainer.step(step)
        async with Ahead(self._sender, self._stream.next_batch_ahead, step) as ahead:
            report = await self._fleet.trainer.step(step)
            begin = self._meter.elapsed
            self._ahead = await ahead.batch()
            self.send_seconds += self._meter.elapsed - begin
            return report

    async def while_waiting(self, work: Awaitable[T]) -> T:
        """The result of `work`, for which the trainer waits, too.

        Engines that join meanwhile get the trainer's weights and are probed before the result is returned. Not probed
        with rollouts.deterministic, where the probe would join a round: after the next step. None get the weights
        within a phase of ppo_off_policy, while the trainer is ahead of the engines.
        """
        if self._state.step != self._state.served:
            return await work
        task = asyncio.ensure_future(work)
        engines = self._fleet.engines
        try:
            while not task.done():
                joined = asyncio.create_task(engines.until(lambda: bool(engines.stale)))
                try:
                    await asyncio.wait({task, joined}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    joined.cancel()
                if not task.done():
                    async with self._saving.uninterrupted():
                        await self._sync.catch_up(self._state.step)
                        if not self._recipe.rollouts.deterministic:
                            await self._probe.check(self._state.step, new_only=True)
            return await task
        finally:
            task.cancel()
