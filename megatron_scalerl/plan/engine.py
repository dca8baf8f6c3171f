"""One engine: what fits on its devices, and how fast it decodes.

A decoding step reads the weights that its tokens need and the KV cache of every running completion; both divide by
the memory rate that the devices reach. So a step takes fixed + per_completion x n seconds with n running.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_scalerl.models.family import Family
from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import Parameters
from megatron_scalerl.plan.hardware import GIB, Gpu
from megatron_scalerl.plan.lengths import Lengths
from megatron_scalerl.plan.memory import WIDTH
from megatron_scalerl.recipe import Recipe

MEMORY_UTILISATION = 0.92
"""vLLM 0.32's default of gpu_memory_utilization."""
MAX_NUM_SEQS = 256
"""Completions that run at once where engine.vllm.max_num_seqs is silent (vLLM's default for servers is no lower)."""


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Memory of one device of an engine."""

    devices: int
    context_tokens: int
    """Longest prompt and completion."""
    weights_bytes: float
    overhead_bytes: float
    kv_bytes: float
    """Left for the KV cache."""
    kv_bytes_per_token: float
    """On all devices together."""
    limit_bytes: float
    """Device memory x gpu_memory_utilization."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the engine's cache holds."""
        return max(0, int(self.kv_bytes * self.devices / self.kv_bytes_per_token))

    @property
    def full_sequences(self) -> float:
        """Sequences of the longest length that fit at once."""
        return self.kv_tokens / self.context_tokens

    @property
    def missing_bytes(self) -> float:
        """What a device lacks for one sequence of the longest length; 0 where it fits."""
        need = self.kv_bytes_per_token * self.context_tokens / self.devices
        return max(0.0, need - self.kv_bytes)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Speed of one engine."""

    fixed_seconds: float
    per_completion_seconds: float
    prefill_seconds: float
    """Of one prompt."""
    running: int
    """Completions that run at once; further ones wait inside the engine."""

    def step_seconds(self, running: int) -> float:
        """One decoding step with `running` completions."""
        return self.fixed_seconds + self.per_completion_seconds * running

    def tokens_per_second(self, running: int) -> float:
        """Of the whole engine."""
        return running / self.step_seconds(running) if running else 0.0


def engine_memory(recipe: Recipe, family: Family, p: Parameters, gpu: Gpu, assumed: Assumptions) -> EngineMemory:
    """Weights, overhead and KV cache of one device. Raises ValueError where vLLM's parallel sizes disagree."""
    options, devices = recipe.engine.vllm, recipe.engine.devices_per_engine
    product = math.prod(int(options.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline", "data"))
    if product != devices:
        raise ValueError(
            f"engine.vllm.tensor_parallel_size: expected sizes that multiply to devices_per_engine {devices}, "
            f"found {product}"
        )
    tp = int(options.get("tensor_parallel_size", 1))
    groups, layers = family.transformer["num_query_groups"], len(family.layers)
    copies = max(1, tp // groups)  # fewer key-value heads than devices: they are replicated
    width = 1 if "fp8" in str(options.get("kv_cache_dtype", "auto")) else WIDTH[recipe.policy.dtype]
    limit = gpu.memory_bytes * float(options.get("gpu_memory_utilization", MEMORY_UTILISATION))
    weights = p.total * WIDTH[recipe.policy.dtype] / devices
    overhead = assumed.engine_overhead_gib * GIB
    cache = options.get("kv_cache_memory_bytes")
    return EngineMemory(
        devices=devices,
        context_tokens=longest_tokens(recipe),
        weights_bytes=weights,
        overhead_bytes=overhead,
        kv_bytes=float(cache) if cache else limit - weights - overhead,
        kv_bytes_per_token=2.0 * layers * groups * copies * family.transformer["kv_channels"] * width,
        limit_bytes=limit,
    )


def longest_tokens(recipe: Recipe) -> int:
    """Longest prompt and completion; engine.vllm.max_model_len where it is given."""
    return int(recipe.engine.vllm.get("max_model_len") or recipe.longest_sequence())


def decoding(
    recipe: Recipe, p: Parameters, memory: EngineMemory, gpu: Gpu, lengths: Lengths, assumed: Assumptions
) -> Decoding:
    """Speed under the load that the recipe and the cache allow."""
    resident = assumed.prompt_tokens + lengths.mean_resident
    room = int(memory.kv_tokens / resident)
    asked = min(int(recipe.engine.vllm.get("max_num_seqs", MAX_NUM_SEQS)), recipe.rollouts.max_in_flight)
    running = max(1, min(room, asked))
    flops = 2.0 * (p.active - p.embedding) * assumed.prompt_tokens
    prefill = flops / (memory.devices * gpu.bf16_flops * assumed.dense_utilisation)
    if assumed.engine_tokens_per_second is not None:
        rate = assumed.engine_tokens_per_second * memory.devices
        return Decoding(fixed_seconds=0.0, per_completion_seconds=1 / rate, prefill_seconds=0.0, running=running)
    speed = memory.devices * gpu.memory_bytes_per_second * assumed.hbm_efficiency
    width = memory.weights_bytes * memory.devices / p.total
    share = 1 - (1 - (p.active - (p.total - p.experts)) / p.experts) ** running if p.experts else 0.0
    read = width * (p.total - p.experts - p.embedding + p.experts * share)
    return Decoding(
        fixed_seconds=assumed.engine_step_ms / 1000 + read / speed,
        per_completion_seconds=memory.kv_bytes_per_token * resident / speed,
        prefill_seconds=prefill,
        running=running,
    )
