"""What a run measures of its policy beside training: validations and evaluations, and the engine held for both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from megatron_scalerl.controller.evaluations import EvaluationInputs, Evaluations
from megatron_scalerl.controller.held_engine import HeldEngine
from megatron_scalerl.controller.meter import Meter
from megatron_scalerl.controller.metrics import Metrics
from megatron_scalerl.controller.progress import Progress
from megatron_scalerl.controller.run_folder import ResumePoint, RunFolder
from megatron_scalerl.controller.validation import Validations
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.engine.rounds import Rounds
from megatron_scalerl.prompts.dataset import PromptSet
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.sampler import Sampler

_TRIES = 2
"""Attempts at the last evaluation, beside one that was in progress."""


class Measurements:
    """The validations and the evaluations of one attempt."""

    def __init__(
        self,
        recipe: Recipe,
        prompts: PromptSet,
        evaluation: EvaluationInputs,
        *,
        folder: RunFolder,
        start: ResumePoint,
        engines: Membership,
        sampler: Sampler,
        rounds: Rounds | None,
        meter: Meter,
        metrics: Metrics,
        progress: Progress,
    ) -> None:
        """start: the checkpoint from which the attempt goes on."""
        held = HeldEngine(engines, meter)
        self._recipe, self._metrics, self._meter, self._engines = recipe, metrics, meter, engines
        self.validations = Validations(
            recipe,
            prompts.held_out,
            engines=engines,
            held=held,
            sampler=sampler,
            rounds=rounds,
            meter=meter,
            metrics=metrics,
            progress=progress,
        )
        self._evaluations = Evaluations(
            recipe,
            evaluation,
            folder.path,
            run_id=folder.attempt.run_id,
            start_step=start.step,
            engines=engines,
            held=held,
            sampler=sampler,
            meter=meter,
        )

    def begin(self, step: int, batches: int, digest: str, *, beside: bool) -> bool:
        """Start what is due of version `step`, which the engines hold; True if a validation was started.

        batches: charged so far. digest: of the version's weights. beside: the training goes on meanwhile. The
        evaluation comes first, so that both share one held engine, also where the validation is on all others.
        """
        self._evaluations.begin(step, batches, digest)
        return self.validations.due(step) and self.validations.begin(step, batches, beside=beside)

    async def finish(
        self,
        step: int,
        batches: int,
        digest: str,
        served: int,
        while_current: Callable[[Awaitable[None]], Awaitable[None]],
        publish: Callable[[], Awaitable[object]],
    ) -> None:
        """At the end of the run: what is in progress, the last validation, an evaluation that is due.

        served: version that the engines hold. while_current: as of `Validations.end`. publish: updates them to
        `step`.
        """
        if self.validations.beside:
            self._meter.charge_validation()
            await self.validations.end(while_current, held=True)
            self._meter.charge_waiting("validation")
        await self.validations.end(while_current)
        if self._recipe.validation.every_steps and not self._metrics.has_validation(step):
            if step > served:
                await publish()
            self.validations.begin(step, batches, last=True)
            await self.validations.end(while_current)
        if self._evaluations.in_progress or self._evaluations.due(step):
            self._meter.charge_validation()
            await while_current(self._evaluations.end())
            for _ in range(_TRIES):
                if self._evaluations.due(step):
                    await while_current(self._until_one_serves())
                    self._evaluations.begin(step, batches, digest, alone=True)
                    await while_current(self._evaluations.end())
            self._meter.charge_waiting("evaluation")

    async def _until_one_serves(self) -> None:
        await self._engines.until(lambda: bool(self._engines.serving))

    async def close(self) -> None:
        """Cancel what is in progress."""
        await self.validations.close()
        await self._evaluations.close()
