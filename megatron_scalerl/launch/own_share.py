"""The share of a rank or an engine in its host: the CPUs near its devices, and folders for compiled code.

A share is written `2,3/8`: the devices 2 and 3 of the 8 that the run uses there. The CPUs are divided in a Slurm job
alone (MSRL_BIND_CPUS=1 of the job script), among all processes of a host or none; the process takes them before its
program starts (`processes.parent_death`). Compilers write below MSRL_LOCAL, a folder of the job on the node's own
disk: many processes that share one cache on a network file system wait for its locks.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_scalerl.processes.parent_death import CPUS, cpus_in

_warn = functools.cache(logging.getLogger(__name__).warning)
"""Says each text once."""
CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
LEAST_CPUS = 4
"""CPUs of a device's process, which has more threads than those that compute: two cores of two threads."""
Core = tuple[int, ...]
"""The CPUs of a core."""
_PCI = Path("/sys/bus/pci/devices")
_CPU = Path("/sys/devices/system/cpu")


def share_of(devices: Sequence[int], total: int) -> str:
    """A share in its written form. total: devices that the run uses on the host."""
    return f"{','.join(map(str, devices))}/{total}"


def own_variables(name: str, share: str) -> dict[str, str]:
    """Variables of a process on this host. name: engine-3, trainer-0. share: may be empty."""
    local = os.environ.get("MSRL_LOCAL", "")
    variables = {}
    if local and _is_private(Path(local)):
        caches = {key: f"{local}/{name}/{folder}" for key, folder in CACHES.items()}
        variables = {key: folder for key, folder in caches.items() if key not in os.environ}
    if share and os.environ.get("MSRL_BIND_CPUS") == "1":
        devices, _, total = share.partition("/")
        if shares := shares_of(near_devices(int(total))):
            cpus = sorted(cpu for device in devices.split(",") for cpu in shares[int(device)])
            variables[CPUS] = ",".join(map(str, cpus))
        else:
            _warn(f"no process is bound to CPUs: {total} devices need {LEAST_CPUS} near each, in separate groups")
    return variables


def _is_private(folder: Path) -> bool:
    """Make a folder; whether it and its parent are this user's alone, since what is compiled there is executed."""
    private = False
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        states = [path.lstat() for path in (folder, folder.parent)]
        private = all(state.st_uid == os.getuid() and not state.st_mode & 0o022 for state in states)
    if not private:
        _warn(f"nothing is compiled below MSRL_LOCAL: {folder} and its parent have to be this user's alone")
    return private


def shares_of(near: Sequence[Sequence[Core]]) -> list[set[int]]:
    """The CPUs of each device, whole cores; none at all where one would have too few, or cores of two groups.

    near: cores near each device of the host, of which devices with the same ones get equal parts.

    >>> shares_of([[(0, 4), (1, 5), (2, 6), (3, 7)]] * 2), shares_of([[(0, 4), (1, 5)], [(1, 5), (2, 6)]])
    ([{0, 1, 4, 5}, {2, 3, 6, 7}], [])
    """
    shares = []
    for device, cores in enumerate(near):
        alike = [other for other, theirs in enumerate(near) if theirs == cores]
        first = len(cores) * alike.index(device) // len(alike)
        end = len(cores) * (alike.index(device) + 1) // len(alike)
        shares.append({cpu for core in cores[first:end] for cpu in core})
    groups = {tuple(cores) for cores in near}
    # two groups that share a core would give it to devices of both
    overlap = sum(map(len, groups)) > len(set().union(*groups))
    return [] if overlap or min(map(len, shares)) < LEAST_CPUS else shares


def near_devices(count: int) -> list[list[Core]]:
    """Cores that this process may use near each of its host's devices.

    Without GPUs, or where the kernel does not know, all.
    """
    allowed = os.sched_getaffinity(0)
    cores = sorted({tuple(sorted(allowed & _siblings(cpu))) for cpu in allowed})
    near = [cores] * count
    numbers = ",".join(map(str, range(count)))
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",") if name]
    if len(visible) < count:
        return near
    try:
        import pynvml
    except ImportError:
        return near
    with contextlib.suppress(pynvml.NVMLError, OSError, ValueError):
        pynvml.nvmlInit()
        for device, name in enumerate(visible[:count]):
            if name.isdigit():
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
            if isinstance(bus, bytes):
                bus = bus.decode()
            address = bus.lower()[-12:]  # NVML's domain has 8 digits, the kernel's 4
            local = cpus_in((_PCI / address / "local_cpulist").read_text())
            near[device] = [core for core in cores if local & {*core}] or cores
    return near


def _siblings(cpu: int) -> set[int]:
    """The CPUs of the same core, this one if the kernel does not say."""
    with contextlib.suppress(OSError):
        return cpus_in((_CPU / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
    return {cpu}
