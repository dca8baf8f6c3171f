"""The probe: checks that trainer and engines compute the same log-probs after a weight update.

Each engine completes a few fixed prompts with fixed seeds, and the trainer scores them token by token. The digest of
the received bytes is not sufficient: it does not cover the copies that an engine computes with (vLLM's CPU backend
repacks weights, where no digest reaches them).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from megatron_scalerl.batching.rollout_bytes import RolloutArrays, read
from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.launch.placement import Fleet
from megatron_scalerl.processes.spans import spanned
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.sampler import VALIDATION_PRIORITY, Sampler
from megatron_scalerl.types import CompletionLost, Prompt

logger = logging.getLogger(__name__)

PROMPTS = 4
TOKENS = 256
"""Longest completion: the trainer waits for it, and a whole one may take minutes."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Nats by policy.dtype, if weights.probe_tolerance is unset."""


class ProbeError(RuntimeError):
    """An engine's log-probs or policy version do not match the trainer's."""


class Probe:
    """Compares every engine with the trainer, on the same prompts each time."""

    def __init__(self, recipe: Recipe, sampler: Sampler, fleet: Fleet, prompts: Sequence[Prompt]) -> None:
        self._sampler = sampler
        self._fleet = fleet
        self._prompts = sorted(prompts, key=lambda p: p.prompt_id)[:PROMPTS]
        self._seed = recipe.seed
        self._tolerance = recipe.weights.probe_tolerance or TOLERANCE[recipe.policy.dtype]
        self._checked: set[EngineClient] = set()

    @spanned("probe")
    async def check(self, policy_version: int, *, new_only: bool = False) -> dict[str, float]:
        """Mean and largest |trainer - engine log-prob| (nats) of the engines that serve `policy_version`.

        new_only: of those whose server was started since the last check. An engine that fails meanwhile is evicted.
        Raises ProbeError beyond the tolerance.
        """
        found: list[float] = []
        self._checked &= set(self._fleet.engines.serving)
        for engine in self._fleet.engines.serving:
            if new_only and engine in self._checked:
                continue
            rollouts = await self._completions(engine)
            if rollouts is None:
                continue
            differences = await self._differences(rollouts)
            versions = sorted({v for rollout in rollouts for v in rollout.policy_versions.tolist()})
            if versions != [policy_version]:
                raise ProbeError(f"{engine.name}: expected policy version {policy_version}, found {versions}")
            if max(differences) > self._tolerance:
                raise ProbeError(
                    f"{engine.name} at policy version {policy_version}: expected log-probs within "
                    f"{self._tolerance} nats of the trainer's (weights.probe_tolerance), found {max(differences):.3g}"
                )
            found += differences
            self._checked.add(engine)
        return {"probe_mismatch_mean": sum(found) / len(found), "probe_mismatch_max": max(found)} if found else {}

    async def _completions(self, engine: EngineClient) -> list[RolloutArrays] | None:
        """The probe's completions; None if the engine failed, and is evicted, or if a completion was lost."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(
                        self._sampler.complete(
                            engine,
                            prompt,
                            self._sampler.draw(self._seed, -1, index),
                            priority=VALIDATION_PRIORITY,
                            max_tokens=TOKENS,
                        )
                    )
                    for index, prompt in enumerate(self._prompts)
                ]
        except* EngineError as errors:
            self._fleet.engines.evict(engine, str(errors.exceptions[0]))
        except* CompletionLost as errors:
            logger.warning("%s is not probed: a completion is lost: %s", engine.name, errors.exceptions[0])
        if engine not in self._fleet.engines.serving or any(task.cancelled() or task.exception() for task in running):
            return None
        return [read(task.result().data) for task in running]

    async def _differences(self, rollouts: Sequence[RolloutArrays]) -> list[float]:
        sequences = [[*p.token_ids, *r.token_ids.tolist()] for p, r in zip(self._prompts, rollouts)]
        scored = await self._fleet.trainer.logprobs(sequences)
        return [
            abs(trainer - engine)
            for prompt, rollout, logprobs in zip(self._prompts, rollouts, scored)
            for trainer, engine, sampled in zip(
                logprobs[len(prompt.token_ids) - 1 :], rollout.rollout_logprobs.tolist(), rollout.loss_mask
            )
            if sampled
        ]
