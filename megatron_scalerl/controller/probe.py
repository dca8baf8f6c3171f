"""The probe: checks that trainer and engines compute the same log-probs after a weight update.

Each engine completes a few fixed prompts with fixed seeds, and the trainer computes the log-prob of each token of the
completions. The digests of a weight update do not replace the probe: an engine may compute with copies of the weights
that no digest covers (vLLM's CPU backend repacks weights).
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from megatron_scalerl.batching.rollout_bytes import RolloutArrays, read
from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.launch.placement import Fleet
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.plans import VALIDATION_PRIORITY
from megatron_scalerl.rollouts.sampler import Sampler
from megatron_scalerl.types import CompletionLost, Prompt

logger = logging.getLogger(__name__)

PROMPTS = 4
TOKENS = 256
"""Longest completion of a probe (tokens). The trainer waits for the probe, and longer completions may take
minutes."""
TOLERANCE = {"float32": 5e-4, "bfloat16": 0.15}
"""Tolerated mean over tokens of |trainer - engine log-prob| (nats), by policy.dtype; used if weights.probe_tolerance
is not set.

In bf16, the mean is 0.02 to 0.08 for correct random policies of four layers. With one tensor zeroed or transposed, or
two experts exchanged, the mean is 0.35 or more (tests/controller/test_probe_bounds.py).
"""
FAR = 20
"""Multiple of the tolerance by which the log-prob of a single token may differ. In a correct Qwen3-MoE in bf16, the
log-prob of one token differs by 2.2 nats, because trainer and engine choose different experts."""


class ProbeError(RuntimeError):
    """An engine's log-probs or policy version do not match the trainer's."""


class Scored(NamedTuple):
    """A sampled token with the log-probs (nats) of trainer and engine."""

    prompt_id: str
    place: int
    """Number of the token in the completion, from 0."""
    token_id: int
    trainer: float
    engine: float

    @property
    def difference(self) -> float:
        """|trainer - engine log-prob| (nats); NaN if either log-prob is NaN."""
        return abs(self.trainer - self.engine)


def judged(tokens: Sequence[Scored], tolerance: float) -> str:
    """A line that says how far an engine's log-probs differ from the trainer's; empty within the tolerance.

    A log-prob that is NaN exceeds every tolerance. tolerance: see TOLERANCE; for a single token, FAR times as much.
    """
    mean = fmean(token.difference for token in tokens)
    # A NaN compares false with every number, so the key of `max` makes a NaN the worst difference.
    worst = max(tokens, key=lambda token: (math.isnan(token.difference), token.difference))
    if mean <= tolerance and worst.difference <= FAR * tolerance:
        return ""
    return (
        f"its log-probs differ from the trainer's by {mean:.3g} nats on average, and by {worst.difference:.3g} in "
        f"token {worst.place} of {worst.prompt_id} (id {worst.token_id}: trainer {worst.trainer:.4g}, engine "
        f"{worst.engine:.4g}); weights.probe_tolerance allows {tolerance:g} and {FAR * tolerance:g}"
    )


class Probe:
    """Compares every engine with the trainer, on the same prompts each time."""

    def __init__(self, recipe: Recipe, sampler: Sampler, fleet: Fleet, prompts: Sequence[Prompt]):
        self._sampler = sampler
        self._fleet = fleet
        self._prompts = sorted(prompts, key=lambda p: p.prompt_id)[:PROMPTS]
        self._seed = recipe.seed
        self._tolerance = recipe.weights.probe_tolerance or TOLERANCE[recipe.policy.dtype]
        self._checked_engines: set[EngineClient] = set()

    async def check(self, policy_version: int, *, new_only: bool = False) -> dict[str, float]:
        """Mean and largest |trainer - engine log-prob| (nats) of the engines that serve `policy_version`.

        new_only: True to check only engines that started after the last check. An engine that fails during the probe
        is evicted. Raises ProbeError if an engine differs by more than the tolerance or has another policy version.
        """
        differences: list[float] = []
        # An engine that does not serve now is probed again once the engine serves.
        self._checked_engines &= set(self._fleet.engines.serving)
        for engine in self._fleet.engines.serving:
            if new_only and engine in self._checked_engines:
                continue
            rollouts = await self._completions(engine)
            if rollouts is None:
                continue
            tokens = await self._scored(rollouts)
            versions = sorted({v for rollout in rollouts for v in rollout.policy_versions.tolist()})
            if versions != [policy_version]:
                raise ProbeError(
                    f"{engine.name} generated tokens at policy versions {versions}, but should have {policy_version}"
                )
            if problem := judged(tokens, self._tolerance):
                raise ProbeError(f"{engine.name} at policy version {policy_version}: {problem}")
            differences += [token.difference for token in tokens]
            self._checked_engines.add(engine)
        if not differences:
            return {}
        return {
            "probe_mismatch_mean": sum(differences) / len(differences),
            "probe_mismatch_max": max(differences),
        }

    async def _completions(self, engine: EngineClient) -> list[RolloutArrays] | None:
        """The engine's completions of the probe's prompts; None if the engine is evicted, or if a completion was
        lost."""
        try:
            async with asyncio.TaskGroup() as tasks:
                attempts = [
                    tasks.create_task(
                        # Seeds depend on the group id. No group has the id -1, so no completion of training has a
                        # seed of the probe.
                        self._sampler.complete(
                            engine,
                            prompt,
                            self._sampler.draw(prompt, self._seed, -1, index),
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
        # If one completion failed, the task group has cancelled the rest. The engine may also have been evicted
        # elsewhere.
        if engine not in self._fleet.engines.serving or any(
            task.cancelled() or task.exception() for task in attempts
        ):
            return None
        return [read(task.result().parts[0]) for task in attempts]

    async def _scored(self, rollouts: Sequence[RolloutArrays]) -> list[Scored]:
        sequences = [[*p.token_ids, *r.token_ids.tolist()] for p, r in zip(self._prompts, rollouts)]
        sequence_logprobs = await self._fleet.trainer.logprobs(sequences)
        tokens = []
        for prompt, rollout, logprobs in zip(self._prompts, rollouts, sequence_logprobs):
            columns = zip(
                rollout.token_ids.tolist(),
                # Log-prob i is of token i + 1, so the completion's log-probs begin one place before the prompt's end.
                logprobs[len(prompt.token_ids) - 1 :],
                rollout.rollout_logprobs.tolist(),
                rollout.loss_mask,
            )
            for place, (token_id, trainer, engine, sampled) in enumerate(columns):
                if sampled:
                    tokens.append(Scored(prompt.prompt_id, place, token_id, trainer, engine))
        return tokens
