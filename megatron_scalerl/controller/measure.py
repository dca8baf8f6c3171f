"""Measures one policy version while the training goes on: validations and evaluations (`measured_prompts`).

Consumes: prompts and the engines' slots, at a higher priority than training completions.
Waits for: every completion and its score, and for a serving engine (`evaluation.completing`).
Unblocked by: the engines and the verifier. A measurement must not wait for the trainer: either one engine is held at
the policy version, or the next weight update waits for the measurement, which keeps the version fixed on all engines.

If at least two engines serve, one engine is held at the version. Trainer and other engines go on without waiting.

    start of a measurement   a serving engine is held: no new group, no weight update; completions in flight go on
    end of the last use      the engine is stale, and gets the weights in the next update, or while the trainer waits

A validation and an evaluation of one version share the held engine. A held engine that is evicted is not replaced,
since the trainer may have a later version by then. The measurement is lost, and a later version is measured instead.

With one engine, or with validation.engine: all, the next weight update waits for the validation. The trainer may make
a step meanwhile. After this step an engine that is started again cannot get the measured version. If all engines with
the version are evicted, the validation fails with VersionLost.

The life of a measurement:

    due       a multiple of every_steps is reached or passed without a record, and no measurement is in progress
    begin     holds an engine, or takes all engines; `_run` completes the requests in a task
    collect   drops a finished task, and raises the task's failure; `end` waits for the task first
    close     cancels the task; a restart goes on with an evaluation's recorded completions
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from megatron_scalerl.controller.measured_prompts import EvaluationFiles, HeldOut, PinnedVersion
from megatron_scalerl.controller.meter import Meter, Purpose
from megatron_scalerl.controller.metrics import Metrics
from megatron_scalerl.controller.progress import Progress
from megatron_scalerl.controller.run_folder import ResumePoint, RunFolder, RunState
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.engine.rounds import Rounds
from megatron_scalerl.evaluation.completing import Completer, HeldEngineLost
from megatron_scalerl.evaluation.inputs import EvaluationInputs
from megatron_scalerl.evaluation.results import ProblemLost
from megatron_scalerl.processes.child_process import cancelled
from megatron_scalerl.prompts.dataset import PromptSet
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.sampler import Sampler

logger = logging.getLogger(__name__)

_TRIES = 2
"""Number of attempts at an evaluation that is due at the end of the run."""

WhileWaiting = Callable[[Awaitable[None]], Awaitable[None]]
"""A function that waits for an awaitable and meanwhile sends the trainer's weights to engines that join
(`overlap.Overlap.while_waiting`)."""


class VersionLost(RuntimeError):
    """All engines with the policy version of a validation were evicted, and the trainer has a later version."""


class HeldEngine:
    """Holds engines for measurements: a held engine keeps its policy version while the training goes on.

    At most one engine is held at a version, and only while another engine serves.
    """

    def __init__(self, engines: Membership, meter: Meter):
        self._engines = engines
        self._meter = meter
        self._users: dict[int, list[EngineClient]] = {}
        """Version -> the engine held at the version, repeated in the list for each measurement on the engine."""

    def hold(self, version: int, purpose: Purpose, *, least_serving: int = 2) -> EngineClient | None:
        """Hold an engine at `version`, which all serving engines have now. The caller must call `release` afterwards.

        The engine with the fewest requests in flight is held. Returns None if fewer than `least_serving` engines
        serve, or if the engine that was held at this version was evicted.
        """
        users = self._users.get(version, [])
        if users:
            engine = users[0]
            if engine not in self._engines.held:
                # The held engine was evicted, and all remaining engines may have a later version by now.
                return None
        else:
            serving = self._engines.serving
            if len(serving) < least_serving:
                return None
            engine = min(serving, key=lambda engine: engine.in_flight)
            self._meter.hold(engine, self._engines.devices_of(engine), purpose)
            self._engines.hold(engine)
            logger.info("%s is held at policy version %d for a measurement", engine.name, version)
        self._users[version] = [*users, engine]
        return engine

    def release(self, engine: EngineClient) -> None:
        """End a measurement's use of a held engine; after the last use the engine goes back to the training."""
        version = next(version for version, users in self._users.items() if engine in users)
        self._users[version].pop()
        if not self._users[version]:
            del self._users[version]
            self._meter.release(engine)
            self._engines.release(engine)


class Measurement:
    """Measures one set of prompts every `every_steps` steps, one version at a time."""

    def __init__(
        self,
        recipe: Recipe,
        prompts: HeldOut | EvaluationFiles,
        *,
        engines: Membership,
        holder: HeldEngine,
        meter: Meter,
        rounds: Rounds | None = None,
    ):
        """rounds: makes the engines run requests in rounds (`engine.rounds`); None without rollouts.deterministic."""
        self._prompts = prompts
        self._engines = engines
        self._holder = holder
        self._meter = meter
        self._rounds = rounds
        self._recipe = recipe
        self._task: asyncio.Task[None] | None = None
        """The task of the measurement in progress; a finished task until `collect` drops it."""
        self.engine: EngineClient | None = None
        """The engine that is, or was, held for the last measurement; None if all engines generated."""

    @property
    def in_progress(self) -> bool:
        """True between the start and the end of a measurement."""
        return self._task is not None and not self._task.done()

    @property
    def on_held_engine(self) -> bool:
        """True while a measurement is in progress on a held engine."""
        return self.in_progress and self.engine is not None

    def due(self, step: int) -> bool:
        """True if `step` has reached a multiple of every_steps after the newest recorded measurement.

        False while a measurement is in progress. Raises the failure of the previous measurement.
        """
        self.collect()
        interval = self._prompts.every_steps
        if not interval or self.in_progress:
            return False
        return step // interval > self._prompts.newest(step) // interval

    def begin(self, state: RunState, *, hold: bool = True, least_serving: int = 2, last: bool = False) -> bool:
        """Start a measurement of the version that the engines hold.

        Returns False if the measurement has to wait for an engine that can be held, and so stays due. hold: True to
        generate on one held engine if possible, False to generate on all engines. least_serving: see
        `HeldEngine.hold`. last: True at the end of the run.
        """
        assert self._task is None
        step = state.step
        purpose = self._prompts.purpose
        self.engine = None
        if hold:
            self.engine = self._holder.hold(step, purpose, least_serving=least_serving)
            # Another engine is held now and serves again later. The measurement waits until then, because a
            # measurement on all engines would delay the next weight update.
            if self.engine is None and (self._engines.held or not self._prompts.on_all):
                return False
        logger.info("%s of policy version %d begins", purpose, step)
        ledger = self._meter.ledger
        axis = {"compute": ledger.axis_at(state.batches), "compute_total": ledger.hours(), "unit": ledger.unit}
        version = PinnedVersion(step=step, digest=state.digest, axis=axis, last=last)
        self._task = asyncio.create_task(self._run(version, self.engine), name=f"{purpose} of version {step}")
        return True

    async def _run(self, version: PinnedVersion, engine: EngineClient | None) -> None:
        at_once = self._recipe.rollouts.max_in_flight
        if engine is None and self._rounds is None:
            at_once *= self._recipe.engine.count
        completer = Completer(
            members=self._engines,
            version=version.step,
            at_once=at_once,
            only=engine,
            rounds=self._rounds,
            count=partial(self._meter.count_measured, self._prompts.purpose, engine=engine),
        )
        try:
            await self._prompts.measure(version, completer)
        except (HeldEngineLost, ProblemLost) as lost:
            self._prompts.lose(version.step, str(lost))
        finally:
            if engine is not None:
                self._holder.release(engine)

    def collect(self) -> None:
        """Drop the task of a measurement that has ended. Raises the failure of the task."""
        if self._task is not None and self._task.done():
            task = self._task
            self._task = None
            task.result()

    async def end(self, while_waiting: WhileWaiting) -> float:
        """Wait for the measurement in progress, if any; returns the seconds waited. Raises the task's failure."""
        self.collect()
        if self._task is None:
            return 0.0
        begin = self._meter.elapsed
        await while_waiting(self._task)
        self._task = None
        waited = self._meter.elapsed - begin
        self._meter.pinned_seconds += waited
        return waited

    async def unless_lost(self, work: Awaitable[None]) -> None:
        """Wait for the measurement in progress. Raises VersionLost once no engine holds the measured version."""
        assert isinstance(work, asyncio.Task)
        no_engine_left = asyncio.create_task(self._engines.until(lambda: not self._engines.serving))
        try:
            await asyncio.wait({work, no_engine_left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            no_engine_left.cancel()
        # An engine that joins from now on could only get the trainer's later version.
        if not work.done():
            raise VersionLost(
                f"{work.get_name()}: every engine with this policy version was evicted, so no result is possible"
            )
        await work

    async def close(self) -> None:
        """Cancel the measurement in progress, if any; completions that are on disk stay."""
        if self._task is not None:
            await cancelled(self._task)
        await self._prompts.close()


class Measurements:
    """The validations and the evaluations of one attempt."""

    def __init__(
        self,
        recipe: Recipe,
        prompts: PromptSet,
        evaluation: EvaluationInputs | None,
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
    ):
        """start: the checkpoint from which the attempt goes on."""
        self._recipe = recipe
        self._state = state
        self._engines = engines
        self._metrics = metrics
        self._meter = meter
        # Validations and evaluations have one holder, so that both can use one held engine.
        holder = HeldEngine(engines, meter)
        usable = [prompt for prompt in prompts.held_out if not prompts.problems.get(prompt.prompt_id)]
        held_out = HeldOut(recipe, usable, sampler, metrics, progress)
        self._validations = Measurement(recipe, held_out, engines=engines, holder=holder, meter=meter, rounds=rounds)
        self._evaluations: Measurement | None = None
        if evaluation is not None:
            files = EvaluationFiles(recipe, evaluation, folder, start, sampler)
            self._evaluations = Measurement(recipe, files, engines=engines, holder=holder, meter=meter)
        self._on_all = False
        """True from the start of a validation on all engines until the ledger has a charge for the validation."""

    def begin(self, *, while_training: bool = True) -> bool:
        """Start the due measurements of the version that the engines hold; True if a validation starts.

        while_training: False if the trainer waits for the validation, which then runs on all engines.
        """
        step = self._state.step
        # The evaluation starts first and holds an engine, which a validation on a held engine can then share.
        if self._evaluations is not None and self._evaluations.due(step):
            self._evaluations.begin(self._state)
        hold = while_training and self._recipe.validation.engine == "held" and not self._recipe.rollouts.one_by_one
        validation_begins = self._validations.due(step) and self._validations.begin(self._state, hold=hold)
        self._on_all = validation_begins and self._validations.engine is None
        return validation_begins

    async def unpin(self) -> float:
        """Wait for a validation on all engines, before a weight update; returns the seconds waited.

        Raises VersionLost if all engines are evicted: the trainer has a later version, which new engines would get.
        """
        if self._validations.on_held_engine:
            return 0.0
        return await self._validations.end(self._validations.unless_lost)

    async def end_validation(self, while_waiting: WhileWaiting) -> None:
        """If `begin` has started a validation on all engines, wait for the end and charge the time to the ledger."""
        if not self._validations.on_held_engine:
            await self._validations.end(while_waiting)
        if self._on_all:
            self._on_all = False
            self._meter.charge_validation()

    async def finish(self, while_waiting: WhileWaiting, publish: Callable[[], Awaitable[object]]) -> None:
        """At the run's end: wait for measurements in progress, and make the last validation and a due evaluation.

        publish: sends the trainer's weights to the engines.
        """
        step = self._state.step
        validations = self._validations
        if validations.on_held_engine:
            self._meter.charge_validation()
            await validations.end(while_waiting)
            self._meter.charge_waiting("validation")
        await validations.end(while_waiting)
        if self._recipe.validation.every_steps and not self._metrics.has_validation(step):
            # A run that ends within a phase of ppo_off_policy has not yet sent the phase's steps to the engines.
            if step > self._state.served:
                await publish()
            validations.begin(self._state, hold=False, last=True)
            await validations.end(while_waiting)
        evaluations = self._evaluations
        if evaluations is not None and (evaluations.in_progress or evaluations.due(step)):
            self._meter.charge_validation()
            await evaluations.end(while_waiting)
            for _ in range(_TRIES):
                if evaluations.due(step):
                    await while_waiting(self._engines.until(lambda: bool(self._engines.serving)))
                    evaluations.begin(self._state, least_serving=1)
                    await evaluations.end(while_waiting)
            self._meter.charge_waiting("evaluation")

    async def close(self) -> None:
        """Cancel the measurements in progress."""
        await self._validations.close()
        if self._evaluations is not None:
            await self._evaluations.close()
