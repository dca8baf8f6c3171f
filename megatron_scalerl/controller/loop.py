"""The training loop of a run: wires all components.

    curriculum -> stream (engines, interruption, gate, journal) -> filters -> advantages -> packing -> trainer
        ^                                                                                                 |
        '------------- policy_version <------------- weights <-------------- optimizer step <-------------'
                                                        '-> validation -> ledger -> metrics

A step (`_train`, `_train_on`):

1. `overlap.next_batch` waits until the gate releases groups_per_batch groups (`rollouts.gate`).
2. The cost of producing the batch is charged to the ledger. Then the journal records which groups are in the batch.
   Truncated completions and zero-variance groups are filtered out. If nothing remains, there is no optimizer step
   and no new policy version, and the batch is counted as skipped.
3. The trainer ranks make one optimizer step. Meanwhile the engines continue to generate, and the next batch is
   taken and sent if the gate releases that batch for the next version (`overlap`). The next batch is charged and
   journaled only after this optimizer step.
4. The weights are sent to the engines, the step's device time is charged to the ledger, and metrics are recorded.
5. Every validation.every_steps a validation starts, every evaluation.every_steps an evaluation (`measure`).
6. New groups may start at the new version. Every checkpoint.every_steps a checkpoint is written.

Work after a batch, by rollouts.schedule (every batch with rollouts.deterministic is treated as the end of a phase):

| | ppo_off_policy, within a phase | ppo_off_policy, end of a phase | pipeline |
|---|---|---|---|
| publish, measure | - | yes | yes |
| new groups start | at once, at the old version | after the validation | at once, during the validation |

A weight update (`_publish`): a validation on all engines is awaited first, because a validation measures one policy
version. A validation on one held engine (`measure`) does not delay the update. Then every engine pauses between two
tokens, keeps all requests, receives the weights, reports a digest and resumes (`weight_sync`). Every
weights.probe_every steps log-probs of trainer and engines are compared (`probe`). An engine that starts again during
an update gets the weights in the next update, or while the trainer waits (`overlap`).

A checkpoint (`saver`): ledger, metrics and journal are synced to disk, the trainer ranks write and commit the
checkpoint with the controller's own state (step, batches, length of the journal), and old checkpoints are deleted
(`run_folder`). With checkpoint.async_save the ranks write a copy during the next steps.

A restart (`_replay`): the journal's batches after the checkpoint are trained again with the recorded rollouts in the
same order, before anything new is generated. Groups that were in flight are issued again under the same ids.

A request to save and exit (`processes.signals`) lets a step, a checkpoint and the weights of an engine that joins be
finished, cancels all further work and saves (`_leave`). The launcher then ends the processes (`launch.launcher`).
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_scalerl.controller.measure import Measurements
from megatron_scalerl.controller.meter import Meter
from megatron_scalerl.controller.metrics import Metrics, Sink, batch_metrics, engine_metrics, step_metrics
from megatron_scalerl.controller.overlap import Overlap
from megatron_scalerl.controller.probe import Probe
from megatron_scalerl.controller.progress import Progress
from megatron_scalerl.controller.run_folder import Resumed, RunFolder, RunState
from megatron_scalerl.controller.samples import empty_reason
from megatron_scalerl.controller.saver import Saver
from megatron_scalerl.controller.token_scores import TokenScores
from megatron_scalerl.controller.weight_sync import NO_UPDATE, WeightSync
from megatron_scalerl.engine.rounds import Rounds
from megatron_scalerl.evaluation.inputs import EvaluationInputs
from megatron_scalerl.launch.placement import Fleet
from megatron_scalerl.processes.garbage import rare_full_collections
from megatron_scalerl.processes.signals import SaveAndExit
from megatron_scalerl.prompts.curriculum import Curriculum
from megatron_scalerl.prompts.dataset import PromptSet
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.tasks import tasks_of
from megatron_scalerl.rollouts.history import NO_HISTORY, BatchRecord, read_batch, read_groups, replay_draws
from megatron_scalerl.rollouts.journal import Journal
from megatron_scalerl.rollouts.sampler import Sampler
from megatron_scalerl.rollouts.stream import Admission, RolloutStream
from megatron_scalerl.rollouts.trained import write_trained
from megatron_scalerl.types import Prompt, RolloutGroup, StepReport

logger = logging.getLogger(__name__)


class Controller:
    """The training loop of one attempt, and its components."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        prompts: PromptSet,
        folder: RunFolder,
        fleet: Fleet,
        resumed: Resumed,
        sampler: Sampler,
        sync: WeightSync,
        probe: Probe,
        meter: Meter,
        progress: Progress,
        saving: SaveAndExit,
        evaluation: EvaluationInputs | None = None,
        sinks: Sequence[Sink] = (),
    ):
        """resumed: the journal (`history`) is freed after the replay. sinks: receive the metrics of every record."""
        self._recipe, self._folder, self._fleet, self._resumed = recipe, folder, fleet, resumed
        self._sync, self._probe, self._meter = sync, probe, meter
        self._saving, self._progress = saving, progress
        self._prompts = prompts.training
        start = resumed.start
        history = resumed.history
        self._empty: list[str] = []  # why the filters left no sample, for each batch since the last step
        self._scorer = TokenScores(recipe, fleet, folder.path)
        self._state = RunState(step=start.step, batches=start.batches)
        rounds = Rounds(fleet.engines, timeout_s=recipe.weights.timeout_s) if recipe.rollouts.deterministic else None
        steps = {"step": start.step, "batches": start.batches, "last_step": max(start.step, history.last_step)}
        self._metrics = Metrics(folder.path, recipe.name, **steps, sinks=sinks)
        self._measurements = Measurements(
            recipe,
            prompts,
            evaluation,
            folder=folder,
            start=start,
            state=self._state,
            engines=fleet.engines,
            sampler=sampler,
            rounds=rounds,
            meter=meter,
            metrics=self._metrics,
            progress=progress,
        )
        self._curriculum = _curriculum(recipe, prompts.training)
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
            problems=prompts.problems,
        )
        self._overlap = Overlap(
            recipe, fleet, folder.path, self._state, self._stream, sync=sync, probe=probe, meter=meter, saving=saving
        )

    async def run(self) -> str:
        """Train until all steps are made or no prompt is left; returns the reason. Raises the first failure."""
        try:
            with rare_full_collections():
                return await self._saving.run(self._run(), self._leave)
        finally:
            await self._stream.close()
            await self._measurements.close()
            await self._journal.close()
            self._metrics.close()

    async def _run(self) -> str:
        if self._resumed.start.checkpoint is not None:
            await self._fleet.trainer.load(str(self._resumed.start.checkpoint))
        await self._publish()
        self._meter.charge_startup()
        # a validation of step 0, or of a version whose validation is not recorded; nothing trains yet
        if self._phase_over and self._measurements.begin(while_training=False):
            await self._measurements.end_validation(self._overlap.while_waiting)
        await self._replay()  # replayed first, so that the stream begins at the journal's end
        self._stream.start(self._state.step)
        return await self._train()

    async def _train(self) -> str:
        """The train loop.

        Consumes: one batch of groups per iteration from the rollout stream.
        Waits for: the stream, the trainer's step, the validation in progress, the weight update, a checkpoint.
        Unblocked by: group tasks that finish (the gate holds back no group that the next batch needs), the trainer's
        answer, the engines' answers. If a process exits or hangs, `launcher.until_failure` cancels the loop.
        """
        while self._state.step < self._recipe.steps:
            begin = self._meter.elapsed
            groups = await self._overlap.next_batch()  # waits until the gate releases a batch
            if groups is None:
                return await self._finish(self._stream.exhausted or "no prompt is left", final=True)
            waited = self._meter.elapsed - begin
            if self._state.batches == 0 and self._recipe.sft.path is None:
                check_thinking(groups, self._recipe.prompts.think_end)
            # the batch is journaled before the step, so that a restart trains the same batches again
            async with self._saving.uninterrupted():
                await self._record(groups)
            await self._train_on(groups, waited)
            if len(self._empty) >= self._recipe.filters.max_empty_batches:
                reason = (
                    f"gave up at step {self._state.step} of {self._recipe.steps}: {len(self._empty)} batches in a "
                    f"row had nothing left to train on: {self._empty[-1]}; look at completions with `show`"
                )
                await self._finish(reason, gave_up=True)
                raise RuntimeError(reason)
        return await self._finish(f"all {self._recipe.steps} steps are made")

    async def _record(self, groups: Sequence[RolloutGroup]) -> None:
        """Charge the production of a batch to the ledger, then journal the batch.

        In this order, a crash in between leaves no batch in the journal without a charge.
        """
        state = self._state
        self._meter.charge_produce(state.batches)
        await self._journal.batch(
            BatchRecord(
                batch=state.batches,
                step=state.step + 1,
                policy_version=state.step,
                group_ids=tuple(group.group_id for group in groups),
            )
        )

    async def _train_on(self, groups: Sequence[RolloutGroup], waited: float = 0.0) -> None:
        """Train on a batch: at most one optimizer step and one new policy version."""
        async with self._saving.uninterrupted():
            await self._train_batch(groups, waited)
        one_by_one = self._recipe.rollouts.one_by_one
        if not one_by_one:
            await self._stream.trained(self._state.served)
        # The engines go on during a checkpoint: with new groups, or with a validation that new groups wait for
        # (rollouts.one_by_one).
        async with self._saving.uninterrupted():
            await self._saver.maybe(self._state.step, self._state.batches)
        if one_by_one:
            await self._measurements.end_validation(self._overlap.while_waiting)
            await self._stream.trained(self._state.served)

    async def _train_batch(self, groups: Sequence[RolloutGroup], waited: float) -> None:
        await self._saver.commit(wait=False)  # a checkpoint is committed only between two steps
        batch = await self._overlap.send(groups)  # after filters, advantages and the assignment to ranks
        await asyncio.to_thread(write_trained, self._folder.path, self._state.batches, batch.plan.trained)
        self._state.batches += 1
        record = {"batches": self._state.batches, "wait_for_batch_seconds": waited}
        record |= {"prompts_skipped": self._curriculum.skipped}
        record |= batch_metrics(groups, batch.plan.stats, self._state.step) | NO_UPDATE
        report = None
        if batch.step is not None:
            await self._scorer.record(batch.step, groups)
            report = await self._overlap.step(batch.step)  # meanwhile the next batch is sent
            self._sync.trained(report)
            self._state.step = report.policy_version
            record["send_seconds"] = self._overlap.send_seconds
        if self._phase_over:
            record |= await self._publish()  # updates and probes the engines, and measures both
        self._note(record | self._charge(), report, batch.plan.stats)
        if self._phase_over:
            self._measurements.begin()

    def _note(self, record: dict[str, Any], report: StepReport | None, stats: Mapping[str, float]) -> None:
        """Write a batch to the metrics and the console. report: the trainer's report of the optimizer step on the
        batch; None without a step. stats: counts of kept and dropped groups and completions (`BatchPlan.stats`)."""
        step = self._state.step
        if report is None:
            self._empty.append(empty_reason(stats))
            self._metrics.step(step, {"skipped": 1} | record)
            self._progress.skipped(step, self._empty[-1])
        else:
            self._empty.clear()
            record |= step_metrics(report)
            self._metrics.step(step, record)
            self._progress.step(step, record)

    @property
    def _phase_over(self) -> bool:
        """True at the end of a phase. Every batch ends a phase, except under the schedule ppo_off_policy."""
        return self._state.batches % self._recipe.rollouts.batches_per_update == 0

    async def _publish(self) -> dict[str, Any]:
        """Send new weights of the trainer, if any, to every engine; returns metrics for the batch's record.

        The first update at or after each multiple of weights.probe_every steps probes every engine.
        """
        state = self._state
        served_version = self._state.served
        # If the filters left no sample, the batch has made no new version.
        if state.step == served_version:
            return {}
        pinned = await self._measurements.unpin()
        update = await self._sync.publish(state.step)
        state.served = state.step
        state.digest = update.digest
        interval = self._recipe.weights.probe_every
        probe_is_due = interval and state.step // interval > served_version // interval
        probed = await self._probe.check(state.step, new_only=not probe_is_due)
        return {"pinned_seconds": pinned} | update.metrics() | probed

    def _charge(self) -> dict[str, float]:
        """Charge the batch just trained or skipped to the ledger; returns times and hours for metrics.jsonl."""
        batch = self._meter.charge_train(self._state.batches - 1, self._state.step)
        return {
            "step_seconds": batch.seconds,
            "loop_lag_seconds": self._meter.lag.take(),
            "generated_tokens_per_second": batch.tokens / max(batch.seconds, 1e-9),
            "engine_idle_seconds": self._stream.take_idle_seconds(),
            **engine_metrics(self._fleet.engines),
            "reissued_groups": self._stream.reissued_groups,
            "groups_in_flight": self._stream.in_flight,
            "groups_ready": self._stream.ready,
            self._fleet.devices.unit: self._meter.ledger.axis_at(self._state.batches),
            f"{self._fleet.devices.unit}_total": self._meter.ledger.hours(),
        }

    async def _replay(self) -> None:
        """After a restart: train the batches after the checkpoint again, then restore the stream.

        Consumes: the journal's events and groups. Waits for: trainer steps and weight updates, as in `_train`. The
        stream is not started yet, so nothing is generated.
        """
        history = self._resumed.history
        self._resumed.history = NO_HISTORY  # frees the history, since the caller keeps `resumed`
        replay_draws(self._curriculum, history)
        for record in history.batches[self._state.batches :]:
            await self._train_on(await asyncio.to_thread(read_batch, self._folder.path, history, record))
            self._meter.charge_replay()
        # Finished groups that no batch has used yet go back to the stream's gate.
        ready = await asyncio.to_thread(read_groups, self._folder.path, history, history.unbatched())
        prompts = {p.prompt_id: p for p in self._prompts}
        unfinished = [
            Admission(group_id=e.group_id, prompt=prompts[e.prompt_id], epoch=e.epoch)
            for e in history.to_reissue(ready)
        ]
        self._stream.restore(list(ready.values()), unfinished, self._state.batches)

    async def _leave(self) -> None:
        """End a run that was asked to save and exit: cancel generation and measurements, and save a checkpoint.

        A restart generates the groups in flight again.
        """
        await self._stream.close()
        await self._measurements.close()
        await self._saver.save_last(self._state.step, self._state.batches)
        logger.info("the run was asked to save and exit; its last checkpoint is of step %d", self._saver.step)

    async def _finish(self, reason: str, *, final: bool = False, gave_up: bool = False) -> str:
        """End the run: last measurements, checkpoint and charge. final, gave_up: see `RunFolder.end`."""
        await self._stream.close()
        await self._measurements.finish(self._overlap.while_waiting, self._publish)
        async with self._saving.uninterrupted():
            await self._saver.save_last(self._state.step, self._state.batches)
        self._meter.charge_validation()
        self._folder.end(reason, step=self._state.step, final=final, gave_up=gave_up)
        return reason


def check_thinking(groups: Sequence[RolloutGroup], think_end: str) -> None:
    """Raises RuntimeError if all completions that ended by themselves lack an answer after the thinking.

    think_end: the tag that closes the thinking. If empty, the whole completion is the answer and nothing is checked.
    """
    reasons = [
        score.reason
        for group in groups
        for completion, score in zip(group.completions, group.scores)
        if not completion.interrupted and not completion.truncated
    ]
    if think_end and set(reasons) == {"no_answer"}:
        raise RuntimeError(
            f"none of the first {len(reasons)} completions that end closes its thinking with {think_end!r}, so no "
            "answer can be right; set prompts.think_start and prompts.think_end to the tags that the policy writes, "
            "apply its chat template (prompts.chat_template), or make a warm start (sft)"
        )


def _curriculum(recipe: Recipe, prompts: Sequence[Prompt]) -> Curriculum:
    section = recipe.curriculum
    weights = {task.name: task.weight for task in tasks_of(recipe)}
    return Curriculum(prompts, recipe.seed, section.no_positive_resampling, section.max_epochs, weights)
