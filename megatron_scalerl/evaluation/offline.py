"""Evaluates a Hugging Face folder with engines started for the evaluation: `megatron-scalerl evaluate`.

Engines, interruption, decoders and verifier are the same as in training; there is no trainer. An engine that fails is
started again, as in a run, and lost completions are generated again with the same seeds.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.evaluation.completing import Completer
from megatron_scalerl.evaluation.inputs import EvaluationInputs, at_budget
from megatron_scalerl.evaluation.results import ResultFile
from megatron_scalerl.launch.engines import Engines
from megatron_scalerl.launch.hosts import ONE_HOST
from megatron_scalerl.launch.launcher import until_failure
from megatron_scalerl.launch.placement import Attempt, Placement
from megatron_scalerl.recipe.file import dump_recipe
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.rollouts.episodes import sampling

VERSION = 0
"""The policy version of a folder's weights."""


async def generate(
    evaluated: EvaluationInputs,
    result: ResultFile,
    *,
    k: int,
    seed: int,
    ready: Callable[[], None],
    finished: Callable[[], None],
) -> None:
    """Generate and score the completions that `result` lacks.

    ready: called once the engines serve. finished: called after each new row. Raises ValueError for options that vLLM
    refuses, RuntimeError and OSError if engines, decoders or verifiers fail for good.
    """
    if not result.missing(evaluated.keys(k)):
        return
    recipe = evaluated.recipe
    logs = result.folder / "logs"
    logs.mkdir(exist_ok=True)
    write_durably(result.folder / "recipe.yaml", dump_recipe(recipe).encode())
    async with (
        VerifierPool(recipe.rewards) as verifier,
        sampling(recipe, evaluated.tokenizer, verifier=verifier, logs=logs) as sampler_of,
        _engines(evaluated, result.folder) as engines,
    ):
        samplers = {budget: sampler_of(at_budget(recipe, budget)) for budget in evaluated.budgets}
        at_once = recipe.rollouts.max_in_flight * recipe.engine.count
        completer = Completer(members=engines.members, version=VERSION, at_once=at_once)

        async def work() -> None:
            await engines.start()
            ready()
            await evaluated.complete(result, completer, samplers, k=k, seed=seed, finished=finished)

        serving = asyncio.create_task(_serve(engines.members))
        try:
            await until_failure(work(), engines.watch)
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            serving.cancel()


def _first(failures: BaseException) -> BaseException:
    """The first failure of concurrent tasks."""
    while isinstance(failures, BaseExceptionGroup):
        failures = failures.exceptions[0]
    return failures


@contextlib.asynccontextmanager
async def _engines(evaluated: EvaluationInputs, folder: Path) -> AsyncIterator[Engines]:
    """The engines, which are stopped on exit from the block."""
    attempt = Attempt(run_id="evaluation", incarnation="local.0", folder=folder, recipe_file=folder / "recipe.yaml")
    # The engines have room for the largest budget, and also serve the smaller budgets.
    largest = max((budget for budget in evaluated.budgets if budget is not None), default=None)
    recipe = at_budget(evaluated.recipe, largest)
    engines = Engines(
        recipe,
        placement=Placement.of(recipe, ONE_HOST, trainer=False),
        hosts=ONE_HOST,
        attempt=attempt,
        secret=secrets.token_hex(32),
    )
    try:
        yield engines
    finally:
        await engines.stop()


async def _serve(members: Membership) -> None:
    """Let every engine take requests from the first answer on. An engine that answers has the folder's weights.

    Waits for starting engines until the task is cancelled.
    """
    while True:
        await members.until(lambda: bool(members.stale))
        for engine in members.stale:
            members.serve(engine, VERSION)
