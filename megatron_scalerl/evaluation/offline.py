"""Evaluates a Hugging Face folder with engines of its own: `megatron-scalerl evaluate`.

The engines, the interruption, the decoders and the verifier are those of training; there is no trainer. An engine
that fails is started again, as in a run, and its completions are generated again with their seeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.evaluation.completing import Holders, Request, complete_all
from megatron_scalerl.evaluation.inputs import Evaluated
from megatron_scalerl.evaluation.results import Key, ResultFile, Row
from megatron_scalerl.launch.engines import Engines
from megatron_scalerl.launch.hosts import ONE_HOST
from megatron_scalerl.launch.launcher import until_failure
from megatron_scalerl.launch.placement import Attempt, Placement
from megatron_scalerl.recipe.file import dump_recipe
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.rollouts.decoder_pool import DecoderPool
from megatron_scalerl.rollouts.plans import VALIDATION_PRIORITY, Plans
from megatron_scalerl.rollouts.sampler import Sampler

VERSION = 0
"""The policy version of a folder's weights."""


def all_keys(evaluated: Evaluated, k: int) -> list[Key]:
    """Every completion of an evaluation: file after file, the largest budget first, all problems for each index."""
    return [
        Key(file=file.name, number=problem.number, index=index, budget=budget)
        for file in evaluated.files
        for budget in sorted(evaluated.budgets, key=lambda b: -(b or 0))
        for index in range(k)
        for problem in file.problems
    ]


async def generate(
    evaluated: Evaluated,
    result: ResultFile,
    *,
    k: int,
    seed: int,
    ready: Callable[[], None] = lambda: None,
    finished: Callable[[Row], None] = lambda row: None,
) -> None:
    """Generate and score the completions that `result` lacks.

    ready: called once the engines serve. finished: called with each new row. Raises ValueError for options that vLLM
    refuses, RuntimeError and OSError where engines, decoders or verifiers fail for good.
    """
    missing = result.missing(all_keys(evaluated, k))
    if not missing:
        return
    recipe, logs = evaluated.recipe, result.folder / "logs"
    logs.mkdir(exist_ok=True)
    write_durably(result.folder / "recipe.yaml", dump_recipe(recipe).encode())
    plans = {budget: Plans(evaluated.recipe_at(budget), evaluated.tokenizer) for budget in evaluated.budgets}
    any_plans = next(iter(plans.values()))
    async with (
        VerifierPool(recipe.rewards) as verifier,
        DecoderPool(recipe, evaluated.tokenizer, any_plans, logs=logs) as decoders,
        _engines(evaluated, result.folder) as engines,
    ):
        samplers = {budget: Sampler(plan, decoders=decoders, verifier=verifier) for budget, plan in plans.items()}

        def take(row: Row) -> None:
            result.append(row)
            finished(row)

        async def work() -> None:
            await engines.start()
            ready()
            await complete_all(
                _requests(evaluated, missing, samplers, seed),
                _holders(engines.members),
                version=VERSION,
                at_once=recipe.rollouts.max_in_flight * recipe.engine.count,
                priority=VALIDATION_PRIORITY,
                tokenizer=evaluated.tokenizer,
                finished=take,
            )

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
async def _engines(evaluated: Evaluated, folder: Path) -> AsyncIterator[Engines]:
    """The engines, which are stopped on exit from the block."""
    attempt = Attempt(run_id="evaluation", incarnation="local.0", folder=folder, recipe_file=folder / "recipe.yaml")
    recipe = evaluated.engine_recipe
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
    """Let every engine take requests once it answers: it has loaded the folder's weights. Waits for engines that
    start, until it is cancelled."""
    while True:
        await members.until(lambda: bool(members.stale))
        for engine in members.stale:
            members.serve(engine, VERSION)


def _holders(members: Membership) -> Holders:
    async def any_engine(number: int) -> EngineClient:
        await members.until(lambda: bool(members.serving))
        return members.serving[number % len(members.serving)]

    return Holders(next=any_engine, evict=members.evict)


def _requests(
    evaluated: Evaluated, keys: list[Key], samplers: Mapping[int | None, Sampler], seed: int
) -> Iterator[Request]:
    """Completion j of problem i has the same seed at every budget."""
    for key in keys:
        prompt = evaluated.prompts[key.file][key.number - 1]
        sampler = samplers[key.budget]
        draw = sampler.draw(seed, key.number, key.index)
        yield Request(key=key, problem_id=prompt.prompt_id, prompt=prompt, draw=draw, sampler=sampler)
