"""The validations of a run: which one is due, the one in progress, and what depends on it.

A validation measures one policy version. Where a second engine serves, one is held at that version (`held_engine`)
and nothing waits: the trainer and the other engines go on. If the held engine is evicted, the validation is lost, and
one of a later version is due.

With one engine, or with validation.engine: all, the next weight update waits for the validation. The trainer may
leave the version meanwhile; an engine that is started again cannot get it any more then, and when the last engine
that holds it is evicted, the validation cannot end: VersionLost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from megatron_scalerl.controller.held_engine import HeldEngine, HeldEngineLost
from megatron_scalerl.controller.meter import Meter
from megatron_scalerl.controller.metrics import Metrics
from megatron_scalerl.controller.outcomes import means, text
from megatron_scalerl.controller.progress import Progress
from megatron_scalerl.controller.validation import Validator
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.engine.rounds import Rounds
from megatron_scalerl.fit.outlook import outlook
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.sampler import Sampler
from megatron_scalerl.tracing.spans import spanned
from megatron_scalerl.types import Prompt

logger = logging.getLogger(__name__)


class VersionLost(RuntimeError):
    """No engine holds the policy version of a validation any more, and the trainer has already left it."""


class Validations:
    """At most one validation at a time."""

    def __init__(
        self,
        recipe: Recipe,
        prompts: Sequence[Prompt],
        *,
        engines: Membership,
        held: HeldEngine,
        sampler: Sampler,
        rounds: Rounds | None,
        meter: Meter,
        metrics: Metrics,
        progress: Progress,
    ) -> None:
        """prompts: the held-out ones. rounds: for rollouts.deterministic."""
        self._validator = Validator(
            recipe,
            engines=engines,
            sampler=sampler,
            prompts=prompts,
            count_tokens=self._count,
            rounds=rounds,
            held=held,
        )
        self._held, self._on = held, False
        self._recipe, self._engines = recipe, engines
        self._meter, self._metrics, self._progress = meter, metrics, progress
        self._task: asyncio.Task[None] | None = None
        """The one in progress, or one on a held engine that has ended since."""
        self._forecast: asyncio.Task[None] | None = None
        """The forecast after the last validation, beside the training."""

    @property
    def beside(self) -> bool:
        """True while a validation is in progress on an engine that is held."""
        return self._on and self._task is not None and not self._task.done()

    def due(self, step: int) -> bool:
        """True if `step` is a multiple of validation.every_steps, or the first step asked for from one on.

        Not if the validation is recorded or in progress. It may be missing after a restart, too.
        """
        every = self._recipe.validation.every_steps
        if not every or self.beside or (self._task is not None and not self._on):
            return False
        return step // every > self._metrics.last_validation(step) // every

    def begin(self, step: int, batches: int, *, last: bool = False, beside: bool = True) -> bool:
        """Start a validation of version `step`; False if it stays due because the second engine is held for something
        else. batches: charged so far. last: of the run. beside: the training goes on meanwhile.
        """
        self._collect()
        assert self._task is None
        settings, rollouts = self._recipe.validation, self._recipe.rollouts
        may_hold = beside and not last and settings.engine == "held" and not rollouts.one_by_one
        on = self._held.hold(step, "validation") if may_hold else None
        if may_hold and on is None and self._engines.held:
            return False
        self._on = on is not None
        at_an_end = last or step in (0, self._recipe.steps)
        generations = settings.end_generations if at_an_end else None
        logger.info("validation of version %d", step)
        ledger = self._meter.ledger
        compute, compute_total = ledger.axis_at(batches), ledger.hours()
        self._task = asyncio.create_task(
            self._validate(step, generations or settings.generations, compute, compute_total, on),
            name=f"validation of version {step}",
        )
        return True

    @spanned("wait for a validation")
    async def end(
        self, while_current: Callable[[Awaitable[None]], Awaitable[None]] | None, *, held: bool = False
    ) -> float:
        """Wait for the validation in progress, if any; returns the seconds waited.

        while_current: waits for work while engines that join get the trainer's weights; None if the trainer holds a
        later version already. held: for one on a held engine, too. Raises VersionLost if no engine is left then.
        """
        self._collect()
        if self._task is None or (self._on and not held):
            return 0.0
        begin = self._meter.elapsed
        if while_current is None:
            await self._until_version_lost(self._task)
        else:
            await while_current(self._task)
        self._task = None
        waited = self._meter.elapsed - begin
        self._meter.pinned_seconds += waited
        return waited

    def _collect(self) -> None:
        """Forget a validation on a held engine that has ended. Raises its failure."""
        if self._on and self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    def _count(self, tokens: int, on: EngineClient | None) -> None:
        if on is None:
            self._meter.count_validation(tokens)
        else:
            self._meter.count_held(on, "validation", tokens)

    async def close(self) -> None:
        """Cancel the validation in progress, if any; wait for the forecast, which takes less than a second."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._forecast is not None:
            await asyncio.gather(self._forecast, return_exceptions=True)

    @spanned("validation", "validation")
    async def _validate(
        self, step: int, generations: int, compute: float, compute_total: float, on: EngineClient | None
    ) -> None:
        try:
            pass_rate, outcomes = await self._validator.validate(
                step,
                generations=generations,
                compute=compute,
                compute_total=compute_total,
                unit=self._meter.ledger.unit,
                on=on,
            )
        except HeldEngineLost as lost:
            logger.warning("validation of version %d is lost, and is made of a later one: %s", step, lost)
            return
        finally:
            if on is not None:
                self._held.release(on)
        self._metrics.validation(pass_rate, by_prompt=means(outcomes), outcomes=text(outcomes))
        self._progress.validation(pass_rate)
        if self._forecast is not None:
            await self._forecast
        self._forecast = asyncio.create_task(self._look_ahead(), name=f"forecast at version {step}")

    async def _look_ahead(self) -> None:
        """Show where the run is going. A fit that fails is a line in the log, not the end of the run."""
        try:
            found = await asyncio.to_thread(
                outlook,
                self._metrics.validations(),
                steps=self._recipe.steps,
                fit_from_steps=self._recipe.forecast.fit_from_steps,
            )
        except (ValueError, ArithmeticError, RuntimeError, OSError, MemoryError) as error:
            logger.warning("no forecast: %s: %s", type(error).__name__, error)
            return
        if found is not None:
            self._progress.outlook(found)

    async def _until_version_lost(self, validation: asyncio.Task[None]) -> None:
        lost = asyncio.create_task(self._engines.until(lambda: not self._engines.serving))
        try:
            await asyncio.wait({validation, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        if not validation.done():
            raise VersionLost(f"{validation.get_name()}: expected an engine that holds it, found none left")
        await validation
