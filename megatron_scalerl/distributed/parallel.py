"""Process groups: who this rank is. The only file that reads Megatron's parallel_state."""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_scalerl.distributed import device
from megatron_scalerl.distributed.rendezvous import Rendezvous, open_store, use_interface
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.nearest import check_keys
from megatron_scalerl.recipe.parallel_layout import check_world, sizes_of

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """This rank's place in the run. Produced by `init_parallel`."""

    rank: int
    """Global rank."""
    world_size: int
    tp_rank: int
    tp_size: int
    """Tensor parallel."""
    pp_rank: int
    pp_size: int
    """Pipeline parallel."""
    ep_rank: int
    ep_size: int
    """Expert parallel, carved out of the data-parallel ranks."""
    etp_rank: int
    etp_size: int
    """Tensor parallel inside experts."""
    dp_rank: int
    dp_size: int
    """Data parallel: ranks with different dp_rank train different micro-batches."""
    cp_rank: int
    cp_size: int
    """Context parallel."""
    device: torch.device
    groups: ProcessGroupCollection
    """Megatron's process groups by name: tp, pp, ep, expt_tp, dp, dp_cp, mp ..."""

    @property
    def is_first_stage(self) -> bool:
        """True where tokens come in."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True where log-probabilities come out."""
        return self.pp_rank == self.pp_size - 1


def init_parallel(recipe: Recipe, rendezvous: Rendezvous | None = None) -> Parallel:
    """Readies the device, joins the process group and cuts it as `megatron.parallel` says.

    The place in the world comes from RANK and WORLD_SIZE. The ranks of a run meet at `rendezvous`. Without one,
    MASTER_ADDR and MASTER_PORT say where, as torchrun sets them: its store listens on every interface, and closing
    the network is then the user's part. Without any of the four this process is a world of its own. Raises ValueError
    where the world cannot be cut that way or differs from trainer.world_size, for an unknown key of
    megatron.parallel, and for an interleaved pipeline without a GPU; RuntimeError where the ranks do not meet.
    """
    keywords = checked_keywords(recipe)
    rank, world_size = _place_in_world(recipe.trainer.world_size, rendezvous)
    check_world(sizes_of(keywords), world_size)
    place = device.prepare(
        threads=recipe.trainer.threads,
        deterministic=recipe.trainer.deterministic,
        variables=device.environment(recipe),
    )
    if not dist.is_initialized():
        _join(rank, world_size, rendezvous, timedelta(seconds=recipe.trainer.step_timeout_s))
        device.meet_peers()
    # Megatron's own groups would give up after 30 minutes, whatever the recipe says of a step.
    minutes = max(1, math.ceil(recipe.trainer.step_timeout_s / 60))
    parallel_state.initialize_model_parallel(**{"distributed_timeout_minutes": minutes, **keywords})
    device.seed_everything(recipe.seed)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return Parallel(rank=rank, world_size=world_size, device=place, groups=groups, **_coordinates(groups))


def shutdown_parallel(*, keep_world: bool = False) -> None:
    """Leaves all process groups, so that `init_parallel` can be called again; `keep_world`: not the world's own."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized() and not keep_world:
        dist.destroy_process_group()


def virtual_pipeline_size() -> int | None:
    """Model chunks per pipeline stage under the interleaved schedule, or None."""
    return parallel_state.get_virtual_pipeline_model_parallel_world_size()


def checked_keywords(recipe: Recipe) -> dict[str, Any]:
    """Keywords of initialize_model_parallel.

    Raises ValueError for an unknown one, naming the nearest, and for an interleaved pipeline without a GPU.
    """
    keywords = dict(recipe.megatron.parallel)
    known = inspect.signature(parallel_state.initialize_model_parallel).parameters
    check_keys("megatron.parallel", keywords, known, expected="a keyword of initialize_model_parallel")
    if not device.HAVE_GPU and keywords.get("virtual_pipeline_model_parallel_size"):
        raise ValueError(
            "megatron.parallel.virtual_pipeline_model_parallel_size: expected none without a GPU (the interleaved "
            f"schedule hangs over gloo), found {keywords['virtual_pipeline_model_parallel_size']}"
        )
    return keywords


def _place_in_world(expected_size: int, rendezvous: Rendezvous | None) -> tuple[int, int]:
    wanted = _LAUNCH_VARIABLES if rendezvous is None else _LAUNCH_VARIABLES[:2]
    missing = [name for name in wanted if name not in os.environ]
    if rendezvous is None and len(missing) == len(wanted):
        rank, world_size = 0, 1
    elif missing:
        raise ValueError(f"environment: expected {', '.join(wanted)}, missing {', '.join(missing)}")
    else:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != expected_size:
        raise ValueError(
            f"trainer.world_size: expected {expected_size} processes as the recipe says, found {world_size}"
        )
    return rank, world_size


def _join(rank: int, world_size: int, rendezvous: Rendezvous | None, timeout: timedelta) -> None:
    under_torchrun = rendezvous is None and "MASTER_ADDR" in os.environ
    store: dist.Store | None = None
    if not under_torchrun:
        use_interface(rendezvous)
        store = dist.HashStore() if rendezvous is None else open_store(rendezvous, "trainer", timeout=timeout)
    dist.init_process_group(device.backend(), rank=rank, world_size=world_size, timeout=timeout, store=store)


def _coordinates(groups: ProcessGroupCollection) -> dict[str, int]:
    names = {"tp": "tp", "pp": "pp", "ep": "ep", "etp": "expt_tp", "dp": "dp", "cp": "cp"}
    found: dict[str, int] = {}
    for short, name in names.items():
        group = getattr(groups, name)
        found[f"{short}_rank"], found[f"{short}_size"] = group.rank(), group.size()
    return found


def unwrap(chunk: Any) -> Any:
    """The GPTModel inside the wrappers of a model chunk (DistributedDataParallel, Float16Module)."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk
