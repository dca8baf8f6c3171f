"""`python -m megatron_scalerl train RECIPE`: from a recipe file to a finished run on one machine."""

from __future__ import annotations

import contextlib
import logging
import secrets

from rich.console import Console

from megatron_scalerl.controller.failures import under_way
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
from megatron_scalerl.rewards.verifier import VerifierPool
from megatron_scalerl.rollouts.journal import read_history
from megatron_scalerl.rollouts.sampler import Sampler

logger = logging.getLogger(__name__)


def train(recipe: Recipe, console: Console) -> str:
    """Run or go on with `recipe`; returns why the run ended.

    Raises ValueError for the user's mistakes (nothing is written then), RuntimeError for a process or an update
    that failed, and Stopped for a signal; the run goes on from its last checkpoint when it is started again.
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
    async with VerifierPool(recipe.rewards) as verifier:
        # only now, when no mistake of the user's can be left, a folder is written
        with contextlib.closing(RunFolder(recipe)) as folder, under_way(folder.path / "logs" / "controller.log"):
            return await _in_folder(recipe, inputs, folder, verifier, console)


async def _in_folder(
    recipe: Recipe, inputs: Inputs, folder: RunFolder, verifier: VerifierPool, console: Console
) -> str:
    """Everything that can be refused is read before a device is held."""
    start = resume_point(folder.path)
    for line in start.damaged:
        console.print(f"going on from step {start.step}: {line}", highlight=False)
    logger.info("run %s, attempt %s, from step %d", folder.run_id, folder.incarnation, start.step)
    history = read_history(folder.path)
    check_history(folder.path, history, start)
    sampler = Sampler(recipe, inputs.tokenizer, verifier)
    devices = Devices.of(recipe)
    with contextlib.closing(
        Ledger(folder.path / "ledger.jsonl", devices.unit, incarnation=folder.incarnation)
    ) as ledger:
        async with local_launcher(recipe, folder.attempt, secrets.token_hex(32)) as launcher:
            meter = Meter(
                ledger,
                trainer_devices=devices.trainer,
                engine_devices=devices.engine,
                batches=start.batches,
                step=start.step,
            )
            async with metering(meter):
                fleet = await launcher.start()
                _announce(fleet, console)
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


def _announce(fleet: Fleet, console: Console) -> None:
    info, devices = fleet.info, fleet.devices
    console.print(
        f"{info.parameters:,} parameters, {devices.trainer} trainer and {devices.engine} engine devices "
        f"({info.device}, {info.backend}), logits {info.logits}",
        highlight=False,
    )
