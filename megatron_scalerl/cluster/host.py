"""Checks of memory and processors of this node."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.cluster.check import GIB, MIB, Check, failed, guarded, ok, size, warning
from megatron_scalerl.recipe import Recipe

CONTROLLER_BYTES = 1919 * MIB
"""Peak resident set of the controller at 2,240 completions in flight (docs/measurements.md)."""
DECODER_BYTES = 46 * MIB
"""Of a decoder (docs/measurements.md)."""
PROCESS_BYTES = 2 * GIB
"""Of the libraries of a trainer rank or an engine. An assumption."""
CPU_BYTES = 16
"""Per parameter, of a rank or an engine on a CPU: fp32 weights, gradients and two moments. An assumption."""
LOCKED_BYTES = GIB
"""Memory that RDMA may lock, at least: NCCL's buffers. An assumption."""
CGROUPS = Path("/sys/fs/cgroup")
RDMA = Path("/sys/class/infiniband")
"""Lists a host's RDMA devices."""
_NO_RESOURCES = "ask Slurm for more (--mem, --cpus-per-task and SRUN_CPUS_PER_TASK)"


def host_checks(recipe: Recipe | None, parameters: int | None, *, gpus: int) -> list[Check]:
    """Memory, processors, locked memory. gpus: those of the run on this node; 0 if it runs on CPUs."""
    return [
        guarded("memory", lambda: _memory(recipe, parameters, gpus)),
        _processors(recipe, gpus),
        guarded("locked memory", _locked_memory),
        guarded("network adapters", _adapters),
    ]


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Host memory that a run takes on one node. Produced by `memory_need`."""

    controller: int
    """Bytes of controller and decoders."""
    total: int
    """Bytes of all processes."""
    assumed: str
    """How it was computed."""


def adapters(root: Path = RDMA) -> dict[str, str]:
    """Active ports of the host's RDMA adapters, as NCCL_IB_HCA names them, each with its network and rate.

    From /sys/class/infiniband: "mlx5_0:1" -> "InfiniBand 400 Gb/sec (4X NDR)", for RoCE "Ethernet 100 Gb/sec ...".
    """
    found = {}
    for port in sorted(root.glob("*/ports/*")):
        with contextlib.suppress(OSError):  # of a port that cannot say it
            state, network, rate = ((port / name).read_text().strip() for name in ("state", "link_layer", "rate"))
            if state.endswith("ACTIVE"):
                found[f"{port.parent.parent.name}:{port.name}"] = f"{network} {rate}"
    return found


def fastest(ports: Mapping[str, str]) -> str:
    """NCCL_IB_HCA of the ports with the highest rate, exactly these; empty without ports."""
    rates = {name: float(re.sub(r"^\D*([\d.]+).*", r"\1", text) or 0) for name, text in ports.items()}
    names = [name for name, rate in rates.items() if rate == max(rates.values())]
    return f"={','.join(names)}" if names else ""


def memory_need(recipe: Recipe, parameters: int | None, *, gpus: int) -> MemoryNeed:
    """The need of the controller and of the ranks and engines; of at most `gpus` of them if that is not 0."""
    from megatron_scalerl.rewards.pool import default_workers

    decoders = recipe.rollouts.decoders or default_workers()
    controller = CONTROLLER_BYTES + decoders * DECODER_BYTES
    count = _processes(recipe, gpus)
    each = PROCESS_BYTES + (0 if gpus else CPU_BYTES * (parameters or 0))
    text = f"controller {size(CONTROLLER_BYTES)}, {decoders} decoders, {count} ranks and engines of {size(each)}"
    return MemoryNeed(controller=controller, total=controller + count * each, assumed=text)


def _processes(recipe: Recipe, gpus: int) -> int:
    """Ranks and engines on this node."""
    count = recipe.trainer.world_size + recipe.engine.count
    return min(count, gpus) if gpus else count


def available_memory(meminfo: str, cgroup: str, root: Path = CGROUPS) -> int:
    """Bytes that this process may still allocate: of the host, and of its cgroups (version 2).

    meminfo, cgroup: contents of /proc/meminfo and /proc/self/cgroup.
    """
    [line] = [line for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    available = int(line.split()[1]) * 1024
    own = next((line.removeprefix("0::/") for line in cgroup.splitlines() if line.startswith("0::/")), "")
    folder = root / own
    for place in (folder, *folder.parents):
        try:
            limit = (place / "memory.max").read_text().strip()
            used = int((place / "memory.current").read_text())
        except OSError:  # the root, or version 1
            continue
        if limit != "max":
            available = min(available, max(0, int(limit) - used))
    return available


def _memory(recipe: Recipe | None, parameters: int | None, gpus: int) -> Check:
    name = "memory"
    available = available_memory(Path("/proc/meminfo").read_text(), Path("/proc/self/cgroup").read_text())
    if recipe is None:
        return ok(name, f"{size(available)} available")
    need = memory_need(recipe, parameters, gpus=gpus)
    found = f"{size(available)} available ({need.assumed})"
    if available < need.controller:
        return failed(name, expected=f"{size(need.controller)} for the controller", found=found, remedy=_NO_RESOURCES)
    if available < need.total:
        return warning(name, expected=f"{size(need.total)} (assumed)", found=found, remedy=_NO_RESOURCES)
    return ok(name, f"{found}, {size(need.total)} assumed")


def _processors(recipe: Recipe | None, gpus: int) -> Check:
    usable = len(os.sched_getaffinity(0))
    found = f"{usable} of {os.cpu_count()} usable"
    if recipe is None:
        return ok("processors", found)
    ranks, engines = recipe.trainer.world_size, recipe.engine.count
    threads = max(ranks * recipe.trainer.threads, engines * recipe.engine.threads)
    needed = 1 + _processes(recipe, gpus) if gpus else threads
    text = "one each for controller, ranks and engines" if gpus else "the threads of ranks or engines"
    if usable < needed:
        return warning("processors", expected=f"{needed}: {text}", found=found, remedy=_NO_RESOURCES)
    return ok("processors", f"{found}, needed {needed}: {text}")


def _adapters() -> Check:
    found = adapters()
    listed = ", ".join(f"{name} {text}" for name, text in found.items())
    return ok("network adapters", f"{listed}; NCCL_IB_HCA{fastest(found)}" if found else "no active RDMA port")


def _locked_memory() -> Check:
    name, limit = "locked memory", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    devices = sorted(path.name for path in RDMA.iterdir()) if RDMA.is_dir() else []
    unlimited = limit == resource.RLIM_INFINITY
    found = f"limit {'unlimited' if unlimited else size(limit)}, RDMA devices: {', '.join(devices) or 'none'}"
    if not devices or unlimited:
        return ok(name, found)
    make = failed if limit < LOCKED_BYTES else warning
    remedy = "NCCL cannot register its buffers with the network card: raise it (ulimit -l) in the job script"
    return make(name, expected="unlimited, for RDMA", found=found, remedy=remedy)
