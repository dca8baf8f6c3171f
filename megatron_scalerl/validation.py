"""Validation: mean@k on the held-out prompts, on one pinned policy version.

Same interruption, sampling and verifier as training; the seeds and cuts are the same at every validation,
so that two of them differ by the policy alone. A truncated completion is wrong. The controller holds the
next weight update back until the validation is done, which pins the version; a token of another version
is an error of ours. (Khatri et al. 2025, section 2: mean@16 on 1,000 held-out prompts every 100 steps.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_scalerl.recipe_sections import ValidationSection
from megatron_scalerl.rollouts.engine_client import EngineClient
from megatron_scalerl.rollouts.sampler import VALIDATION_PRIORITY, Sampler
from megatron_scalerl.types import Prompt, Rollout, Score


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

    @property
    def mean_completion_tokens(self) -> float:
        """Tokens per completion."""
        return self.generated_tokens / (self.prompts * self.generations)


async def validate(
    *,
    engines: Sequence[EngineClient],
    sampler: Sampler,
    prompts: Sequence[Prompt],
    settings: ValidationSection,
    generations: int,
    policy_version: int,
    max_in_flight: int,
) -> Validation:
    """Complete and score every held-out prompt; the engines must serve `policy_version` throughout.

    The first completions of a prompt are the same draws whatever `generations` is.
    """
    prompts = prompts[: settings.prompts]
    assert prompts and generations >= 1
    slots = asyncio.Semaphore(max_in_flight * len(engines))

    async def one(number: int, index: int) -> tuple[Rollout, Score]:
        draw = sampler.draw(settings.seed, number, index)
        async with slots:
            return await sampler.complete(
                engines[number % len(engines)], prompts[number], draw, priority=VALIDATION_PRIORITY
            )

    async with asyncio.TaskGroup() as tasks:
        running = [
            [tasks.create_task(one(number, index)) for index in range(generations)]
            for number in range(len(prompts))
        ]
    done = [[task.result() for task in row] for row in running]
    rollouts = [rollout for row in done for rollout, _ in row]
    versions = {version for rollout in rollouts for version in rollout.policy_versions}
    assert versions == {policy_version}, f"validation of version {policy_version} saw versions {sorted(versions)}"
    by_prompt = tuple(sum(score.correct for _, score in row) / len(row) for row in done)
    return Validation(
        policy_version=policy_version,
        prompts=len(prompts),
        generations=generations,
        pass_rate=sum(by_prompt) / len(by_prompt),
        by_prompt=by_prompt,
        truncated_share=sum(r.truncated for r in rollouts) / len(rollouts),
        interrupted_share=sum(r.interrupted for r in rollouts) / len(rollouts),
        generated_tokens=sum(len(r.token_ids) for r in rollouts),
    )
