"""The choice of the layout of trainer and engines that `init` writes.

Layouts are tried cheapest first, and the first that fits the GPUs with memory to spare is chosen."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from megatron_scalerl.models.family import Family
from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import count, load_family
from megatron_scalerl.plan.engine import engine_memory
from megatron_scalerl.plan.hardware import MIB, Gpu
from megatron_scalerl.plan.planner import RunPlan, make_plan
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.sections import LoraSection

SIZES = (1, 2, 4, 8)
"""Numbers of GPUs that are tried for a model-parallel group and for an engine. No number exceeds a node of eight
GPUs."""
MOST_GPUS = 256
"""Largest number of GPUs that is tried for an error's advice, if the policy does not fit the given GPUs."""
SPARE = 0.1
"""Share of a GPU that has to stay free on the fullest trainer rank, because the planner's memory is an estimate."""
SHORTEST = 1024
"""Shortest completion (tokens) that an error's advice may suggest, if no layout fits."""
SEQUENCES = 8
"""Smallest number of sequences of maximum length that an engine's KV cache has to hold."""
SHARES = (0.25, 0.4, 0.55)
"""Shares of a device's memory that are tried for an engine that shares the trainer's devices."""

Layout = dict[str, Any]
"""Part of a recipe as nested dictionaries: name of a section or setting -> content."""


def choose(recipe: Recipe, config: Path, gpus: int, gpu: Gpu) -> RunPlan:
    """The plan of the recipe with a layout for `gpus`.

    Raises ValueError if no layout fits. The message names adapters, shorter completions and a number of GPUs with
    which a layout would fit.
    """
    plan = _first(recipe, config, gpus, gpu)
    if plan is not None:
        return plan
    remedies = list(_smaller(recipe, config, gpus, gpu))
    number = 2 * gpus
    while number <= MOST_GPUS:
        if _first(recipe, config, number, gpu):
            remedies.append(f"--gpus {number}")
            break
        number *= 2
    remedy = "write a recipe with pipeline parallelism by hand"
    if remedies:
        remedy = f"settings that fit: {', or '.join(remedies)}"
    raise ValueError(f"--gpus: no layout of {recipe.policy.path} fits {gpus} x {gpu.name}; {remedy}")


def _smaller(recipe: Recipe, config: Path, gpus: int, gpu: Gpu) -> Iterator[str]:
    """Settings with which a layout fits the GPUs, as text for the error message.

    The settings are shorter completions, or adapters with the longest completions that fit.
    """

    def fits(completion: int) -> bool:
        settings = recipe.model_dump()
        settings["interruption"] |= lengths_of(completion)
        return _first(Recipe.model_validate(settings), config, gpus, gpu) is not None

    longest = recipe.max_completion_tokens
    for words, lora in (("", recipe.policy.lora), ("policy.lora={} ", LoraSection())):
        recipe = recipe.with_settings(policy={"lora": lora})
        if not fits(SHORTEST):
            continue
        halves = takewhile(lambda length: length > SHORTEST, (longest >> n for n in range(longest)))
        completion = next(filter(fits, halves), SHORTEST)
        lengths = " ".join(f"interruption.{key}={value}" for key, value in lengths_of(completion).items())
        yield (words + lengths).replace(", ", ",")


def lengths_of(completion: int) -> dict[str, Any]:
    """Settings of `interruption` for completions of this length, in the ScaleRL paper's proportions.

    >>> lengths_of(14336)
    {'thinking_tokens': [10240, 12288], 'answer_tokens': 2048}
    """
    answer = completion // 7
    thinking = completion - answer
    return {"thinking_tokens": [thinking * 5 // 6, thinking], "answer_tokens": answer}


def _first(recipe: Recipe, config: Path, gpus: int, gpu: Gpu) -> RunPlan | None:
    family = load_family(config)
    for colocate in (False, True):
        engine = _smallest_engine(recipe, family, gpus, gpu, colocate=colocate)
        if engine is None:
            continue
        for size, megatron in _trainers(family, gpus):
            world_size = gpus if colocate else size
            sections: Layout = {"engine": engine, "trainer": {"world_size": world_size}, "megatron": megatron}
            try:
                candidate = Recipe.model_validate(recipe.model_dump() | sections)
                plan = make_plan(candidate, config, gpus, gpu, Assumptions())
            # Some sizes do not divide the heads, and some leave no GPU for an engine.
            except ValueError:
                continue
            if not plan.problems() and plan.headroom >= SPARE * gpu.memory_bytes:
                sections["trainer"] = {"world_size": plan.split.trainer}
                sections["engine"] = engine | {"count": plan.split.engines}
                planned = Recipe.model_validate(recipe.model_dump() | sections)
                return replace(plan, recipe=planned, split_is_recipes=True)
    return None


def _smallest_engine(recipe: Recipe, family: Family, gpus: int, gpu: Gpu, *, colocate: bool) -> Layout | None:
    """The recipe's section `engine` for the smallest engine whose KV cache holds SEQUENCES sequences of full length.

    The smallest engine has the fewest devices, then the smallest share of a device's memory. None if no size in SIZES
    is large enough. colocate: engines share the trainer's devices.
    """
    heads = family.transformer["num_attention_heads"]
    for size in SIZES:
        fits = gpus % size == 0 if colocate else size < gpus
        if heads % size or not fits:
            continue
        vllm: Layout = {}
        if size > 1:
            vllm["tensor_parallel_size"] = size
        engine = {"devices_per_engine": size, "vllm": vllm}
        sized = Recipe.model_validate(recipe.model_dump() | {"engine": engine})
        memory = engine_memory(sized, family, count(family), gpu, Assumptions())
        need = SEQUENCES * memory.context_tokens * memory.kv_bytes_per_token / size
        if not colocate:
            if memory.kv_bytes >= need:
                return engine
            continue
        for share in SHARES:
            # Besides the cache, vLLM's share of a device has to hold weights and overhead.
            cache = share * gpu.memory_bytes - memory.weights_bytes - memory.overhead_bytes
            if cache >= need:
                vllm |= {"kv_cache_memory_bytes": int(cache // MIB) * MIB, "gpu_memory_utilization": share}
                return engine | {"colocate": True, "count": gpus // size}
    return None


def _trainers(family: Family, gpus: int) -> Iterator[tuple[int, Layout]]:
    """Trainer layouts to try, cheapest first: (GPUs of a model-parallel group, the recipe's section `megatron`).

    For each size, the first layout recomputes nothing and the second recomputes MLPs. Layouts that recompute whole
    layers come last.
    """
    experts = family.transformer.get("num_moe_experts")
    key = "tensor_model_parallel_size"
    module = "mlp"
    if experts:
        key = "expert_model_parallel_size"
        module = "moe"
    selective = {"recompute_granularity": "selective", "recompute_modules": [module]}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    no_recompute: Layout = {}
    # Recomputing MLPs costs less than communication between more ranks. Recomputing whole layers costs more.
    for settings in ((no_recompute, selective), (full,)):
        for size in (size for size in SIZES if size <= gpus):
            parallel: Layout = {}
            sequence: Layout = {}
            if size > 1:
                parallel = {key: size}
                sequence = {"sequence_parallel": True}
            if experts:
                sequence = {}
            for model in settings:
                yield size, {"parallel": parallel, "model": sequence | model}
