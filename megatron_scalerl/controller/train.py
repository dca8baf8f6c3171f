"""`megatron-scalerl train RECIPE`: runs a recipe on one machine, from its checks to its end.

    train        checks inputs and folder, raises ValueError for user errors    no file written, no process started
    _train       verifier processes, run folder (locked), controller.log
    _in_folder   resume point, journal, ledger, launcher, meter, controller     all processes started and stopped

Each context manager releases what it holds when the controller returns or raises: the launcher stops trainer ranks
and engines (`launch.local`), then the ledger, the folder and the verifier processes are closed.
"""

from __future__ import annotations

import contextlib
import logging
import secrets

from rich.console import Console

from megatron_scalerl.controller.failures import log_failures
from megatron_scalerl.controller.ledger import Ledger
from megatron_scalerl.controller.loop import Controller
from megatron_scalerl.controller.meter import Meter, metering
from megatron_scalerl.controller.preflight import Inputs, check_inputs
from megatron_scalerl.controller.probe import Probe
from megatron_scalerl.controller.progress import Progress
from megatron_scalerl.controller.run_folder import RunFolder, check_history, check_recipe, finished, resume_point
from megatron_scalerl.controller.weight_sync import WeightSync
from megatron_scalerl.launch.fleet import Devices, Fleet
from megatron_scalerl.launch.local import local_launcher
from megatron_scalerl.launch.open_files import allow_open_files
from megatron_scalerl.processes.signals import run_until_signal
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.tasks import tasks_of
from megatron_scalerl.rewards.task_pools import TaskPools
from megatron_scalerl.rollouts.journal import read_history
from megatron_scalerl.rollouts.sampler import Sampler

logger = logging.getLogger(__name__)


def train(recipe: Recipe, console: Console) -> str:
    """Start or resume the run of `recipe`; returns why it ended.

    Raises ValueError for user errors (no file is written then), RuntimeError and OSError for a failed process or
    update, and Stopped for a signal. Started again, the run resumes from its last checkpoint.
    """
    inputs = check_inputs(recipe)
    for line in inputs.prompts.report.lines():
        console.print(line, highlight=False)
    recipe = inputs.resolved(recipe)
    check_recipe(recipe)
    reason = finished(recipe, resume_point(recipe.run_dir))
    if reason is not None:
        return f"{reason}; nothing is left to do"
    allow_open_files(recipe)
    return run_until_signal(_train(recipe, inputs, console))


async def _train(recipe: Recipe, inputs: Inputs, console: Console) -> str:
    async with TaskPools(tasks_of(recipe)) as verifier:
        # the folder is created last, after every check for user errors
        with contextlib.closing(RunFolder(recipe)) as folder, log_failures(folder.path / "logs" / "controller.log"):
            return await _in_folder(recipe, inputs, folder, verifier, console)


async def _in_folder(recipe: Recipe, inputs: Inputs, folder: RunFolder, verifier: TaskPools, console: Console) -> str:
    """Read and check the run's state before any device is held, then run the controller."""
    start = resume_point(folder.path)
    for line in start.damaged:
        console.print(f"resuming from step {start.step}: {line}", highlight=False)
    logger.info("run %s, attempt %s, from step %d", folder.attempt.run_id, folder.attempt.incarnation, start.step)
    history = read_history(folder.path)
    check_history(folder.path, history, start)
    sampler = Sampler(recipe, inputs.tokenizer, verifier)
    devices = Devices.of(recipe)
    ledger = Ledger(folder.path / "ledger.jsonl", devices.unit, incarnation=folder.attempt.incarnation)
    with contextlib.closing(ledger):
        async with local_launcher(recipe, folder.attempt, secrets.token_hex(32)) as launcher:
            meter = Meter(ledger, devices, start)
            async with metering(meter):
                fleet = await launcher.start()
                _print_fleet(fleet, console)
                with Progress(console, recipe.steps) as progress:
                    controller = Controller(
                        recipe=recipe,
                        prompts=inputs.prompts,
                        folder=folder,
                        fleet=fleet,
                        start=start,
                        history=history,
                        sampler=sampler,
                        sync=WeightSync(fleet.trainer, fleet.engines, recipe),
                        probe=Probe(recipe, sampler, fleet, [*inputs.prompts.training, *inputs.prompts.held_out]),
                        meter=meter,
                        progress=progress,
                    )
                    return await launcher.while_alive(controller.run())


def _print_fleet(fleet: Fleet, console: Console) -> None:
    info, devices = fleet.info, fleet.devices
    console.print(
        f"{info.parameters:,} parameters, {devices.trainer} trainer and {devices.engine} engine devices "
        f"({info.device}, {info.backend}), logits {info.logits}",
        highlight=False,
    )
