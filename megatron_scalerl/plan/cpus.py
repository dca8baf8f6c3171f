"""The plan of a recipe on the CPUs of this machine: memory, cores and seconds.

Memory is counted as for GPUs, and the libraries of each process are added. Seconds are FLOPs divided by the
FLOP/s of a thread, which are measured: a thread of this machine multiplies matrices of the policy's width.
"""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron_scalerl.engine.options import CPU_DEFAULTS
from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import count, load_family
from megatron_scalerl.plan.engine import engine_memory
from megatron_scalerl.plan.hardware import GIB, GPUS, Kernels
from megatron_scalerl.plan.memory import trainer_memory
from megatron_scalerl.plan.sharding import layout_of
from megatron_scalerl.plan.work import assumed_lengths, token_flops
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record

TRAINER_SHARE = 0.8
"""Share of the measured FLOP/s of a thread that a trainer reaches."""
ENGINE_SHARE = 0.4
"""Share of the measured FLOP/s of a thread that an engine reaches."""
ASSUMED = Assumptions(thinking_median=0.6, kept_share=0.7)
"""Assumptions for CPU recipes.

`thinking_median` suits the short budgets on CPUs. `kept_share` is below 1 because groups that are all right or all
wrong are not trained."""
LIBRARIES = {"controller": 0.6, "trainer": 0.7, "engine": 1.4}
"""Kind of process -> resident memory of one process of this kind before the policy is loaded (GiB)."""
FIXED_S = 1.0
"""Seconds that a step takes for batches and weight updates, whatever the size of the policy."""
ROWS = 256
"""Number of rows of the matrices that `measured_flops` multiplies."""
MEASURED_S = 0.3
"""Processor time that `measured_flops` takes (s)."""


@record
class CpuPlan:
    """Memory, cores and time of a recipe on this machine's CPUs. Produced by `plan_on_cpus`."""

    gib: Mapping[str, float]
    """Kind of process -> memory of all processes of that kind (GiB)."""
    machine_gib: float
    """Memory of the machine (GiB)."""
    threads: int
    """Number of threads of all trainer ranks and engines together."""
    cores: int
    """Number of cores that this process may use."""
    seconds: Mapping[str, float]
    """"trainer" or "engine" -> seconds of work of all trainer ranks, or of all engines, in a step on enough cores."""
    step_seconds: float
    """Seconds of a step. Trainer and engine work at the same time, or in turn if there are too few cores."""
    run_seconds: float
    """Seconds of all steps and of all validations, for which the trainer waits."""

    @property
    def problem(self) -> str:
        """The message about missing memory; empty if the run fits."""
        excess = sum(self.gib.values()) - self.machine_gib
        if excess <= 0:
            return ""
        return f"the run needs {excess:.1f} GiB more than this machine has; policy.lora={{}} (adapters) needs less"

    def verdict(self) -> str:
        """The plan in one line."""
        gib = ", ".join(f"{kind} {number:.1f}" for kind, number in self.gib.items())
        seconds = ", ".join(f"{kind} {number:.1f}" for kind, number in self.seconds.items())
        return (
            f"{self.problem or 'fits'}: {sum(self.gib.values()):.1f} of {self.machine_gib:.1f} GiB ({gib}); "
            f"{self.threads} threads on {self.cores} cores; {self.step_seconds:.1f} s a step ({seconds}), "
            f"{self.run_seconds / 60:,.0f} minutes with validations"
        )


def plan_on_cpus(recipe: Recipe, config: Path) -> CpuPlan:
    """The plan of the recipe on this machine. config: folder of the policy's config.json.

    Raises ValueError if the parallel sizes do not fit the policy or trainer.world_size.
    """
    family = load_family(config)
    world_size = recipe.trainer.world_size
    layout = layout_of(recipe, family, world_size)
    prompt = min(ASSUMED.prompt_tokens, recipe.prompts.max_prompt_tokens)
    assumed = replace(ASSUMED, prompt_tokens=prompt)
    lengths = assumed_lengths(recipe, assumed)
    ranks = trainer_memory(recipe, family, layout, assumed, kernels=Kernels(layers="plain", device="cpu"))
    # `engine_memory` requires a GPU. Any GPU will do, because the bytes of weights do not depend on the GPU.
    engine = engine_memory(recipe, family, count(family), GPUS["h200"], assumed)
    cache = recipe.engine.vllm.get("kv_cache_memory_bytes", CPU_DEFAULTS["kv_cache_memory_bytes"])
    engine_gib = LIBRARIES["engine"] + (engine.weights_bytes + cache) / GIB
    trainer_gib = LIBRARIES["trainer"] + max(rank.total for rank in ranks) / GIB

    groups = recipe.rollouts.groups_per_batch
    completions = groups * recipe.rollouts.group_size
    flops = token_flops(recipe, family, layout, [n + prompt for n in lengths.tokens])
    trained = assumed.kept_share * completions * (lengths.mean + prompt)
    # The prefix cache computes a prompt once for all completions of a group.
    generated = completions * lengths.mean + groups * prompt
    thread = measured_flops(family.transformer["hidden_size"], recipe.policy.dtype)
    training = world_size * recipe.trainer.threads
    generating = recipe.engine.count * recipe.engine.threads
    seconds = {
        "trainer": trained * flops.hardware(recipe) / (thread * TRAINER_SHARE * training),
        "engine": generated * (flops.body + flops.head) / (thread * ENGINE_SHARE * generating),
    }
    cores = len(os.sched_getaffinity(0))
    in_turn = (seconds["trainer"] * training + seconds["engine"] * generating) / cores
    step_seconds = FIXED_S + max(in_turn, *seconds.values())
    section = recipe.validation
    rounds = 0.0
    if section.every_steps:
        ends = section.end_generations or section.generations
        rounds = 2 * ends + section.generations * (recipe.steps / section.every_steps - 1)
    validated = rounds * (section.prompts or recipe.prompts.held_out) / completions
    return CpuPlan(
        gib={
            "trainer": trainer_gib * world_size,
            "engine": engine_gib * recipe.engine.count,
            "controller": LIBRARIES["controller"],
        },
        machine_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        threads=training + generating,
        cores=cores,
        seconds=seconds,
        step_seconds=step_seconds,
        run_seconds=recipe.steps * step_seconds + validated * seconds["engine"],
    )


def measured_flops(width: int, dtype: str) -> float:
    """FLOP/s of one thread, from the fastest of many matrix products.

    The time is processor time, because the machine may be busy.
    """
    rows = torch.ones(ROWS, width, dtype=getattr(torch, dtype))
    matrix = torch.ones(width, 4 * width, dtype=rows.dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    first_start = time.thread_time()
    shortest = math.inf
    while time.thread_time() < first_start + MEASURED_S:
        start = time.thread_time()
        torch.mm(rows, matrix)
        shortest = min(shortest, time.thread_time() - start)
    torch.set_num_threads(threads)
    return 8 * ROWS * width**2 / shortest
