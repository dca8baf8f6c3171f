"""Validation: mean@k on the held-out prompts, on one pinned policy version.

Same interruption, sampling and verifier as training; the seeds and cuts are the same at every validation,
so that two of them differ by the policy alone. A truncated completion is wrong. The controller holds the
next weight update back until the validation is done, which pins the version; a token of another version
is an error of ours. (Khatri et al. 2025, section 2: mean@16 on 1,000 held-out prompts every 100 steps.)
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.recipe.sections import ValidationSection
from megatron_scalerl.rollouts.sampler import VALIDATION_PRIORITY, Sampler
from megatron_scalerl.types import CompletionLost, Prompt, Rollout, Score

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """What one validation measured."""

    policy_version: int
    prompts: int
    generations: int
    pass_rate: float
    """Mean over prompts and generations."""
    by_prompt: tuple[float, ...]
    """[prompts] mean over the generations of each prompt, in the order of the held-out prompts."""
    truncated_share: float
    interrupted_share: float
    generated_tokens: int
    mean_completion_tokens: float
    """Tokens per completion."""
    entropy: float
    """Minus the mean log-probability (nats) of all sampled tokens under the engine; forced tokens are left out.

    NaN where no token was sampled.
    """
    lost_completions: int
    """Completions that could not be had, left out of everything above."""


async def validate(
    *,
    engines: Sequence[EngineClient],
    sampler: Sampler,
    prompts: Sequence[Prompt],
    settings: ValidationSection,
    generations: int,
    policy_version: int,
    max_in_flight: int,
    count_tokens: Callable[[int], None] = lambda tokens: None,
) -> Validation:
    """Complete and score every held-out prompt; the engines must serve `policy_version` throughout.

    The first completions of a prompt are the same draws whatever `generations` is. `count_tokens` is told the number
    of tokens of every completion when it is finished. A completion that is lost is tried once more with the same
    draws. Raises RuntimeError where a prompt is left without any.
    """
    prompts = prompts[: settings.prompts]
    assert prompts and generations >= 1
    slots = asyncio.Semaphore(max_in_flight * len(engines))

    async def one(number: int, index: int) -> tuple[Rollout, Score] | None:
        draw = sampler.draw(settings.seed, number, index)
        engine = engines[number % len(engines)]
        async with slots:
            for _ in range(2):
                try:
                    result = await sampler.complete(engine, prompts[number], draw, priority=VALIDATION_PRIORITY)
                except CompletionLost as lost:
                    logger.warning("validation, prompt %s: a completion is lost: %s", prompts[number].prompt_id, lost)
                    continue
                count_tokens(len(result[0].token_ids))
                return result
        return None

    async with asyncio.TaskGroup() as tasks:
        running = [
            [tasks.create_task(one(number, index)) for index in range(generations)] for number in range(len(prompts))
        ]
    done = [[result for task in row if (result := task.result()) is not None] for row in running]
    for prompt, row in zip(prompts, done):
        if not row:
            raise RuntimeError(
                f"validation of version {policy_version}: prompt {prompt.prompt_id}: expected a completion, found "
                f"all {generations} lost"
            )
    return _measured(done, generations, policy_version)


def _measured(done: Sequence[Sequence[tuple[Rollout, Score]]], generations: int, policy_version: int) -> Validation:
    rollouts = [rollout for row in done for rollout, _ in row]
    versions = {version for rollout in rollouts for version in rollout.policy_versions}
    assert versions == {policy_version}, f"validation of version {policy_version} saw versions {sorted(versions)}"
    by_prompt = tuple(sum(score.correct for _, score in row) / len(row) for row in done)
    tokens = sum(len(r.token_ids) for r in rollouts)
    sampled = [p for r in rollouts for p, is_sampled in zip(r.rollout_logprobs, r.loss_mask) if is_sampled]
    return Validation(
        policy_version=policy_version,
        prompts=len(done),
        generations=generations,
        pass_rate=sum(by_prompt) / len(by_prompt),
        by_prompt=by_prompt,
        truncated_share=sum(r.truncated for r in rollouts) / len(rollouts),
        interrupted_share=sum(r.interrupted for r in rollouts) / len(rollouts),
        generated_tokens=tokens,
        mean_completion_tokens=tokens / len(rollouts),
        entropy=-sum(sampled) / len(sampled) if sampled else math.nan,
        lost_completions=len(done) * generations - len(rollouts),
    )
