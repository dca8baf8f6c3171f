"""`python -m megatron_scalerl train RECIPE`: from a recipe file to a finished run on one machine."""

from __future__ import annotations

import contextlib
import secrets

from rich.console import Console

from megatron_scalerl.controller import Controller
from megatron_scalerl.launch.local import local_launcher
from megatron_scalerl.launch.open_files import allow_open_files
from megatron_scalerl.launch.signals import run_until_signal
from megatron_scalerl.preflight import Inputs, check_inputs
from megatron_scalerl.progress import Progress
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rewards.verifier import VerifierPool
from megatron_scalerl.run_folder import RunFolder


def train(recipe: Recipe, console: Console) -> str:
    """Run or go on with `recipe`; returns why the run ended.

    Raises ValueError for what the user can mend (nothing is written then) and RuntimeError for a process or an
    update that failed, and Stopped for a signal; the run goes on from its last checkpoint when it is started again.
    """
    inputs = check_inputs(recipe)
    for line in inputs.prompts.report.lines():
        console.print(line, highlight=False)
    allow_open_files(recipe)
    return run_until_signal(_train(inputs.resolved(recipe), inputs, console))


async def _train(recipe: Recipe, inputs: Inputs, console: Console) -> str:
    rewards = recipe.rewards
    verifier = VerifierPool(
        rewards.verifier,
        workers=rewards.workers,
        timeout_s=rewards.timeout_s,
        correct=rewards.correct,
        incorrect=rewards.incorrect,
    )
    async with verifier:
        # only now, when nothing of the user's can be wrong any more, a folder is written
        with contextlib.closing(RunFolder(recipe)) as folder:
            return await _in_folder(recipe, inputs, folder, verifier, console)


async def _in_folder(
    recipe: Recipe, inputs: Inputs, folder: RunFolder, verifier: VerifierPool, console: Console
) -> str:
    async with local_launcher(recipe, folder, secrets.token_hex(32)) as launcher:
        fleet = await launcher.start()
        console.print(
            f"{fleet.info.parameters:,} parameters, {fleet.trainer_devices} trainer and {fleet.engine_devices} "
            f"engine devices ({fleet.info.device}, {fleet.info.backend}), logits {fleet.info.logits}",
            highlight=False,
        )
        with Progress(console, recipe.steps) as progress:
            controller = Controller(
                recipe=recipe, inputs=inputs, folder=folder, fleet=fleet, verifier=verifier, progress=progress
            )
            return await launcher.while_alive(controller.run())
