"""Validation: mean@k on the held-out prompts, with one policy version.

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
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from megatron_scalerl.controller.held_engine import HeldEngine, HeldEngineLost
from megatron_scalerl.controller.outcomes import Outcomes, means, within_variance
from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.engine.rounds import Rounds
from megatron_scalerl.prompts.dataset import first_of_each_task
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.sampler import VALIDATION_PRIORITY, Sampler, ScoredCompletion
from megatron_scalerl.types import Completion, CompletionLost, ComputeUnit, PassRate, Prompt, TaskPassRate

logger = logging.getLogger(__name__)
_TRIES = 2
"""Attempts at a completion, with the same seed and interruption point."""


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
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    [
                        tasks.create_task(self._completion(step, number, index, slots, on=on))
                        for index in range(generations)
                    ]
                    for number in range(len(self._prompts))
                ]
        except BaseExceptionGroup as failures:
            lost = failures.subgroup(HeldEngineLost)
            if lost is None or lost.exceptions != failures.exceptions:
                raise
            raise HeldEngineLost(str(lost.exceptions[0])) from None
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
        draw = self._sampler.draw(self._seed + step * self._fresh, number, index)
        tries = 0
        async with slots:
            while tries < _TRIES:
                engine = first or await self._engine(number, on)
                first = None
                try:
                    result = await self._sampler.complete(engine, prompt, draw, priority=VALIDATION_PRIORITY + rank)
                    found = {result.completion.first_version, result.completion.last_version}
                    if found != {step}:
                        raise EngineError(f"{engine.name}: policy versions: expected {step}, found {sorted(found)}")
                except CompletionLost as lost:
                    logger.warning("validation, prompt %s: a completion is lost: %s", prompt.prompt_id, lost)
                    tries += 1
                except EngineError as error:
                    self._engines.evict(engine, str(error))
                else:
                    self._count_tokens(result.completion.tokens, on)
                    return result
        return None

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
