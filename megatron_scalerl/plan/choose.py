"""The layout of trainer and engines that `init` writes: the first that fits the GPUs with room to spare."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_scalerl.models.family import Family
from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import count, load_family
from megatron_scalerl.plan.engine import engine_memory
from megatron_scalerl.plan.hardware import MIB, Gpu
from megatron_scalerl.plan.planner import RunPlan, make_plan
from megatron_scalerl.recipe import Recipe

SIZES = (1, 2, 4, 8)
"""Sizes of model-parallel groups and of engines: within a node of eight GPUs."""
MOST_GPUS = 256
"""More are not tried for a policy that does not fit the GPUs that there are."""
SPARE = 0.1
"""Share of a GPU that has to be free on the fullest trainer rank: the planner's memory is an estimate."""
SEQUENCES = 8
"""Sequences of maximum length that an engine's KV cache has to hold at least."""
SHARES = (0.25, 0.4, 0.55)
"""Shares of a device for an engine that runs on the trainer's devices."""

Layout = dict[str, Any]
"""Section of the recipe -> its settings."""


def choose(recipe: Recipe, config: Path, gpus: int, gpu: Gpu) -> RunPlan:
    """The recipe with a layout for `gpus`, planned.

    Raises ValueError where none fits, naming the number of GPUs with which one would.
    """
    if plan := _first(recipe, config, gpus, gpu):
        return plan
    number = gpus
    while (number := 2 * number) <= MOST_GPUS:
        if plan := _first(recipe, config, number, gpu):
            break
    more = f"{number} would do" if plan else f"nor {MOST_GPUS}; write the recipe by hand, with a pipeline"
    raise ValueError(f"--gpus: no layout of {recipe.policy.path} fits {gpus} x {gpu.name}; {more}")


def _first(recipe: Recipe, config: Path, gpus: int, gpu: Gpu) -> RunPlan | None:
    family, _ = load_family(config)
    for colocate in (True,) if gpus == 1 else (False, True):
        engine = _smallest_engine(recipe, family, gpus, gpu, colocate=colocate)
        if engine is None:
            continue
        for size, megatron in _trainers(family, gpus):
            trainer = {"trainer": {"world_size": gpus if colocate else size}, "megatron": megatron}
            try:
                laid = Recipe.model_validate(recipe.model_dump() | {"engine": engine} | trainer)
                plan = make_plan(laid, config, gpus, gpu, Assumptions())
            except ValueError:  # a size that divides no heads, or leaves no engine
                continue
            if not plan.problems() and plan.headroom >= SPARE * gpu.memory_bytes:
                sizes = {
                    "trainer": {"world_size": plan.split.trainer},
                    "engine": engine | {"count": plan.split.engines},
                }
                return replace(plan, recipe=Recipe.model_validate(laid.model_dump() | sizes), split_is_recipes=True)
    return None


def _smallest_engine(recipe: Recipe, family: Family, gpus: int, gpu: Gpu, *, colocate: bool) -> Layout | None:
    """The section `engine` with the fewest devices, and the smallest share of them, in which the KV cache fits."""
    heads = family.transformer["num_attention_heads"]
    for size in (size for size in SIZES if heads % size == 0 and (gpus % size == 0 if colocate else size < gpus)):
        vllm: Layout = {"tensor_parallel_size": size} if size > 1 else {}
        engine = {"devices_per_engine": size, "vllm": vllm}
        sized = Recipe.model_validate(recipe.model_dump() | {"engine": engine})
        memory = engine_memory(sized, family, count(family), gpu, Assumptions())
        need = SEQUENCES * memory.context_tokens * memory.kv_bytes_per_token / size
        if not colocate and memory.kv_bytes >= need:
            return engine
        for share in SHARES if colocate else ():
            cache = share * gpu.memory_bytes - memory.weights_bytes - memory.overhead_bytes
            if cache >= need:
                vllm |= {"kv_cache_memory_bytes": int(cache // MIB) * MIB, "gpu_memory_utilization": share}
                return engine | {"colocate": True, "count": gpus // size}
    return None


def _trainers(family: Family, gpus: int) -> Iterator[tuple[int, Layout]]:
    """(size of a group, section `megatron`), cheapest first: MLPs recomputed, larger groups, layers recomputed."""
    experts = family.transformer.get("num_moe_experts")
    key = "expert_model_parallel_size" if experts else "tensor_model_parallel_size"
    selective = {"recompute_granularity": "selective", "recompute_modules": ["moe" if experts else "mlp"]}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    none: Layout = {}
    for settings in ((none, selective), (full,)):
        for size in (size for size in SIZES if size <= gpus):
            sequence = {"sequence_parallel": True} if size > 1 and not experts else {}
            for model in settings:
                yield size, {"parallel": {key: size} if size > 1 else {}, "model": sequence | model}
