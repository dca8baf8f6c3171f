"""The training loop of a run: wires all components.

    curriculum -> stream (engines, interruption, gate, journal) -> filters -> advantages -> packing -> trainer
        ^                                                                                                 |
        '------------- policy_version <------------- weights <-------------- optimizer step <-------------'
                                                        '-> validation -> ledger -> metrics

A step (`_train`, `_train_on`):

1. `stream.next_batch` waits until the gate releases groups_per_batch groups (`rollouts.gate`).
2. The cost of producing the batch is charged and the batch's composition is journaled, in this order. Truncated
   completions and zero-variance groups are filtered out. If nothing remains, there is no optimizer step and no new
   policy version, and the batch is counted as skipped.
3. The trainer ranks make one optimizer step. Meanwhile the engines continue to generate, and the next batch is
   taken and sent if the gate releases it for the next version (`sending`). Its step 2 comes in its turn.
4. The weights are published (ppo_off_policy: after a phase's last batch), the ledger is charged, the step recorded.
5. Every validation.every_steps a validation starts (ppo_off_policy: at the end of the phase), every
   evaluation.every_steps an evaluation, every checkpoint.every_steps a checkpoint is written.

A weight update (`_publish`): a validation on all engines is awaited first, because it measures one policy version;
one on a held engine delays nothing (`measurements`). Then every engine pauses between two tokens, keeps its requests,
receives the weights, reports their digest and resumes (`weight_sync`). Only then do new groups start at the new
version. Every weights.probe_every steps log-probs of trainer and engines are compared (`probe`). An engine that is
started again meanwhile takes part in the next update, or gets the current weights while the trainer waits for a batch
(`_while_current`); it is probed then, too. With weights.store it gets them while the trainer steps
(`_while_stepping`), and is probed after the next update.

With rollouts.deterministic, and between phases of ppo_off_policy, update, probe and validation come one by one, and
only then new groups start (`engine.rounds`).

A checkpoint (`saver`): ledger, metrics and journal are synced to disk, the trainer ranks write and commit the
checkpoint with the controller's own state (step, batches, length of the journal), and old checkpoints are deleted
(`run_folder`). With checkpoint.async_save the ranks write a copy during the next steps.

A restart (`_replay`): the journal's batches after the checkpoint are trained again with the recorded rollouts in the
same order, before anything new is generated. Groups that were in flight are issued again under their old ids.

A request to save and exit (`processes.signals`) lets a step, a checkpoint and the weights of an engine that joins be
finished, and cancels everything else (`_leave`). The launcher ends the processes (`launch.launcher`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from megatron_scalerl.batching.advantages import why_empty
from megatron_scalerl.controller.evaluations import EvaluationInputs
from megatron_scalerl.controller.measurements import Measurements
from megatron_scalerl.controller.meter import Meter
from megatron_scalerl.controller.metrics import Metrics, Sink, batch_metrics, engine_metrics, step_metrics
from megatron_scalerl.controller.probe import Probe
from megatron_scalerl.controller.progress import Progress
from megatron_scalerl.controller.run_folder import ResumePoint, RunFolder
from megatron_scalerl.controller.saver import Saver
from megatron_scalerl.controller.sending import Ahead, Sender, SentBatch
from megatron_scalerl.controller.token_scores import TokenScores
from megatron_scalerl.controller.weight_sync import NO_UPDATE, WeightSync
from megatron_scalerl.engine.rounds import Rounds
from megatron_scalerl.launch.placement import Fleet
from megatron_scalerl.processes.garbage import rare_full_collections
from megatron_scalerl.processes.signals import SaveAndExit
from megatron_scalerl.processes.spans import spanned
from megatron_scalerl.prompts.curriculum import Curriculum
from megatron_scalerl.prompts.dataset import PromptSet
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.tasks import tasks_of
from megatron_scalerl.rollouts.history import BatchRecord, History, read_batch, read_groups, replay_draws
from megatron_scalerl.rollouts.journal import Journal
from megatron_scalerl.rollouts.sampler import Sampler
from megatron_scalerl.rollouts.stream import Admission, RolloutStream
from megatron_scalerl.types import RolloutGroup, StepReport

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Controller:
    """One attempt of a run."""

    _ahead: SentBatch | None = None
    """The next batch, if it was sent while the trainer stepped."""
    _skipped_in_a_row = 0
    _why_empty = ""
    _served, _digest = -1, ""  # policy version that the engines got last, and the digest of its weights

    def __init__(
        self,
        *,
        recipe: Recipe,
        prompts: PromptSet,
        folder: RunFolder,
        fleet: Fleet,
        start: ResumePoint,
        history: History,
        sampler: Sampler,
        sync: WeightSync,
        probe: Probe,
        meter: Meter,
        progress: Progress,
        saving: SaveAndExit,
        evaluation: EvaluationInputs | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        """start: the checkpoint to resume from. history: the journal at the start. sinks: of the records."""
        self._recipe, self._prompts, self._folder, self._fleet = recipe, prompts.training, folder, fleet
        self._start, self._history = start, [history]  # `_replay` takes it: it may have a million events
        self._sync, self._probe, self._saving = sync, probe, saving
        self._sender, self._scorer = Sender(recipe, fleet, folder.path), TokenScores(recipe, fleet, folder.path)
        self._meter, self._ledger, self._progress = meter, meter.ledger, progress
        self._step, self._batches = start.step, start.batches
        rounds = Rounds(fleet.engines, timeout_s=recipe.weights.timeout_s) if recipe.rollouts.deterministic else None
        last = max([start.step, *(b.step for b in history.batches)])
        at = {"step": start.step, "batches": start.batches, "last_step": last}
        self._metrics = Metrics(folder.path, recipe.name, sinks=sinks, **at)
        self._measurements = Measurements(
            recipe,
            prompts,
            evaluation or EvaluationInputs(),
            folder=folder,
            start=start,
            engines=fleet.engines,
            sampler=sampler,
            rounds=rounds,
            meter=meter,
            metrics=self._metrics,
            progress=progress,
        )
        self._curriculum = Curriculum(
            self._prompts,
            recipe.seed,
            recipe.curriculum.no_positive_resampling,
            recipe.curriculum.max_epochs,
            {task.name: task.weight for task in tasks_of(recipe)},
        )
        self._journal = Journal(folder.path, history, policy=recipe.checkpoint.rollouts)
        self._saver = Saver(recipe, folder, fleet.trainer, (meter, self._metrics, self._journal), step=start.step)
        self._stream = RolloutStream(
            recipe,
            curriculum=self._curriculum,
            engines=fleet.engines,
            sampler=sampler,
            journal=self._journal,
            next_group_id=history.admitted,
            count_tokens=meter.count_training,
            rounds=rounds,
        )

    async def run(self) -> str:
        """Train until all steps are made or no prompt is left; returns why it ended. Raises the first failure."""
        try:
            with rare_full_collections():
                return await self._saving.run(self._run(), self._leave)
        finally:
            await self._stream.close()
            await self._measurements.close()
            await self._journal.close()
            self._metrics.close()

    async def _run(self) -> str:
        if self._start.checkpoint is not None:
            await self._fleet.trainer.load(str(self._start.checkpoint))
        await self._publish()
        await self._probe.check(self._step)
        self._meter.charge_startup()
        if self._measure(beside=False):
            await self._measurements.validations.end(self._while_current)
            self._meter.charge_validation()
        await self._replay()
        self._stream.start(self._step)
        return await self._train()

    async def _train(self) -> str:
        """The train loop.

        Consumes: one batch of groups per iteration from the rollout stream.
        Waits for: the stream, the trainer's step, the validation in progress, the weight update, a checkpoint.
        Unblocked by: group tasks that finish (the gate guarantees that they suffice), the trainer's answer, the
        engines' answers. A process that exits or hangs cancels the loop from outside (`launcher.while_alive`).
        """
        while self._step < self._recipe.steps:
            begin = self._meter.elapsed
            sent, self._ahead = self._ahead, None
            groups = sent.groups if sent else await self._while_current(self._stream.next_batch())
            if groups is None:
                return await self._finish(self._stream.exhausted or "no prompt is left", final=True)
            waited = self._meter.elapsed - begin
            record = BatchRecord(
                batch=self._batches,
                step=self._step + 1,
                policy_version=self._step,
                group_ids=tuple(g.group_id for g in groups),
            )
            async with self._saving.uninterrupted():
                # before the journal: a batch in the journal must not lack the charge for producing it
                self._meter.charge_produce(self._batches)
                await self._journal.batch(record)
            await self._train_on(groups, waited, sent)
            if self._skipped_in_a_row >= self._recipe.filters.max_empty_batches:
                reason = f"{self._skipped_in_a_row} batches in a row had nothing left to train on: {self._why_empty}"
                if self._step == 0:
                    raise RuntimeError(f"{reason}, before the first step; look at completions with `show`")
                return await self._finish(reason)
        return await self._finish(f"all {self._recipe.steps} steps are made")

    async def _train_on(
        self, groups: Sequence[RolloutGroup], waited: float = 0.0, sent: SentBatch | None = None
    ) -> None:
        """One batch: at most one optimizer step and one new policy version. sent: the batch, if it was sent ahead."""
        async with self._saving.uninterrupted():
            await self._train_batch(groups, waited, sent)
        if self._phase_over and self._recipe.rollouts.one_by_one:
            if await self._measurements.validations.end(self._while_current):
                self._meter.charge_validation()
            await self._stream.trained(self._step)

    @spanned("batch")
    async def _train_batch(self, groups: Sequence[RolloutGroup], waited: float, sent: SentBatch | None) -> None:
        await self._saver.commit(wait=False)  # the trainer is idle
        begin = self._meter.elapsed
        sent = sent or await self._sender.send(groups, self._step)
        sending = self._meter.elapsed - begin
        self._batches += 1
        record: dict[str, Any] = {"batches": self._batches, "wait_for_batch_seconds": waited}
        record |= {"prompts_skipped": self._curriculum.skipped} | batch_metrics(groups, sent.stats, self._step)
        if sent.step is None:
            self._skipped_in_a_row += 1
            record |= await self._update()
            self._metrics.step(self._step, {"skipped": 1} | record | self._charge())
            self._why_empty = why_empty(sent.stats)
            self._progress.skipped(self._step, self._why_empty)
            self._measure()
            return
        self._skipped_in_a_row = 0
        await self._scorer.record(sent.step, groups)
        report, rest = await self._step_on(sent.step)
        record["send_seconds"] = sending + rest
        record["pinned_seconds"] = await self._measurements.validations.end(None)
        self._sync.trained(report)
        self._step = report.policy_version
        await self._finish_step(report, record | NO_UPDATE | await self._update())

    @property
    def _phase_over(self) -> bool:
        """True if the batches so far are whole phases: always, but for the schedule ppo_off_policy."""
        return self._batches % self._recipe.rollouts.batches_per_update == 0

    async def _update(self) -> dict[str, Any]:
        """After a batch: publish what is new at the end of a phase, then let the next batch or phase begin.

        The probe follows every weights.probe_every-th step, or the first update from then on.
        """
        before, record = self._served, dict[str, Any]()
        if not self._phase_over:
            await self._stream.trained(before)
            return record
        if self._step > before:
            record = await self._publish()
        if not self._recipe.rollouts.one_by_one:
            await self._stream.trained(self._step)
        if self._step > before:
            reached = (every := self._recipe.weights.probe_every) and self._step // every > before // every
            record |= await self._probe.check(self._step, new_only=not reached)
        return record

    async def _step_on(self, step: int) -> tuple[StepReport, float]:
        """The trainer's step, and the seconds for which it then waited until the batch sent ahead was on its way."""
        if step == self._recipe.steps:
            return await self._while_stepping(self._fleet.trainer.step(step)), 0.0
        async with Ahead(self._sender, self._stream.next_batch_ahead, step) as ahead:
            report = await self._while_stepping(self._fleet.trainer.step(step))
            begin = self._meter.elapsed
            self._ahead = await ahead.batch()
            return report, self._meter.elapsed - begin

    async def _finish_step(self, report: StepReport, record: dict[str, Any]) -> None:
        record |= self._charge() | step_metrics(report)
        self._metrics.step(self._step, record)
        self._progress.step(self._step, record)
        self._measure()
        if (every := self._recipe.checkpoint.every_steps) and self._step % every == 0:
            await self._saver.save(self._step, self._batches)
        else:
            await self._saver.commit(wait=False)

    def _measure(self, *, beside: bool = True) -> bool:
        """Start what is due if the engines hold the trainer's version; True if a validation was started."""
        return self._phase_over and self._measurements.begin(self._step, self._batches, self._digest, beside=beside)

    async def _publish(self) -> dict[str, Any]:
        """Update every engine to the trainer's weights, labeled with the current version."""
        update = await self._sync.publish(self._step)
        self._served, self._digest = self._step, update.digest
        return update.metrics()

    async def _while_current(self, work: Awaitable[T]) -> T:
        """The result of `work`, for which the trainer waits, too.

        Engines that join meanwhile get the trainer's weights, which are the current ones, and are probed before the
        result is returned. Not with rollouts.deterministic, where the probe would join a round: after the next step.
        None get them within a phase of ppo_off_policy, while the trainer is ahead of the engines.
        """
        if self._step != self._served:
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
                        await self._sync.catch_up(self._step)
                        if not self._recipe.rollouts.deterministic:
                            await self._probe.check(self._step, new_only=True)
            return await task
        finally:
            task.cancel()

    async def _while_stepping(self, work: Awaitable[T]) -> T:
        """The result of `work`, the trainer's; engines that join meanwhile get the served weights from the store.

        One that is getting them when `work` is done is waited for: a weight update would wait, too.
        """
        if self._recipe.rollouts.deterministic:
            return await work
        reading = asyncio.Lock()
        joining = asyncio.create_task(self._join_from_store(reading))
        try:
            found = await work
            await reading.acquire()
        finally:
            joining.cancel()
            await asyncio.wait([joining])
        if not joining.cancelled():
            joining.result()  # raises
        return found

    async def _join_from_store(self, reading: asyncio.Lock) -> None:
        while True:
            await self._fleet.engines.until(lambda: bool(self._sync.stored_for()))
            async with reading:
                await self._sync.catch_up_from_store(self._served)

    def _charge(self) -> dict[str, float]:
        """Charge the batch that was just trained or skipped (`meter`); its times and hours for the step record."""
        batch = self._meter.charge_train(self._batches - 1, self._step)
        return {
            "step_seconds": batch.seconds,
            "generated_tokens_per_second": batch.tokens / max(batch.seconds, 1e-9),
            "engine_idle_seconds": self._stream.take_idle_seconds(),
            **engine_metrics(self._fleet.engines),
            "reissued_groups": self._stream.reissued_groups,
            "groups_in_flight": self._stream.in_flight,
            "groups_ready": self._stream.ready,
            self._fleet.devices.unit: self._ledger.axis_at(self._batches),
            f"{self._fleet.devices.unit}_total": self._ledger.hours(),
        }

    async def _replay(self) -> None:
        """After a restart: train the batches after the checkpoint again, then restore the stream.

        Consumes: the journal's events and groups. Waits for: trainer steps and weight updates, as in `_train`. The
        stream is not started yet, so nothing is generated.
        """
        history = self._history.pop()
        replay_draws(self._curriculum, history)
        for record in history.batches[self._batches :]:
            await self._train_on(await asyncio.to_thread(read_batch, self._folder.path, history, record))
            self._meter.charge_replay()
        ready = await asyncio.to_thread(read_groups, self._folder.path, history, history.unbatched())
        prompts = {p.prompt_id: p for p in self._prompts}
        unfinished = [
            Admission(group_id=e.group_id, prompt=prompts[e.prompt_id], epoch=e.epoch)
            for e in history.to_reissue(ready)
        ]
        self._stream.restore(list(ready.values()), unfinished, self._batches)

    async def _leave(self) -> None:
        """Save what was trained since the last checkpoint. What was in flight is generated again after a restart."""
        await self._stream.close()
        await self._measurements.close()
        await self._saver.save_last(self._step, self._batches)
        logger.info("asked to save and exit: checkpoint of step %d", self._saver.step)

    async def _finish(self, reason: str, *, final: bool = False) -> str:
        """The last validation, checkpoint and charge. final: the run cannot resume, even with more steps."""
        await self._stream.close()
        version = (self._step, self._batches, self._digest)
        await self._measurements.finish(*version, self._served, self._while_current, self._publish)
        async with self._saving.uninterrupted():
            await self._saver.save_last(self._step, self._batches)
        await self._journal.removed()
        self._meter.charge_validation()
        self._folder.end(reason, step=self._step, final=final)
        return reason
