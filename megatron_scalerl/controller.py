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
5. The ledger is charged, the record written; every n-th step a validation starts and a checkpoint is made.

At a restart the batches after the checkpoint are trained again with the rollouts of the journal, in the same
order, before anything new is generated; groups that were in flight are issued again under their old ids.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_scalerl.advantages import samples_of
from megatron_scalerl.batch import pack
from megatron_scalerl.launch.fleet import Fleet
from megatron_scalerl.ledger import Ledger
from megatron_scalerl.metrics import Metrics
from megatron_scalerl.preflight import Inputs
from megatron_scalerl.probe import Probe
from megatron_scalerl.progress import Progress
from megatron_scalerl.prompts.curriculum import Curriculum
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rewards.verifier import VerifierPool
from megatron_scalerl.rollouts.gate import StalenessGate
from megatron_scalerl.rollouts.journal import BatchRecord, History, Journal, read_groups, read_history
from megatron_scalerl.rollouts.sampler import Sampler
from megatron_scalerl.rollouts.stream import RolloutStream
from megatron_scalerl.run_folder import RunFolder
from megatron_scalerl.step_record import group_record
from megatron_scalerl.types import PassRate, RolloutGroup, StepReport
from megatron_scalerl.validation import Validation, validate
from megatron_scalerl.weights.sync import WeightSync


@dataclass
class Clock:
    """Wall time since the last charge, and the parts of it that are not the step's own."""

    since: float = field(default_factory=time.monotonic)
    pinned_seconds: float = 0.0
    """Time in which the trainer stood still because a validation pinned the version."""
    training_tokens: int = 0
    """Tokens of training completions at the last charge."""
    validation_tokens: int = 0
    """Tokens that validations generated since the last charge."""


class Controller:
    """One life of a run."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        inputs: Inputs,
        folder: RunFolder,
        fleet: Fleet,
        verifier: VerifierPool,
        progress: Progress,
    ) -> None:
        self._recipe = recipe
        self._training = inputs.prompts.training
        self._held_out = inputs.prompts.held_out
        self._folder = folder
        self._fleet = fleet
        self._progress = progress
        self._step = self._saved_step = 0
        self._batches = 0
        self._empty_in_a_row = 0
        self._validation: asyncio.Task[None] | None = None
        self._clock = Clock()
        self._ledger = Ledger(folder.path / "ledger.jsonl", fleet.unit, incarnation=folder.incarnation)
        self._metrics = Metrics(folder.path, recipe.name)
        self._sampler = Sampler(recipe, inputs.tokenizer, verifier)
        self._verifier = verifier
        self._sync = WeightSync(fleet.trainer, fleet.engines, recipe)
        self._probe = Probe(recipe, self._sampler, fleet, [*inputs.prompts.training, *self._held_out])
        self._curriculum = Curriculum(
            inputs.prompts.training,
            recipe.seed,
            recipe.curriculum.no_positive_resampling,
            recipe.curriculum.max_epochs,
        )
        self._history = read_history(folder.path)
        self._journal = Journal(folder.path)
        self._stream = RolloutStream(
            curriculum=self._curriculum,
            engines=fleet.engines,
            sampler=self._sampler,
            journal=self._journal,
            gate=StalenessGate(
                groups_per_batch=recipe.rollouts.groups_per_batch,
                max_staleness_steps=recipe.rollouts.max_staleness_steps,
            ),
            group_size=recipe.rollouts.group_size,
            max_in_flight=recipe.rollouts.max_in_flight,
            seed=recipe.seed,
            next_group_id=sum(e["event"] == "admit" for e in self._history.events),
        )

    async def run(self) -> str:
        """Train until the steps are made or no prompt is left; returns why it ended."""
        checkpoint = self._folder.latest_checkpoint()
        if checkpoint is not None:
            extra = await self._fleet.trainer.load(str(checkpoint))
            self._step, self._batches = extra["step"], extra["batches"]
            self._saved_step = self._step
        self._metrics.roll_back(self._step)
        self._ledger.roll_back(self._step)
        await self._sync.connect()
        self._charge_startup()
        await self._publish()
        await self._probe.check(self._step)
        # at a restart too, if the last life ended before this version's validation did
        if self._due(self._recipe.validation.every_steps) and not self._metrics.has_validation(self._step):
            self._begin_validation()
            await self._pinned()
            self._charge()
        await self._replay()
        self._stream.start(self._step)
        try:
            return await self._train()
        finally:
            await self._stream.close()

    async def _train(self) -> str:
        while self._step < self._recipe.steps:
            asked = time.monotonic()
            groups = await self._stream.next_batch()
            if groups is None:
                await self._close_run()
                return self._stream.dry or "no prompt is left"
            waited = time.monotonic() - asked
            record = BatchRecord(
                batch=self._batches,
                step=self._step + 1,
                policy_version=self._step,
                group_ids=tuple(g.group_id for g in groups),
            )
            self._journal.batch(record)
            await self._train_on(groups, waited)
            if self._empty_in_a_row >= self._recipe.filters.max_empty_batches:
                await self._close_run()
                return f"{self._empty_in_a_row} batches in a row had nothing left to train on (filters)"
        await self._close_run()
        return f"all {self._recipe.steps} steps are made"

    async def _train_on(self, groups: Sequence[RolloutGroup], waited: float) -> None:
        """One batch: at most one step, one new version."""
        recipe = self._recipe
        plan = samples_of(
            groups,
            normalise=recipe.advantages.normalise,
            truncated=recipe.rewards.truncated,
            zero_variance=recipe.filters.zero_variance,
            reduction=recipe.loss.reduction,
        )
        self._batches += 1
        record: dict[str, Any] = {"wait_for_batch_seconds": waited} | group_record(groups, plan.stats, self._step)
        if not plan.samples:
            self._empty_in_a_row += 1
            await self._stream.trained(self._step)
            self._charge()
            self._metrics.step(self._step, {"skipped": 1} | record)
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
        record["pinned_seconds"] = await self._pinned()
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
        if self._due(self._recipe.validation.every_steps):
            self._begin_validation()
        if self._due(self._recipe.checkpoint.every_steps):
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
            self._validate(self._step, self._ledger.axis, self._ledger.hours(), generations or settings.generations)
        )

    async def _validate(self, step: int, hours: float, hours_total: float, generations: int) -> None:
        result = await validate(
            engines=self._fleet.engines,
            sampler=self._sampler,
            prompts=self._held_out,
            settings=self._recipe.validation,
            generations=generations,
            policy_version=step,
            max_in_flight=self._recipe.rollouts.max_in_flight,
        )
        self._clock.validation_tokens += result.generated_tokens
        self._record_validation(step, hours, hours_total, result)

    def _record_validation(self, step: int, hours: float, hours_total: float, result: Validation) -> None:
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
        )
        self._metrics.validation(pass_rate, by_prompt=result.by_prompt)
        self._progress.validation(pass_rate)

    async def _pinned(self) -> float:
        """Wait for a validation under way; returns the seconds it took."""
        if self._validation is None:
            return 0.0
        began = time.monotonic()
        await self._validation
        self._validation = None
        waited = time.monotonic() - began
        self._clock.pinned_seconds += waited
        return waited

    def _charge_startup(self) -> None:
        """What was held before the first weights: a role of its own, off the forecast's axis."""
        self._clock = Clock()
        seconds = self._clock.since - self._fleet.held_since
        self._ledger.charge(self._step, "startup", self._fleet.devices, seconds)

    def _charge(self) -> dict[str, float]:
        """Charge the time since the last charge; see `ledger` for the split."""
        clock, now = self._clock, time.monotonic()
        elapsed = now - clock.since
        training = self._stream.generated_tokens - clock.training_tokens
        share = clock.validation_tokens / max(1, training + clock.validation_tokens)
        trainers, engines = self._fleet.trainer_devices, self._fleet.engine_devices
        charge = self._ledger.charge
        charge(self._step, "trainer", trainers, elapsed - clock.pinned_seconds)
        charge(self._step, "engine", engines * (1 - share), elapsed)
        if clock.validation_tokens:
            charge(self._step, "validation", engines * share, elapsed)
            charge(self._step, "validation", trainers, clock.pinned_seconds)
        generated = training + clock.validation_tokens
        self._clock = Clock(since=now, training_tokens=self._stream.generated_tokens)
        return {
            "step_seconds": elapsed,
            "generated_tokens_per_second": generated / max(elapsed, 1e-9),
            "engine_idle_seconds": self._stream.take_idle_seconds(),
            "groups_in_flight": self._stream.in_flight,
            "groups_ready": self._stream.ready,
            f"{self._fleet.unit}": self._ledger.axis,
            f"{self._fleet.unit}_total": self._ledger.hours(),
        }

    async def _replay(self) -> None:
        """After a restart: train the journal's later batches again, then hand the rest to the stream."""
        history = self._history
        known = {p.prompt_id: p for p in self._training}
        _draw_again(self._curriculum, history)
        for record in history.batches[self._batches :]:
            groups = read_groups(self._folder.path, history, record.group_ids)
            await self._train_on([groups[g] for g in record.group_ids], 0.0)
        ready = read_groups(self._folder.path, history, history.unbatched())
        unfinished = [(e["group_id"], known[e["prompt_id"]], e["epoch"]) for e in history.unfinished]
        self._stream.restore(list(ready.values()), unfinished)

    async def _save(self) -> None:
        await self._fleet.trainer.save(
            str(self._folder.checkpoint(self._step)),
            {"step": self._step, "batches": self._batches, "run_id": self._folder.run_id},
        )
        self._saved_step = self._step
        self._folder.keep_checkpoints(self._recipe.checkpoint.keep)

    async def _close_run(self) -> None:
        """The last validation, checkpoint and charge."""
        await self._stream.close()
        await self._pinned()
        every = self._recipe.validation.every_steps
        if every and self._step % every:
            self._begin_validation(last=True)
            await self._pinned()
        self._charge()
        if self._step > self._saved_step:
            await self._save()
        self._metrics.close()
        self._ledger.close()
        self._journal.close()

    def _due(self, every_steps: int) -> bool:
        return bool(every_steps) and self._step % every_steps == 0


def _draw_again(curriculum: Curriculum, history: History) -> None:
    """Bring the curriculum to where the journal ends by living through its events once more."""
    for event in history.events:
        if event["event"] == "admit":
            prompt, _ = curriculum.draw()
            if prompt.prompt_id != event["prompt_id"]:
                raise ValueError(
                    f"journal.jsonl: expected group {event['group_id']} to draw prompt {prompt.prompt_id}, "
                    f"found {event['prompt_id']} (prompts, held-out split and seed must not change within a run)"
                )
        elif event["event"] == "finish":
            curriculum.observe(event["prompt_id"], event["pass_rate"])
