"""What one rank or engine has of its host: the CPUs beside its devices, and folders for what it compiles.

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
"""Of a device's process, which has threads of its own beside those that compute: two cores of two threads."""
Core = tuple[int, ...]
"""Its CPUs."""
_PCI, _CPU = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/cpu")


def share_of(devices: Sequence[int], of: int) -> str:
    """A share as it is written."""
    return f"{','.join(map(str, devices))}/{of}"


def own_variables(name: str, share: str) -> dict[str, str]:
    """Variables of a process on this host. name: engine-3, trainer-0. share: may be empty."""
    local = os.environ.get("MSRL_LOCAL", "")
    keys = [key for key in CACHES if key not in os.environ] if local and _own(Path(local)) else []
    found = {key: f"{local}/{name}/{CACHES[key]}" for key in keys}
    if share and os.environ.get("MSRL_BIND_CPUS") == "1":
        devices, _, of = share.partition("/")
        if shares := shares_of(near_devices(int(of))):
            own = sorted(cpu for device in devices.split(",") for cpu in shares[int(device)])
            found[CPUS] = ",".join(map(str, own))
        else:
            _warn(f"no process is bound to CPUs: {of} devices need {LEAST_CPUS} near each, in separate groups")
    return found


def _own(folder: Path) -> bool:
    """Whether a folder, made here, and the one above it are this user's alone: what is compiled there is executed."""
    own = False
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = [path.lstat() for path in (folder, folder.parent)]
        own = all(each.st_uid == os.getuid() and not each.st_mode & 0o022 for each in found)
    if not own:
        _warn(f"nothing is compiled below MSRL_LOCAL: {folder} and its parent have to be this user's alone")
    return own


def shares_of(near: Sequence[Sequence[Core]]) -> list[set[int]]:
    """The CPUs of each device, whole cores; none at all where one would have too few, or cores of two groups.

    near: cores near each device of the host, of which devices with the same ones get equal parts.

    >>> shares_of([[(0, 4), (1, 5), (2, 6), (3, 7)]] * 2), shares_of([[(0, 4), (1, 5)], [(1, 5), (2, 6)]])
    ([{0, 1, 4, 5}, {2, 3, 6, 7}], [])
    """
    shares = []
    for device, cores in enumerate(near):
        alike = [other for other, theirs in enumerate(near) if theirs == cores]
        part, count = alike.index(device), len(alike)
        own = cores[len(cores) * part // count : len(cores) * (part + 1) // count]
        shares.append({cpu for core in own for cpu in core})
    cores = [core for group in {tuple(cores) for cores in near} for core in group]
    return shares if len(cores) == len(set(cores)) and min(map(len, shares)) >= LEAST_CPUS else []


def near_devices(count: int) -> list[list[Core]]:
    """Cores that this process may use near each of its host's devices.

    Without GPUs, or where the kernel does not know, all.
    """
    allowed = os.sched_getaffinity(0)
    cores = sorted({tuple(sorted(allowed & _siblings(cpu))) for cpu in allowed})
    near = [cores] * count
    every = ",".join(map(str, range(count)))
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",") if name]
    if len(visible) < count:
        return near
    try:
        import pynvml
    except ImportError:
        return near
    with contextlib.suppress(pynvml.NVMLError, OSError, ValueError):
        pynvml.nvmlInit()
        for device, name in enumerate(visible[:count]):
            by_name = pynvml.nvmlDeviceGetHandleByIndex if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
            bus = pynvml.nvmlDeviceGetPciInfo(by_name(int(name) if name.isdigit() else name)).busId
            address = (bus.decode() if isinstance(bus, bytes) else bus).lower()[-12:]  # NVML's domain has 8 digits
            local = cpus_in((_PCI / address / "local_cpulist").read_text())
            near[device] = [core for core in cores if local & {*core}] or cores
    return near


def _siblings(cpu: int) -> set[int]:
    """The CPUs of the same core, this one if the kernel does not say."""
    with contextlib.suppress(OSError):
        return cpus_in((_CPU / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
    return {cpu}
