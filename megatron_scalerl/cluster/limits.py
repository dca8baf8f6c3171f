"""Checks of the limits that this process has (ulimit); the processes of a run inherit them."""

from __future__ import annotations

import resource
from pathlib import Path

from megatron_scalerl.cluster.check import GIB, Check, failed, guarded, ok, size, warning
from megatron_scalerl.recipe import Recipe

PROCESSES = 4096
"""Processes and threads of this user. An assumption: ranks and engines have tens of threads each."""
LOCKED_BYTES = GIB
"""Memory that RDMA may lock, at least: NCCL's buffers. An assumption."""
RDMA = Path("/sys/class/infiniband")
"""Lists a host's RDMA devices."""
_SLURM = "raise it in the job script (ulimit), or ask for PropagateResourceLimitsExcept in slurm.conf"


def limit_checks(recipe: Recipe | None) -> list[Check]:
    """Open files, processes, locked memory, core files."""
    return [_open_files(recipe), _processes(), guarded("locked memory", lambda: _locked_memory(RDMA)), _core_files()]


def _open_files(recipe: Recipe | None) -> Check:
    from megatron_scalerl.launch.hosts import TARGET, files_needed

    name, hard = "open files", resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found = f"hard limit {_number(hard)}"
    if recipe is None:
        if _lower(hard, TARGET):
            remedy = f"name the recipe to learn what it needs; {_SLURM}"
            return warning(name, expected=f"a hard limit of {TARGET:,}", found=found, remedy=remedy)
        return ok(name, found)
    needed = files_needed(recipe)
    count = f"engine.count {recipe.engine.count} x rollouts.max_in_flight {recipe.rollouts.max_in_flight}"
    if _lower(hard, needed):
        return failed(name, expected=f"a hard limit of {needed:,} for {count}", found=found, remedy=_SLURM)
    return ok(name, f"{found}, needed {needed:,} for {count}")


def _processes() -> Check:
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    found = f"hard limit {_number(hard)}"
    if _lower(hard, PROCESSES):
        expected = f"{PROCESSES:,} (assumed)"
        return warning("processes and threads", expected=expected, found=found, remedy=_SLURM)
    return ok("processes and threads", found)


def _locked_memory(rdma: Path) -> Check:
    name, soft = "locked memory", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    devices = sorted(path.name for path in rdma.iterdir()) if rdma.is_dir() else []
    limit = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    found = f"limit {limit}, RDMA devices: {', '.join(devices) or 'none'}"
    if not devices or soft == resource.RLIM_INFINITY:
        return ok(name, found)
    remedy = f"NCCL cannot register its buffers with the network card: {_SLURM}"
    if soft < LOCKED_BYTES:
        return failed(name, expected="unlimited, for RDMA", found=found, remedy=remedy)
    return warning(name, expected="unlimited, for RDMA", found=found, remedy=remedy)


def _core_files() -> Check:
    soft = resource.getrlimit(resource.RLIMIT_CORE)[0]
    if soft == 0:
        return ok("core files", "off")
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"up to {size(soft)}"
    remedy = "ulimit -c 0, unless you want them: a rank that crashes writes its memory to the disk"
    return warning("core files", expected="off", found=limit, remedy=remedy)


def _lower(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
