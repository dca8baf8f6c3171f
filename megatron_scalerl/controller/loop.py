"""The loop: the one file that knows every box.

    curriculum -> stream (engines, interruption, gate, journal) -> filters -> advantages -> batch -> trainer
        ^                                                                                             |
        '------------- policy_version <------------- weights <-------------- optimiser step <---------'
                                                        '-> validation -> ledger -> metrics

One step, and who waits for whom:

1. `stream.next_batch` waits until the gate releases groups_per_batch groups (see `rollouts.gate`).
2. The batch's composition goes to the journal; truncated completions and zero-variance groups leave it. If
   nothing is left there is no step and no new version, and that is counted.
3. The trainer ranks make one optimiser step; the engines go on generating meanwhile.
4. The weights are broadcast: engines pause between two tokens, keep every request, take the weights and go
   on. A validation under way pins its version: the broadcast waits for it.
5. The ledger is charged (see `meter`), the record written; every n-th step a validation starts and a checkpoint is
   made.

At a restart the batches after the checkpoint are trained again with the rollouts of the journal, in the same
order, before anything new is generated; groups that were in flight are issued again under their old ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from megatron_scalerl.batching.advantages import samples_of
from megatron_scalerl.batching.packing import pack
from megatron_scalerl.controller.meter import Meter
from megatron_scalerl.controller.metrics import Metrics
from megatron_scalerl.controller.probe import Probe
from megatron_scalerl.controller.progress import Progress
from megatron_scalerl.controller.run_folder import ResumePoint, RunFolder
from megatron_scalerl.controller.step_record import group_record
from megatron_scalerl.controller.validation import validate
from megatron_scalerl.controller.weight_sync import WeightSync
from megatron_scalerl.launch.fleet import Fleet
from megatron_scalerl.prompts.curriculum import Curriculum
from megatron_scalerl.prompts.dataset import PromptSet
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import RecipeError
from megatron_scalerl.rollouts.gate import StalenessGate
from megatron_scalerl.rollouts.journal import BatchRecord, History, Journal, read_batch, read_groups
from megatron_scalerl.rollouts.sampler import Sampler
from megatron_scalerl.rollouts.stream import RolloutStream
from megatron_scalerl.types import PassRate, RolloutGroup, StepReport


class Controller:
    """One attempt of a run."""

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
    ) -> None:
        """start: the checkpoint to go on from. history: the journal as it was when this attempt began."""
        self._recipe = recipe
        self._training, self._held_out = prompts.training, prompts.held_out
        self._folder = folder
        self._fleet = fleet
        self._start = start
        self._history = history
        self._sampler, self._sync, self._probe = sampler, sync, probe
        self._meter, self._ledger = meter, meter.ledger
        self._progress = progress
        self._step = self._saved_step = start.step
        self._batches = start.batches
        self._empty_in_a_row = 0
        self._validation: asyncio.Task[None] | None = None
        self._metrics = Metrics(
            folder.path,
            recipe.name,
            step=start.step,
            batches=start.batches,
            last_step=max([start.step, *(b.step for b in history.batches)]),
        )
        self._curriculum = Curriculum(
            self._training,
            recipe.seed,
            recipe.curriculum.no_positive_resampling,
            recipe.curriculum.max_epochs,
        )
        self._journal = Journal(folder.path)
        self._stream = RolloutStream(
            curriculum=self._curriculum,
            engines=fleet.engines,
            sampler=sampler,
            journal=self._journal,
            gate=StalenessGate(
                groups_per_batch=recipe.rollouts.groups_per_batch,
                max_staleness_steps=recipe.rollouts.max_staleness_steps,
            ),
            group_size=recipe.rollouts.group_size,
            max_in_flight=recipe.rollouts.max_in_flight,
            seed=recipe.seed,
            next_group_id=sum(e["event"] == "admit" for e in history.events),
            count_tokens=meter.count_training,
        )

    async def run(self) -> str:
        """Train until the steps are made or no prompt is left; returns why it ended."""
        try:
            return await self._run()
        finally:
            await self._stream.close()
            if self._validation is not None:
                self._validation.cancel()
                await asyncio.gather(self._validation, return_exceptions=True)
            self._metrics.close()
            self._journal.close()

    async def _run(self) -> str:
        if self._start.checkpoint is not None:
            await self._fleet.trainer.load(str(self._start.checkpoint))
        await self._sync.connect()
        await self._publish()
        await self._probe.check(self._step)
        self._meter.startup()
        if self._validation_due():
            self._begin_validation()
            await self._await_validation()
            self._meter.validated()
        await self._replay()
        self._stream.start(self._step)
        return await self._train()

    async def _train(self) -> str:
        while self._step < self._recipe.steps:
            asked = self._meter.elapsed
            groups = await self._stream.next_batch()
            if groups is None:
                return await self._finish(self._stream.dry or "no prompt is left", final=True)
            waited = self._meter.elapsed - asked
            # before the journal: what producing a batch cost must not be lost with the batch in it
            self._meter.produced(self._batches)
            record = BatchRecord(
                batch=self._batches,
                step=self._step + 1,
                policy_version=self._step,
                group_ids=tuple(g.group_id for g in groups),
            )
            self._journal.batch(record)
            await self._train_on(groups, waited)
            if self._empty_in_a_row >= self._recipe.filters.max_empty_batches:
                return await self._finish(
                    f"{self._empty_in_a_row} batches in a row had nothing left to train on (filters)"
                )
        return await self._finish(f"all {self._recipe.steps} steps are made")

    async def _train_on(self, groups: Sequence[RolloutGroup], waited: float = 0.0) -> None:
        """One batch: at most one step, one new version."""
        recipe = self._recipe
        plan = samples_of(
            groups,
            normalize=recipe.advantages.normalize,
            truncated=recipe.rewards.truncated,
            zero_variance=recipe.filters.zero_variance,
            reduction=recipe.loss.reduction,
        )
        self._batches += 1
        record: dict[str, Any] = {"batches": self._batches, "wait_for_batch_seconds": waited}
        record |= group_record(groups, plan.stats, self._step)
        if not plan.samples:
            self._empty_in_a_row += 1
            await self._stream.trained(self._step)
            self._metrics.step(self._step, {"skipped": 1} | record | self._charge())
            self._progress.skipped(self._step)
            return
        self._empty_in_a_row = 0
        info = self._fleet.info
        batches = pack(
            plan.samples,
            step=self._step + 1,
            dp_size=info.dp_size,
            micro_batch_tokens=recipe.micro_batch_tokens,
            pad_multiple=info.pad_multiple,
            policy_version=self._step,
        )
        report = await self._fleet.trainer.step(batches)
        record["pinned_seconds"] = await self._await_validation()
        self._step = report.policy_version
        record |= await self._publish()
        if recipe.weights.probe_every and self._step % recipe.weights.probe_every == 0:
            record |= await self._probe.check(self._step)
        await self._finish_step(report, record)

    async def _finish_step(self, report: StepReport, record: dict[str, Any]) -> None:
        record |= self._charge()
        record |= {
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "tokens": report.tokens,
            "train_seconds": report.seconds,
            **report.metrics,
        }
        self._metrics.step(self._step, record)
        self._progress.step(self._step, record)
        if self._validation_due():
            self._begin_validation()
        every = self._recipe.checkpoint.every_steps
        if every and self._step % every == 0:
            await self._save()

    async def _publish(self) -> dict[str, float]:
        """Every engine serves the trainer's weights under the present version when this returns."""
        update = await self._sync.publish(self._step)
        await self._stream.trained(self._step)
        return {
            "publish_seconds": update.seconds_total,
            "engine_paused_seconds": update.seconds_paused,
            "weight_bytes": float(update.bytes),
        }

    def _begin_validation(self, *, last: bool = False) -> None:
        """Start a validation of the present version; the next broadcast waits for it."""
        assert self._validation is None
        settings = self._recipe.validation
        at_an_end = last or self._step in (0, self._recipe.steps)
        generations = settings.end_generations if at_an_end else None
        self._validation = asyncio.create_task(
            self._validate(
                self._step,
                generations or settings.generations,
                hours=self._ledger.axis_at(self._batches),
                hours_total=self._ledger.hours(),
            )
        )

    async def _validate(self, step: int, generations: int, *, hours: float, hours_total: float) -> None:
        result = await validate(
            engines=self._fleet.engines,
            sampler=self._sampler,
            prompts=self._held_out,
            settings=self._recipe.validation,
            generations=generations,
            policy_version=step,
            max_in_flight=self._recipe.rollouts.max_in_flight,
            count_tokens=self._meter.count_validation,
        )
        pass_rate = PassRate(
            step=step,
            policy_version=result.policy_version,
            pass_rate=result.pass_rate,
            prompts=result.prompts,
            generations=result.generations,
            gpu_hours=hours,
            gpu_hours_total=hours_total,
            truncated_share=result.truncated_share,
            interrupted_share=result.interrupted_share,
            mean_completion_tokens=result.mean_completion_tokens,
            entropy=result.entropy,
            lost_completions=result.lost_completions,
        )
        self._metrics.validation(pass_rate, by_prompt=result.by_prompt)
        self._progress.validation(pass_rate)

    async def _await_validation(self) -> float:
        """Wait for a validation under way; returns the seconds it took."""
        if self._validation is None:
            return 0.0
        began = self._meter.elapsed
        await self._validation
        self._validation = None
        waited = self._meter.elapsed - began
        self._meter.pinned_seconds += waited
        return waited

    def _charge(self) -> dict[str, float]:
        """Charge the batch that is done with; see `meter`."""
        batch = self._meter.trained(self._batches - 1, self._step)
        return {
            "step_seconds": batch.seconds,
            "generated_tokens_per_second": batch.tokens / max(batch.seconds, 1e-9),
            "engine_idle_seconds": self._stream.take_idle_seconds(),
            "groups_in_flight": self._stream.in_flight,
            "groups_ready": self._stream.ready,
            f"{self._fleet.devices.unit}": self._ledger.axis_at(self._batches),
            f"{self._fleet.devices.unit}_total": self._ledger.hours(),
        }

    async def _replay(self) -> None:
        """After a restart: train the journal's later batches again, then hand the rest to the stream."""
        history = self._history
        _replay_draws(self._curriculum, history)
        for record in history.batches[self._batches :]:
            await self._train_on(read_batch(self._folder.path, history, record))
            self._meter.repeated()
        ready = read_groups(self._folder.path, history, history.unbatched())
        known = {p.prompt_id: p for p in self._training}
        again = [(e["group_id"], known[e["prompt_id"]], e["epoch"]) for e in history.to_issue_again(ready)]
        self._stream.restore(list(ready.values()), again)

    async def _save(self) -> None:
        # batches before a checkpoint are not trained again: what is recorded of them must be on the disk first
        self._ledger.sync()
        self._metrics.sync()
        await self._fleet.trainer.save(
            str(self._folder.checkpoint(self._step)),
            {"step": self._step, "batches": self._batches, "run_id": self._folder.run_id},
        )
        self._saved_step = self._step
        self._folder.keep_checkpoints(self._recipe.checkpoint.keep, newest=self._step)

    async def _finish(self, reason: str, *, final: bool = False) -> str:
        """The last validation, checkpoint and charge. `final`: more steps would not help."""
        await self._stream.close()
        await self._await_validation()
        if self._recipe.validation.every_steps and not self._metrics.has_validation(self._step):
            self._begin_validation(last=True)
            await self._await_validation()
        if self._step > self._saved_step:
            await self._save()
        self._meter.validated()
        self._folder.end(reason, step=self._step, final=final)
        return reason

    def _validation_due(self) -> bool:
        """Also at a restart, if the attempt before ended before this step's validation did."""
        every = self._recipe.validation.every_steps
        return bool(every) and self._step % every == 0 and not self._metrics.has_validation(self._step)


def _replay_draws(curriculum: Curriculum, history: History) -> None:
    """Bring the curriculum to where the journal ends by replaying its draws and pass rates."""
    for event in history.events:
        if event["event"] == "admit":
            prompt, _ = curriculum.draw()
            if prompt.prompt_id != event["prompt_id"]:
                raise RecipeError(
                    f"journal.jsonl: expected group {event['group_id']} to draw prompt {prompt.prompt_id}, "
                    f"found {event['prompt_id']} (prompts, held-out split and seed must not change within a run)"
                )
        elif event["event"] == "finish":
            curriculum.observe(event["prompt_id"], event["pass_rate"])
