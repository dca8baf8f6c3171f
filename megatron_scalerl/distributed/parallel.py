"""Process groups, and this rank's coordinates. No other module reads Megatron's parallel_state."""

import gc
import inspect
import math
import os
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_scalerl.distributed import device
from megatron_scalerl.distributed.rendezvous import Rendezvous, open_store, use_interface
from megatron_scalerl.record import record

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@record
class Parallel:
    """This rank's coordinates in the parallel layout. Produced by `join_world`."""

    rank: int
    """Global rank."""
    world_size: int
    tp_rank: int
    tp_size: int
    """Size of the tensor-parallel group."""
    pp_rank: int
    pp_size: int
    """Number of pipeline stages."""
    ep_rank: int
    ep_size: int
    """Number of ranks over which the experts of a layer are divided. These ranks are also data-parallel ranks."""
    etp_rank: int
    etp_size: int
    """Size of the tensor-parallel group inside experts."""
    dp_rank: int
    dp_size: int
    """Number of data-parallel ranks. Ranks with different dp_rank train different micro-batches."""
    cp_rank: int
    cp_size: int
    """Size of the context-parallel group."""
    device: torch.device
    groups: ProcessGroupCollection
    """Megatron's process groups by name: tp, pp, ep, expt_tp, dp, dp_cp, mp ..."""

    @property
    def is_last_stage(self) -> bool:
        """True on the last pipeline stage, which has the head and returns log-probabilities."""
        return self.pp_rank == self.pp_size - 1

    @property
    def holds_batch(self) -> bool:
        """True for the rank with tp_rank, pp_rank and cp_rank 0, which receives the data-parallel rank's batch."""
        return self.tp_rank == self.pp_rank == self.cp_rank == 0


def join_world(
    keywords: Mapping[str, Any],
    *,
    world_size: int,
    seed: int,
    timeout_s: float,
    rendezvous: Rendezvous | None = None,
) -> Parallel:
    """Join the group of all ranks and create Megatron's subgroups. Call `device.prepare` before.

    keywords: arguments of Megatron's initialize_model_parallel. Rank and number of ranks come from RANK and
    WORLD_SIZE. The ranks meet at `rendezvous`; with None, at MASTER_ADDR and MASTER_PORT of torchrun, whose store
    listens on every interface, so that the user must protect the network. With None and none of the four variables
    set, this process is the only rank.

    Raises ValueError if RANK or WORLD_SIZE is missing or WORLD_SIZE is not `world_size`, and RuntimeError if the
    ranks do not meet.
    """
    rank = rank_in_world(world_size, rendezvous)
    if not dist.is_initialized():
        _join(rank, world_size, rendezvous, timedelta(seconds=timeout_s))
        device.connect_peers()
    # Without this argument Megatron's groups would time out after 30 minutes instead of `timeout_s`.
    minutes = max(1, math.ceil(timeout_s / 60))
    parallel_state.initialize_model_parallel(**{"distributed_timeout_minutes": minutes, **keywords})
    device.seed_everything(seed)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return Parallel(rank=rank, world_size=world_size, device=device.device(), groups=groups, **_coordinates(groups))


def shutdown_parallel(*, keep_world: bool = False) -> None:
    """Leave all process groups, so that `join_world` can be called again.

    keep_world: True to stay in the group of all ranks, and leave all other groups.
    """
    parallel_state.destroy_model_parallel()
    if not dist.is_initialized():
        return
    if not keep_world:
        dist.destroy_process_group()
        return
    # Megatron forgets the groups without destroying any. Each remaining gloo group wakes a thread 100 times a second.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # Objects of ranks and groups refer to each other in cycles, so the garbage collector has to free the groups.
    gc.collect()


def virtual_pipeline_size() -> int | None:
    """Number of model chunks per pipeline stage with the interleaved schedule; None without this schedule."""
    return parallel_state.get_virtual_pipeline_model_parallel_world_size()


def known_keywords() -> Collection[str]:
    """Names of the arguments of Megatron's initialize_model_parallel."""
    return inspect.signature(parallel_state.initialize_model_parallel).parameters


def rank_in_world(expected_size: int, rendezvous: Rendezvous | None) -> int:
    """This process's rank, from RANK. Raises ValueError if RANK or WORLD_SIZE is missing, or WORLD_SIZE is wrong."""
    variables: tuple[str, ...] = _LAUNCH_VARIABLES
    if rendezvous is not None:
        variables = _LAUNCH_VARIABLES[:2]
    unset = [name for name in variables if name not in os.environ]
    rank = 0
    world_size = 1
    if not unset:
        rank = int(os.environ["RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
    elif rendezvous is not None or len(unset) < len(variables):
        raise ValueError(f"environment: {', '.join(unset)} is not set; a launcher must set {', '.join(variables)}")
    if world_size != expected_size:
        raise ValueError(f"trainer.world_size: the recipe has {expected_size} ranks, but WORLD_SIZE is {world_size}")
    return rank


def _join(rank: int, world_size: int, rendezvous: Rendezvous | None, timeout: timedelta) -> None:
    store: dist.Store | None = None
    if rendezvous is not None:
        use_interface(rendezvous)
        store = open_store(rendezvous, "trainer", timeout=timeout)
    # Without MASTER_ADDR this process is the only rank. With MASTER_ADDR, torch uses torchrun's store.
    elif "MASTER_ADDR" not in os.environ:
        use_interface(None)
        store = dist.HashStore()
    dist.init_process_group(device.backend(), rank=rank, world_size=world_size, timeout=timeout, store=store)


def _coordinates(groups: ProcessGroupCollection) -> dict[str, int]:
    names = {"tp": "tp", "pp": "pp", "ep": "ep", "etp": "expt_tp", "dp": "dp", "cp": "cp"}
    coordinates = {}
    for short, name in names.items():
        group = getattr(groups, name)
        coordinates[f"{short}_rank"] = group.rank()
        coordinates[f"{short}_size"] = group.size()
    return coordinates


def unwrap(chunk: Any) -> Any:
    """The GPTModel inside the wrappers of a model chunk (DistributedDataParallel, Float16Module)."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk
