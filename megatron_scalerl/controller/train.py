"""`megatron-scalerl train RECIPE`: runs a recipe, from the checks to the end of the run.

    train        checks inputs and folder; raises ValueError for user errors, before the run has files or processes
    _train       starts verifier and decoder processes, locks the run folder and opens controller.log
    _attempts    starts the engines once, then makes attempts until an attempt does not fail
    _attempt     opens the ledger, starts the meter and the trainer's ranks, and runs the controller

Each function releases all resources when the controller returns or raises. When the trainer fails, the attempt ends
and the next attempt starts the trainer's ranks again from the newest checkpoint (at most trainer.max_restarts times
without progress), while the engines keep running. The next attempt reads ledger, journal and metrics as a restart of
the run does.

A user error ends the command with exit code 2, a failure of the running run with exit code 1.
"""

import asyncio
import contextlib
import io
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from megatron_scalerl.checkpoints.commit import latest
from megatron_scalerl.checkpoints.jsonl import JsonlWriter
from megatron_scalerl.controller.ledger import Ledger
from megatron_scalerl.controller.loop import Controller
from megatron_scalerl.controller.measure import VersionLost
from megatron_scalerl.controller.measured_prompts import write_contamination
from megatron_scalerl.controller.meter import Meter, metering
from megatron_scalerl.controller.preflight import Inputs, check_inputs
from megatron_scalerl.controller.probe import Probe
from megatron_scalerl.controller.progress import Progress
from megatron_scalerl.controller.run_folder import (
    Resumed,
    RunFolder,
    check_history,
    check_recipe,
    finished,
    resume_point,
)
from megatron_scalerl.controller.telemetry import RunCollector, serving_metrics
from megatron_scalerl.controller.weight_sync import WeightSync, WeightUpdateError
from megatron_scalerl.engine.membership import Member
from megatron_scalerl.engine.watchdog import EngineDied
from megatron_scalerl.launch.hosts import ONE_HOST, Hosts, allow_open_files
from megatron_scalerl.launch.launcher import Launcher, launching, until_failure
from megatron_scalerl.launch.placement import Devices, Fleet, Placement
from megatron_scalerl.processes.child_process import ProcessDied, open_log
from megatron_scalerl.processes.garbage import map_large_blocks
from megatron_scalerl.processes.logs import log_to_file
from megatron_scalerl.processes.loop_watch import LoopLag, bounded, loop_watcher, watched_loop
from megatron_scalerl.processes.parent_death import hide_memory
from megatron_scalerl.processes.signals import SaveAndExit, Takeover, run_until_signal, uncharged_seconds
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import RecipeError
from megatron_scalerl.recipe.tasks import tasks_of
from megatron_scalerl.record import record
from megatron_scalerl.rewards.pool import TaskPools
from megatron_scalerl.rollouts.episodes import sampling
from megatron_scalerl.rollouts.history import read_history
from megatron_scalerl.rollouts.sampler import Sampler
from megatron_scalerl.trainer.client import TrainerError

logger = logging.getLogger(__name__)


class RunFailed(RuntimeError):
    """A run failed after its start, not by a user error. The message names the type of the original exception."""


@contextmanager
def log_failures(log: str | Path) -> Iterator[None]:
    """Append the log lines of the block, and the traceback of a failure, to `log`. The block runs a checked recipe.

    A RecipeError, RuntimeError or OSError is raised unchanged. Every other exception, also a ValueError, then comes
    from an invalid answer of a peer, a damaged file or a bug, and becomes RunFailed. Of an exception group the first
    exception is raised. A note on the exception names the log file.
    """
    # backslashreplace: a logged path may hold bytes that are not UTF-8.
    text = io.TextIOWrapper(open_log(Path(log)), "utf8", "backslashreplace")
    try:
        with log_to_file(text), _failures(log):
            yield
    finally:
        # `close` may fail on a full disk. The error must not replace the run's failure.
        with contextlib.suppress(OSError):
            text.close()


@contextmanager
def _failures(log: str | Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        first = _first_of(error)
        if isinstance(first, RecipeError):
            raise first from None
        logger.exception("the run failed")
        expected = isinstance(first, RuntimeError | OSError)
        failure = first if expected else RunFailed(f"{type(first).__name__}: {first}")
        failure.add_note(f"traceback in {log}")
        if failure is error:
            raise
        raise failure from error


def _first_of(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


_RESTART = (TrainerError, ProcessDied, WeightUpdateError, VersionLost)
"""Failures after which the next attempt starts the trainer again. All failures of other types end the run."""


class StartFailed(RuntimeError):
    """The engines or the trainer's ranks of the first attempt did not start, so no further attempt is made."""


def train(recipe: Recipe, console: Console, hosts: Hosts = ONE_HOST) -> str:
    """Start or resume the run of `recipe`; returns the reason why the run ended.

    Raises ValueError for user errors, before any file is written. Raises RuntimeError or OSError if a process or a
    weight update fails, HostsLeft if the job has lost a host of the trainer, and Stopped for a signal (SIGUSR1 first
    saves a checkpoint). After each of these failures the same command resumes the run from the last checkpoint.
    """
    map_large_blocks()
    takeover = Takeover(recipe.run_dir)
    placement = Placement.of(recipe, hosts)
    placement.check_present(hosts, engines=recipe.engine.min_engines)
    inputs = check_inputs(recipe)
    evaluated = inputs.evaluation
    reports = [f"prompts: {inputs.chat.why}", *inputs.prompts.lines()]
    if evaluated:
        reports += evaluated.lines()
    for line in reports:
        console.print(line, highlight=False)
    recipe = inputs.resolved(recipe)
    with bounded():
        check_recipe(recipe)
        reason = finished(recipe, resume_point(recipe.run_dir))
    if reason is not None:
        return f"{reason}; nothing is left to do"
    allow_open_files(recipe)
    saving = SaveAndExit()
    # Environments run as processes of the same user, and must not be able to read this process's memory.
    hide_memory()
    with loop_watcher() as pipe:
        work = _train(recipe, inputs, console, saving, hosts, placement, takeover, pipe)
        return run_until_signal(work, saving, partial(_next_start, recipe.run_dir))


def _next_start(run_dir: Path) -> str:
    """Effect of starting the command again, as the predicate of a sentence; the `consequence` of `Stopped`."""
    newest = latest(run_dir / "checkpoints")
    if newest is None:
        return (
            "begins anew, since the run has no checkpoint yet (checkpoint.every_steps; SIGUSR1 saves one and exits)"
        )
    return f"resumes from {newest.name}"


async def _train(
    recipe: Recipe,
    inputs: Inputs,
    console: Console,
    saving: SaveAndExit,
    hosts: Hosts,
    placement: Placement,
    takeover: Takeover,
    pipe: int,
) -> str:
    async with watched_loop(pipe) as lag, TaskPools(tasks_of(recipe)) as verifier:
        # The run folder is created only after all checks for user errors.
        with contextlib.closing(RunFolder(recipe)) as folder, log_failures(folder.path / "logs" / "controller.log"):
            write_contamination(folder.path, inputs.evaluation)
            # Damaged files are found here, before engines and trainer start.
            resumed = await _resume(folder, console)
            async with (
                serving_metrics(recipe, folder.path, run_id=folder.attempt.run_id) as collector,
                sampling(recipe, inputs.tokenizer, verifier=verifier, logs=folder.path / "logs") as sampler_of,
            ):
                run = _Run(
                    recipe=recipe,
                    inputs=inputs,
                    folder=folder,
                    sampler=sampler_of(recipe),
                    console=console,
                    saving=saving,
                    hosts=hosts,
                    placement=placement,
                    takeover=takeover,
                    collector=collector,
                    lag=lag,
                )
                return await _attempts(run, resumed)


@record
class _Run:
    """The objects that all attempts of this process use."""

    recipe: Recipe
    inputs: Inputs
    folder: RunFolder
    sampler: Sampler
    console: Console
    saving: SaveAndExit
    hosts: Hosts
    placement: Placement
    takeover: Takeover
    collector: RunCollector | None
    """Collects the metrics of the Prometheus endpoint; None without an endpoint."""
    lag: LoopLag


async def _attempts(run: _Run, resumed: Resumed) -> str:
    """Run attempts until an attempt ends the run; returns the reason why the run ended.

    resumed: the state from which the first attempt starts. Raises the failure of an attempt if a restart cannot help,
    or after trainer.max_restarts restarts from one checkpoint.
    """
    restarts = 0
    newest = -1
    check_present = run.placement.check_present
    minimum = run.recipe.engine.min_engines
    held_since = time.monotonic() - uncharged_seconds()
    # The file is private, because a reason may quote an engine's answer.
    with contextlib.closing(JsonlWriter(run.folder.path / "engines.jsonl", private=True)) as changes:
        record = partial(_record, changes)
        secret = secrets.token_hex(32)
        async with launching(run.recipe, run.folder.attempt, secret, record, hosts=run.hosts) as launcher:
            if run.collector is not None:
                run.collector.members = lambda: launcher.engines.members.members
            while True:
                try:
                    return await _attempt(run, launcher, resumed, held_since=held_since, first=newest == -1)
                except EngineDied:
                    await asyncio.to_thread(check_present, run.hosts, engines=minimum)
                    raise
                except _RESTART as error:
                    if run.takeover.happened:
                        raise RuntimeError(
                            f"this attempt failed, and Slurm has begun a later attempt: {error}"
                        ) from error
                    held_since = time.monotonic()
                    too_few = launcher.engines.members.left < minimum
                    required_engines = 0
                    if too_few:
                        required_engines = minimum
                    await asyncio.to_thread(check_present, run.hosts, engines=required_engines)
                    # A restart cannot help if too few engines are left, or if the disk is full.
                    if too_few or _is_full(error, run.folder.path):
                        raise
                    resumed = await _resume(run.folder, run.console)
                    if resumed.start.step != newest:
                        restarts = 0
                    restarts += 1
                    newest = resumed.start.step
                    if restarts > run.recipe.trainer.max_restarts:
                        raise
                    logger.exception("the attempt %s failed", run.folder.attempt.incarnation)
                    progress = f"restart {restarts} of at most {run.recipe.trainer.max_restarts} from step {newest}"
                    run.console.print(f"{progress}: {str(error).splitlines()[0]}", highlight=False)
                run.folder.attempt = run.folder.begin_attempt()


def _is_full(error: BaseException, run: Path) -> bool:
    """True if a trainer rank found no disk space for a file in the folder `run`. The next attempt would also fail."""
    if not isinstance(error, TrainerError) or not error.full:
        return False
    return Path(error.full).absolute().is_relative_to(run.absolute())


def _record(engines: JsonlWriter, member: Member) -> None:
    """Append an engine's new state to engines.jsonl. A failed write is only logged, since the run can go on without
    the line."""
    row = asdict(replace(member, client=None))
    del row["client"]
    try:
        engines.append(row | {"unix_time": time.time()})
    except OSError as error:
        logger.warning("a change of %s is not recorded: %s", member.name, error)


async def _attempt(run: _Run, launcher: Launcher, resumed: Resumed, *, held_since: float, first: bool) -> str:
    """Run one attempt, from the newest checkpoint to the end; returns the reason why the run ended.

    held_since: start of the time to charge, in monotonic seconds: when the devices were first held, or when the
    previous attempt ended. first: True for the first attempt, after which a failure to start ends the run.
    """
    recipe = run.recipe
    folder = run.folder
    attempt = run.folder.attempt
    start = resumed.start
    logger.info("run %s: attempt %s begins at step %d", attempt.run_id, attempt.incarnation, start.step)
    engines = launcher.engines.members
    devices = replace(Devices.of(recipe), engine=engines.devices)
    ledger = Ledger(folder.path / "ledger.jsonl", devices.unit, incarnation=attempt.incarnation)
    with contextlib.closing(ledger):
        meter = Meter(ledger, devices, start, since=held_since, lag=run.lag)
        engines.on_devices = meter.hold_engine_devices
        if run.collector is not None:
            run.collector.attempt(start.step, ledger.seconds)
        async with (
            metering(meter),
            launcher.trainer(attempt) as trainer,
        ):
            try:
                fleet = await launcher.start(trainer)
            except _RESTART as error:
                if first:
                    raise StartFailed(str(error)) from error
                raise
            if first:
                _print_fleet(fleet, run.console)
            prompts = run.inputs.prompts
            with Progress(run.console, recipe.steps) as progress:
                controller = Controller(
                    recipe=recipe,
                    prompts=prompts,
                    evaluation=run.inputs.evaluation,
                    folder=folder,
                    fleet=fleet,
                    resumed=resumed,
                    sampler=run.sampler,
                    sync=WeightSync(fleet.trainer, fleet.engines, recipe),
                    probe=Probe(recipe, run.sampler, fleet, [*prompts.training, *prompts.held_out]),
                    meter=meter,
                    progress=progress,
                    saving=run.saving,
                    sinks=[] if run.collector is None else [run.collector],
                )
                return await until_failure(controller.run(), trainer.watch, launcher.engines.watch)


async def _resume(folder: RunFolder, console: Console) -> Resumed:
    """The newest intact checkpoint and the journal, read in a thread while the event loop watches the engines."""
    with bounded():
        return await asyncio.to_thread(_read_run, folder, console)


def _read_run(folder: RunFolder, console: Console) -> Resumed:
    """The newest intact checkpoint and the journal, after a check for lost data (`check_history`)."""
    start = resume_point(folder.path)
    for line in start.damaged:
        console.print(f"resuming from step {start.step}, not from a damaged checkpoint: {line}", highlight=False)
    history = read_history(folder.path)
    check_history(folder.path, history, start)
    return Resumed(start, history)


def _print_fleet(fleet: Fleet, console: Console) -> None:
    info = fleet.info
    devices = fleet.devices
    teachers = f", {devices.teacher:g} teacher" if devices.teacher else ""
    console.print(
        f"{info.parameters:,} parameters, {devices.trainer:g} trainer and {devices.engine:g} engine{teachers} "
        f"devices ({info.device}, {info.backend}), logits {info.logits}",
        highlight=False,
    )
