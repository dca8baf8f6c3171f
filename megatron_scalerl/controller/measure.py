"""What a run measures of its policy beside training: validations and evaluations (`evaluations`).

A validation is mean@k on the held-out prompts, with one policy version.

Interruption, sampling and verifier are those of training. Every validation has the same prompts, so that their
difficulty is no noise of the curve. Seeds and interruption points are drawn anew (validation.fresh_seeds): with
common ones, close validations err together, and no curve averages that away. They depend on validation.seed and the
step alone, so that runs that are compared share them. A truncated completion counts as wrong.
(Khatri et al. 2025, section 2: mean@16 on 1,000 held-out prompts every 100 steps.)

Consumes: the held-out prompts and the engines' slots, at a higher priority than training completions.
Waits for: every completion and its score, and for a serving engine.
Unblocked by: the engines and the verifier. It must not wait for the trainer: either one engine is held at the policy
version (`held_engine`), or the next weight update waits for the validation, which keeps the version fixed on all. An
engine that answers with another version is evicted. A completion whose engine is evicted is generated again, with its
seed and interruption point, on another one; when no engine is left that holds the version, the controller ends the
validation (`loop`). The loss of a held engine ends it, too (HeldEngineLost).

Where a second engine serves, one is held at that version (`held_engine`)
and nothing waits: the trainer and the other engines go on. If the held engine is evicted, the validation is lost, and
one of a later version is due.

With one engine, or with validation.engine: all, the next weight update waits for the validation. The trainer may
leave the version meanwhile; an engine that is started again cannot get it any more then, and when the last engine
that holds it is evicted, the validation cannot end: VersionLost.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence

from megatron_scalerl.controller.evaluations import EvaluationInputs, Evaluations
from megatron_scalerl.controller.held_engine import HeldEngine, HeldEngineLost, OneAtATime, losses_as_one
from megatron_scalerl.controller.meter import Meter
from megatron_scalerl.controller.metrics import Metrics, Outcomes, means, text, within_variance
from megatron_scalerl.controller.progress import Progress
from megatron_scalerl.controller.run_folder import ResumePoint, RunFolder, RunState
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.engine.rounds import Rounds
from megatron_scalerl.evaluation.completing import Holders, Request, complete
from megatron_scalerl.evaluation.results import Key
from megatron_scalerl.fit.outlook import outlook
from megatron_scalerl.prompts.dataset import PromptSet, first_of_each_task
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.plans import VALIDATION_PRIORITY
from megatron_scalerl.rollouts.sampler import Sampler, ScoredCompletion
from megatron_scalerl.types import Completion, CompletionLost, ComputeUnit, PassRate, Prompt, TaskPassRate

logger = logging.getLogger(__name__)

_TRIES = 2
"""Attempts at the last evaluation, beside one that was in progress."""

WhileWaiting = Callable[[Awaitable[None]], Awaitable[None]]
"""Waits for work while engines that join get the trainer's weights (`overlap.Overlap.while_waiting`)."""


class VersionLost(RuntimeError):
    """No engine holds the policy version of a validation any more, and the trainer has already left it."""


class Validator:
    """Completes and scores the held-out prompts of a run."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        engines: Membership,
        sampler: Sampler,
        prompts: Sequence[Prompt],
        count_tokens: Callable[[int, EngineClient | None], None],
        rounds: Rounds | None = None,
        held: HeldEngine | None = None,
    ) -> None:
        """count_tokens: called with the number of tokens of every finished completion and `validate`'s `on`. rounds:
        for rollouts.deterministic. held: which engines are held."""
        self._seed, self._fresh = recipe.validation.seed, recipe.validation.fresh_seeds
        self._prompts = first_of_each_task(prompts, recipe.validation.prompts)
        self._engines = engines
        self._sampler = sampler
        self._count_tokens = count_tokens
        self._rounds, self._held = rounds, held
        self._per_engine = recipe.rollouts.max_in_flight
        self._slots = asyncio.Semaphore(self._per_engine * recipe.engine.count)

    async def validate(
        self,
        step: int,
        *,
        generations: int,
        compute: float,
        compute_total: float,
        unit: ComputeUnit,
        on: EngineClient | None = None,
    ) -> tuple[PassRate, Outcomes]:
        """(the pass rate of policy version `step`, [prompts][generations] what each completion was).

        generations: completions per prompt; the first ones have the same seeds whatever their number. compute,
        compute_total, unit: what the result is recorded with. on: the engine that is held at `step`, None: all that
        serve. A lost completion is tried once more.
        Raises RuntimeError if all completions of a prompt are lost, HeldEngineLost if `on` is evicted.
        """
        assert self._prompts and generations >= 1
        if self._rounds is not None:
            found_by_prompt = await self._in_rounds(step, generations)
        else:
            found_by_prompt = await self._all_at_once(step, generations, on)
        results = [[result for result in row if result is not None] for row in found_by_prompt]
        for prompt, row in zip(self._prompts, results):
            if not row:
                raise RuntimeError(
                    f"validation of version {step}: prompt {prompt.prompt_id}: expected a completion, found "
                    f"all {generations} lost"
                )
        outcomes = tuple(tuple(None if x is None else x.score.correct for x in row) for row in found_by_prompt)
        by_prompt = means(outcomes)
        completions = [found.completion for row in results for found in row]
        pass_rate = PassRate(
            step=step,
            policy_version=step,
            pass_rate=sum(by_prompt) / len(by_prompt),
            prompts=len(by_prompt),
            generations=generations,
            compute=compute,
            compute_total=compute_total,
            unit=unit,
            truncated_share=sum(c.truncated for c in completions) / len(completions),
            interrupted_share=sum(c.interrupted for c in completions) / len(completions),
            mean_completion_tokens=sum(c.tokens for c in completions) / len(completions),
            entropy=_entropy(completions),
            lost_completions=len(by_prompt) * generations - len(completions),
            within_variance=within_variance(outcomes),
            tasks=_by_task(self._prompts, by_prompt),
        )
        return pass_rate, outcomes

    async def _all_at_once(
        self, step: int, generations: int, on: EngineClient | None
    ) -> list[list[ScoredCompletion | None]]:
        """All completions, by prompt, in whatever order the engines serve them."""
        slots = self._slots if on is None else asyncio.Semaphore(self._per_engine)
        with losses_as_one():
            async with asyncio.TaskGroup() as tasks:
                running = [
                    [
                        tasks.create_task(self._completion(step, number, index, slots, on=on))
                        for index in range(generations)
                    ]
                    for number in range(len(self._prompts))
                ]
        return [[task.result() for task in row] for row in running]

    async def _in_rounds(self, step: int, generations: int) -> list[list[ScoredCompletion | None]]:
        """All completions, by prompt, generated in rounds (`engine.rounds`)."""
        assert self._rounds is not None
        wanted = [(number, index) for number in range(len(self._prompts)) for index in range(generations)]
        found: list[ScoredCompletion | None] = []
        while len(found) < len(wanted):
            together = await self._rounds.begin()
            part = wanted[len(found) : len(found) + self._per_engine * together.size]
            engines = [together.engine(rank) for rank in range(len(part))]
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._completion(step, number, index, self._slots, first=engine, rank=rank))
                    for rank, (engine, (number, index)) in enumerate(zip(engines, part))
                ]
                await together.go(engines)
            found += [task.result() for task in running]
        return [found[begin : begin + generations] for begin in range(0, len(wanted), generations)]

    async def _completion(
        self,
        step: int,
        number: int,
        index: int,
        slots: asyncio.Semaphore,
        *,
        on: EngineClient | None = None,
        first: EngineClient | None = None,
        rank: int = 0,
    ) -> ScoredCompletion | None:
        """Completion `index` of a prompt by policy version `step`; None if it was lost.

        on: the engine of all attempts, None for any. first: that of the first one. rank: of the request within its
        round.
        """
        prompt = self._prompts[number]
        request = Request(
            key=Key(file="validation", number=number, index=index),
            problem_id=prompt.prompt_id,
            prompt=prompt,
            draw=self._sampler.draw(self._seed + step * self._fresh, number, index),
            sampler=self._sampler,
        )
        chosen = iter([] if first is None else [first])

        async def next_engine(number: int) -> EngineClient:
            return next(chosen, None) or await self._engine(number, on)

        holders = Holders(next=next_engine, evict=self._engines.evict)
        async with slots:
            result = await complete(request, holders, version=step, priority=VALIDATION_PRIORITY + rank)
        if isinstance(result, CompletionLost):
            return None
        self._count_tokens(result.completion.tokens, on)
        return result

    async def _engine(self, number: int, on: EngineClient | None) -> EngineClient:
        """A serving engine; the completions of a prompt share one. on: that one. Raises HeldEngineLost."""
        if on is not None:
            assert self._held is not None
            self._held.check(on)
            return on
        await self._engines.until(lambda: bool(self._engines.serving))
        serving = self._engines.serving
        return serving[number % len(serving)]


def _by_task(prompts: Sequence[Prompt], by_prompt: Sequence[float]) -> dict[str, TaskPassRate]:
    """The pass rate of each task; empty without a mixture."""
    found: dict[str, list[float]] = {}
    for prompt, pass_rate in zip(prompts, by_prompt):
        if prompt.task:
            found.setdefault(prompt.task, []).append(pass_rate)
    return {task: TaskPassRate(pass_rate=sum(p) / len(p), prompts=len(p)) for task, p in found.items()}


def _entropy(completions: Sequence[Completion]) -> float:
    """Minus the mean log-probability (nats) of all sampled tokens; NaN if none was sampled."""
    sampled = sum(c.sampled_tokens for c in completions)
    return -sum(c.logprob_sum for c in completions) / sampled if sampled else math.nan


class Validations(OneAtATime):
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
        super().__init__()
        self._validator = Validator(
            recipe,
            engines=engines,
            sampler=sampler,
            prompts=prompts,
            count_tokens=self._count,
            rounds=rounds,
            held=held,
        )
        self._holder, self.held = held, False
        """Whether the last one is, or was, on an engine that is held."""
        self._recipe, self._engines = recipe, engines
        self._meter, self._metrics, self._progress = meter, metrics, progress
        self._forecast: asyncio.Task[None] | None = None
        """The forecast after the last validation, beside the training."""

    @property
    def beside(self) -> bool:
        """True while a validation is in progress on an engine that is held."""
        return self.held and self.in_progress

    def due(self, step: int) -> bool:
        """True if `step` is a multiple of validation.every_steps, or the first step asked for from one on.

        Not if the validation is recorded or in progress. It may be missing after a restart, too.
        """
        every = self._recipe.validation.every_steps
        if not every or self.in_progress:
            return False
        return step // every > self._metrics.last_validation(step) // every

    def begin(self, state: RunState, *, last: bool = False, beside: bool = True) -> bool:
        """Start a validation of the version that the engines hold.

        False if it stays due because the second engine is held for something else. last: of the run. beside: the
        training goes on meanwhile.
        """
        self.collect()
        step = state.step
        assert self._task is None
        settings, rollouts = self._recipe.validation, self._recipe.rollouts
        may_hold = beside and not last and settings.engine == "held" and not rollouts.one_by_one
        on = self._holder.hold(step, "validation") if may_hold else None
        if may_hold and on is None and self._engines.held:
            return False
        self.held = on is not None
        at_an_end = last or step in (0, self._recipe.steps)
        generations = settings.end_generations if at_an_end else None
        logger.info("validation of version %d", step)
        ledger = self._meter.ledger
        compute, compute_total = ledger.axis_at(state.batches), ledger.hours()
        self._task = asyncio.create_task(
            self._validate(step, generations or settings.generations, compute, compute_total, on),
            name=f"validation of version {step}",
        )
        return True

    async def end(self, while_waiting: WhileWaiting | None, *, held: bool = False) -> float:
        """Wait for the validation in progress, if any; returns the seconds waited.

        while_waiting: None if the trainer holds a later version already. held: for one on a held engine, too. Raises
        VersionLost if no engine is left then.
        """
        self.collect()
        if self._task is None or (self.held and not held):
            return 0.0
        begin = self._meter.elapsed
        if while_waiting is None:
            await self._until_version_lost(self._task)
        else:
            await while_waiting(self._task)
        self._task = None
        waited = self._meter.elapsed - begin
        self._meter.pinned_seconds += waited
        return waited

    def _count(self, tokens: int, on: EngineClient | None) -> None:
        if on is None:
            self._meter.count_validation(tokens)
        else:
            self._meter.count_held(on, "validation", tokens)

    async def close(self) -> None:
        """Cancel the validation in progress, if any; wait for the forecast, which takes less than a second."""
        await super().close()
        if self._forecast is not None:
            await asyncio.gather(self._forecast, return_exceptions=True)

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
                self._holder.release(on)
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
        state: RunState,
        engines: Membership,
        sampler: Sampler,
        rounds: Rounds | None,
        meter: Meter,
        metrics: Metrics,
        progress: Progress,
    ) -> None:
        """start: the checkpoint from which the attempt goes on."""
        self._state, self._on_all = state, False
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

    def begin(self, *, beside: bool = True) -> bool:
        """Start what is due of the version that the engines hold; True if a validation was started.

        beside: the training goes on meanwhile. The evaluation comes first, so that both share one held engine, also
        where the validation is on all others.
        """
        self._evaluations.begin(self._state)
        begun = self.validations.due(self._state.step) and self.validations.begin(self._state, beside=beside)
        self._on_all = begun and not self.validations.held
        return begun

    async def end_validation(self, while_waiting: WhileWaiting) -> None:
        """Wait for the validation on all engines that `begin` started last, if it did, and charge the time."""
        await self.validations.end(while_waiting)
        if self._on_all:
            self._on_all = False
            self._meter.charge_validation()

    async def finish(self, while_waiting: WhileWaiting, publish: Callable[[], Awaitable[object]]) -> None:
        """At the end of the run: what is in progress, the last validation, an evaluation that is due.

        publish: gives the engines the trainer's version.
        """
        step = self._state.step
        if self.validations.beside:
            self._meter.charge_validation()
            await self.validations.end(while_waiting, held=True)
            self._meter.charge_waiting("validation")
        await self.validations.end(while_waiting)
        if self._recipe.validation.every_steps and not self._metrics.has_validation(step):
            if step > self._state.served:
                await publish()
            self.validations.begin(self._state, last=True)
            await self.validations.end(while_waiting)
        if self._evaluations.in_progress or self._evaluations.due(step):
            self._meter.charge_validation()
            await while_waiting(self._evaluations.end())
            for _ in range(_TRIES):
                if self._evaluations.due(step):
                    await while_waiting(self._until_one_serves())
                    self._evaluations.begin(self._state, alone=True)
                    await while_waiting(self._evaluations.end())
            self._meter.charge_waiting("evaluation")

    async def _until_one_serves(self) -> None:
        await self._engines.until(lambda: bool(self._engines.serving))

    async def close(self) -> None:
        """Cancel what is in progress."""
        await self.validations.close()
        await self._evaluations.close()
