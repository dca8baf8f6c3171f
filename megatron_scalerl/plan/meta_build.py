"""Checks the parameter counts of `counting` against the trainer's own modules, built on the meta device.

The trained PolicyModel is built at full size and for the full world, in one process and without allocating memory.
PyTorch's fake process group replaces the collectives. A child process builds the model, because Megatron's globals
and the CPU patches are process-wide. The child is spawned, since a fork can hang or crash where threads of a library
were running. Context parallelism, which shards no weights, is counted as data parallelism.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from megatron_scalerl.plan.planner import RunPlan
from megatron_scalerl.recipe import Recipe


def compare_with_build(plan: RunPlan, config: Path) -> str:
    """Compare the plan's parameter counts with those of Megatron's model, built here without memory for values.

    Returns a line: the ranks whose counts are equal, or why no model was built.

    The build runs without a GPU, and so with Megatron's plain layers. Transformer Engine's layers
    have the same parameters. Raises ValueError if Megatron rejects the recipe.
    """
    if plan.layout.chunks > 1:
        return "parameter counts not verified: building an interleaved pipeline requires a GPU"
    with ProcessPoolExecutor(1, get_context("spawn"), _quiet) as pool:
        built = pool.submit(stage_parameters, plan.recipe, str(config), plan.layout.world_size).result()
    counted = [{"dense": s.parameters.dense, "expert": s.parameters.expert} for s in plan.trainer]
    assert built == counted, f"parameters counted: {counted}, parameters built: {built}"
    ranks = f"equal on the first rank of {plan.layout.world_size}"
    if plan.layout.pp > 1:
        return f"{ranks} of each pipeline stage"
    return ranks


def _quiet() -> None:
    # Discard this process's output: Megatron-Core's warnings and gloo's lines would stand between the plan's lines.
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def stage_parameters(recipe: Recipe, config_path: str, world_size: int) -> list[dict[str, int]]:
    """For each pipeline stage, the number of parameters of the stage's first rank: {"dense": n, "expert": n}.

    Raises ValueError if the policy cannot be built.
    """
    data: dict[str, Any] = recipe.model_dump()
    parallel = data["megatron"]["parallel"]
    parallel.pop("context_parallel_size", None)
    # Groups of gloo require running peers, and the fake process group has none.
    parallel["create_gloo_process_groups"] = False
    data["trainer"]["world_size"] = world_size
    recipe = Recipe.model_validate(data)
    stages = int(parallel.get("pipeline_model_parallel_size", 1))
    try:
        return [_count(recipe, config_path, rank=stage * world_size // stages) for stage in range(stages)]
    except Exception as error:
        line = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"megatron: the trainer's ranks cannot be built: {line}") from None


def _count(recipe: Recipe, config_path: str, *, rank: int) -> dict[str, int]:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_scalerl.distributed.parallel import shutdown_parallel
    from megatron_scalerl.models import family, read_hf_config
    from megatron_scalerl.trainer.model import PolicyModel
    from megatron_scalerl.trainer.options import model_options
    from megatron_scalerl.trainer.ranks import init_parallel

    world_size = recipe.trainer.world_size
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        parallel = init_parallel(recipe)
        policy = family(read_hf_config(config_path))
        with torch.device("meta"):
            model = PolicyModel(model_options(policy, recipe, parallel), policy, recipe=recipe, parallel=parallel)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    finally:
        shutdown_parallel()
    expert = sum(size for name, size in sizes.items() if ".experts." in name)
    return {"dense": sum(sizes.values()) - expert, "expert": expert}
