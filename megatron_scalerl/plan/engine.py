"""KV-cache capacity and decode speed of an engine.

A decode step reads the weights that the step's tokens use, and the KV cache of every running completion. It reads
them at the memory bandwidth that the devices reach. With n running completions the step takes fixed + per_completion
x n seconds.
"""

from megatron_scalerl.models.family import Family
from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import Parameters, count, elements, trained_family
from megatron_scalerl.plan.hardware import GIB, Gpu
from megatron_scalerl.plan.memory import WIDTH
from megatron_scalerl.plan.update import EngineShape
from megatron_scalerl.plan.work import Lengths
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record

MEMORY_UTILIZATION = 0.92
"""vLLM 0.32's default gpu_memory_utilization."""
MAX_NUM_SEQS = 256
"""Assumed limit of an engine's concurrent sequences if engine.vllm.max_num_seqs is not set. vLLM's default is at
least as high."""


@record
class EngineMemory:
    """Memory on one device of an engine."""

    devices: int
    copies: int
    """Number of data-parallel copies, in one engine, of all weights except the experts, which exist once."""
    context_tokens: int
    """engine.vllm.max_model_len if set, else the maximum length of prompt and completion."""
    weights_bytes: float
    overhead_bytes: float
    kv_bytes: float
    """Bytes of the device that are available to the KV cache."""
    kv_bytes_per_token: float
    """Bytes of one token's KV cache on all devices of the engine together."""
    limit_bytes: float
    """Device memory x gpu_memory_utilization."""
    group_bytes: float
    """Bytes of the broadcast groups over which weights arrive. vLLM does not count these bytes."""

    @property
    def used_bytes(self) -> float:
        """Bytes of weights, overhead and KV cache."""
        return self.weights_bytes + self.overhead_bytes + self.kv_bytes

    @property
    def total(self) -> float:
        """Bytes that have to be free on a device before the engine starts."""
        # vLLM starts only where its whole share, gpu_memory_utilization of the device, is free.
        return max(self.limit_bytes, self.used_bytes) + self.group_bytes

    @property
    def kv_tokens(self) -> int:
        """KV-cache capacity of the engine (tokens)."""
        return max(0, int(self.kv_bytes * self.devices / self.kv_bytes_per_token))

    @property
    def full_sequences(self) -> float:
        """Number of sequences of maximum length whose KV cache fits at the same time."""
        return self.kv_tokens / self.context_tokens

    @property
    def missing_bytes(self) -> float:
        """Bytes that a device lacks for one sequence of maximum length; 0 if the sequence fits."""
        need = self.kv_bytes_per_token * self.context_tokens * self.copies / self.devices
        return max(0.0, need - self.kv_bytes)


@record
class Decoding:
    """Decode speed of an engine."""

    fixed_seconds: float
    per_completion_seconds: float
    prefill_seconds: float
    """Seconds of prefill for one completion: of the prompt and, in an episode, of the environment's replies and of
    text that the prefix cache has lost."""
    running: int
    """Largest number of concurrent completions. Further completions are queued in the engine."""

    def step_seconds(self, running: int) -> float:
        """Time of one decode step with `running` completions."""
        return self.fixed_seconds + self.per_completion_seconds * running

    def tokens_per_second(self, running: int) -> float:
        """Tokens per second of the whole engine with `running` completions."""
        return running / self.step_seconds(max(running, 1))


def engine_memory(
    recipe: Recipe, family: Family, p: Parameters, gpu: Gpu, assumed: Assumptions, *, group_bytes: float = 0.0
) -> EngineMemory:
    """Weights, overhead and KV cache of one device. Raises ValueError if vLLM's parallel sizes do not multiply to
    devices_per_engine."""
    options = recipe.engine.vllm
    devices = recipe.engine.devices_per_engine
    shape = EngineShape.of_options(options)
    # vLLM takes as many devices as the product of the parallel sizes. The launcher reserves devices_per_engine.
    product = shape.tensor * shape.pipeline * shape.data
    if product != devices:
        raise ValueError(
            f"engine.vllm.tensor_parallel_size: the product of vLLM's parallel sizes is {product}, and "
            f"engine.devices_per_engine is {devices}; make them equal"
        )
    t = family.transformer
    # Latent attention caches the down-projected keys and values, which every device holds whole.
    if "kv_lora_rank" in t:
        per_layer = float(t["kv_lora_rank"] + t["qk_pos_emb_head_dim"]) * shape.tensor
    else:
        groups = t["num_query_groups"]
        # vLLM replicates key-value heads if there are fewer heads than devices.
        copies = max(1, shape.tensor // groups)
        per_layer = 2.0 * groups * copies * t["kv_channels"]
    width = WIDTH[recipe.policy.dtype]
    if "fp8" in str(options.get("kv_cache_dtype", "auto")):
        width = 1
    limit = gpu.memory_bytes * float(options.get("gpu_memory_utilization", MEMORY_UTILIZATION))
    unsharded_elements = sum(elements(rule) for rule in family.rules if not rule.sharded and not rule.frozen)
    # Every device has a whole copy of unsharded weights, such as norms and routers.
    dense = p.total - p.experts + (shape.tensor - 1) * unsharded_elements
    weights = (shape.data * dense + p.experts) * WIDTH[recipe.policy.dtype] / devices
    # Whole adapters are counted on every device. This is an upper bound: tensor parallelism shards A or B.
    if recipe.adapters_alone:
        weights += count(trained_family(recipe, family)).total * WIDTH[recipe.policy.dtype]
    overhead = assumed.engine_overhead_gib * GIB
    cache = options.get("kv_cache_memory_bytes") or limit - weights - overhead
    return EngineMemory(
        devices=devices,
        copies=shape.data,
        context_tokens=int(options.get("max_model_len") or recipe.longest_sequence()),
        weights_bytes=weights,
        overhead_bytes=overhead,
        kv_bytes=float(cache),
        kv_bytes_per_token=len(family.layers) * per_layer * width,
        limit_bytes=limit,
        group_bytes=group_bytes,
    )


def decoding(
    recipe: Recipe, p: Parameters, memory: EngineMemory, gpu: Gpu, lengths: Lengths, assumed: Assumptions
) -> Decoding:
    """Decode speed at the concurrency that the recipe and the KV cache allow."""
    resident = assumed.prompt_tokens + lengths.mean_resident
    room = int(memory.kv_tokens / resident)
    max_running = memory.copies * int(recipe.engine.vllm.get("max_num_seqs", MAX_NUM_SEQS))
    running = max(1, min(room, max_running, recipe.rollouts.max_in_flight))
    missed = 0.0
    # Each weight update during an episode empties the prefix cache.
    if recipe.rollouts.schedule == "pipeline":
        missed = min(lengths.replies, recipe.rollouts.max_staleness_steps)
    # On average half of an episode's text comes before a turn.
    context = assumed.prompt_tokens + (lengths.mean + lengths.written) / 2
    flops = 2.0 * (p.active - p.embedding) * (assumed.prompt_tokens + lengths.written + missed * context)
    prefill = flops / (memory.devices * gpu.bf16_flops * assumed.dense_utilization)
    if assumed.engine_tokens_per_second is not None:
        rate = assumed.engine_tokens_per_second * memory.devices
        return Decoding(fixed_seconds=0.0, per_completion_seconds=1 / rate, prefill_seconds=0.0, running=running)
    speed = memory.devices * gpu.memory_bytes_per_second * assumed.hbm_efficiency
    dense = p.total - p.experts
    read_experts = 0.0
    if p.experts:
        # A step reads the experts that at least one running completion has chosen.
        chosen = (p.active - dense) / p.experts
        read_experts = p.experts * (1 - (1 - chosen) ** running)
    read = WIDTH[recipe.policy.dtype] * (memory.copies * (dense - p.embedding) + read_experts)
    return Decoding(
        fixed_seconds=assumed.engine_step_ms / 1000 + read / speed,
        per_completion_seconds=memory.kv_bytes_per_token * resident / speed,
        prefill_seconds=prefill,
        running=running,
    )
