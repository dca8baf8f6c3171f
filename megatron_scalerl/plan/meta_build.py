"""Builds ranks of a recipe's trainer from Megatron's own modules on the meta device and counts what they hold.

    python -m megatron_scalerl.plan.meta_build RECIPE CONFIG_DIR WORLD_SIZE [key.path=value ...]

The proof of `counting`: the same PolicyModel that trains, at its full size and in its full world, in one process and
without memory: collectives are PyTorch's fake ones. A process of its own, because Megatron's globals and the CPU
patches are process-wide. Prints one JSON line: for each pipeline stage its dense and expert parameters.
Context parallelism, which cuts no weight, is counted as data parallelism.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_scalerl.distributed.parallel import init_parallel, shutdown_parallel
from megatron_scalerl.models import family, read_hf_config
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.trainer.model import PolicyModel
from megatron_scalerl.trainer.options import model_options


def stage_parameters(recipe: Recipe, config_path: str, world_size: int) -> list[dict[str, int]]:
    """[{"dense": n, "expert": n}] for each pipeline stage. Raises ValueError as building the policy does."""
    recipe = _for_one_process(recipe, world_size)
    stages = int(recipe.megatron.parallel.get("pipeline_model_parallel_size", 1))
    return [_count(recipe, config_path, rank=stage * world_size // stages) for stage in range(stages)]


def _for_one_process(recipe: Recipe, world_size: int) -> Recipe:
    data: dict[str, Any] = recipe.model_dump()
    parallel = data["megatron"]["parallel"]
    parallel.pop("context_parallel_size", None)
    parallel["create_gloo_process_groups"] = False  # Megatron would ask gloo by name, and gloo wants real peers
    data["trainer"]["world_size"] = world_size
    return Recipe.model_validate(data)


def _count(recipe: Recipe, config_path: str, *, rank: int) -> dict[str, int]:
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


def main() -> None:
    """See the module."""
    path, config_path, world_size, *overrides = sys.argv[1:]
    print(json.dumps(stage_parameters(load_recipe(path, overrides), config_path, int(world_size))))


if __name__ == "__main__":
    main()
