"""Sets up the environment, the device and the process groups of a trainer rank, as the recipe says."""

import os
from typing import Any

from megatron_scalerl.distributed import device
from megatron_scalerl.distributed.parallel import Parallel, join_world, known_keywords, rank_in_world
from megatron_scalerl.distributed.rendezvous import Rendezvous
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.other_names import check_keys
from megatron_scalerl.recipe.parallel_layout import check_world, sizes_of


def init_parallel(recipe: Recipe, rendezvous: Rendezvous | None = None) -> Parallel:
    """Prepare the device, join the process group and create the subgroups of `megatron.parallel`.

    `distributed.parallel.join_world` says where the ranks meet. Raises ValueError if the world does not fit the
    layout or trainer.world_size, for unknown keys of megatron.parallel, and for an interleaved pipeline without a
    GPU; RuntimeError if the ranks do not meet.
    """
    keywords = parallel_keywords(recipe)
    check_device(recipe)
    trainer = recipe.trainer
    rank_in_world(trainer.world_size, rendezvous)
    check_world(sizes_of(keywords), trainer.world_size)
    device.prepare(threads=trainer.threads, deterministic=trainer.deterministic, variables=environment(recipe))
    return join_world(
        keywords,
        world_size=trainer.world_size,
        seed=recipe.seed,
        timeout_s=trainer.step_timeout_s,
        rendezvous=rendezvous,
    )


def parallel_keywords(recipe: Recipe) -> dict[str, Any]:
    """Keywords of initialize_model_parallel. Raises ValueError for an unknown keyword, and names a similar one."""
    keywords = dict(recipe.megatron.parallel)
    expected = "a keyword of initialize_model_parallel"
    check_keys("megatron.parallel", keywords, known_keywords(), expected=expected, in_recipe=True)
    return keywords


def check_device(recipe: Recipe) -> None:
    """Raises ValueError for an interleaved pipeline without a GPU."""
    chunks = recipe.megatron.parallel.get("virtual_pipeline_model_parallel_size")
    if chunks and not device.HAVE_GPU:
        raise ValueError(
            f"megatron.parallel.virtual_pipeline_model_parallel_size: {chunks} needs a GPU, since the interleaved "
            "schedule hangs over gloo; leave it out"
        )


def environment(recipe: Recipe) -> dict[str, str]:
    """Environment variables that a trainer process needs before CUDA starts; on CPUs, the variable that hides GPUs.

    Launchers set the variables that the user has not set; `device.prepare` sets the variables in processes without a
    launcher. docs/cuda.md has the source of each variable.
    """
    if recipe.weights.transport != "nccl" and not device.HAVE_GPU:
        # CPU runs hide all GPUs: the host may have GPUs that were not assigned to the run.
        return {"CUDA_VISIBLE_DEVICES": ""}
    variables = {}
    sizes = sizes_of(recipe.megatron.parallel)
    if sizes.tp > 1 or sizes.cp > 1:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if not recipe.megatron.ddp.get("nccl_ub") and "PYTORCH_ALLOC_CONF" not in os.environ:
        # Megatron-Core reads this older name of PYTORCH_ALLOC_CONF.
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if recipe.trainer.deterministic:
        variables |= {name: values[0] for name, values in device.DETERMINISTIC.items()}
    return variables
