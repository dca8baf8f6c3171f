"""What one rank or engine has of its host: the CPUs beside its devices, and folders for what it compiles.

A share is written `2,3/8`: the devices 2 and 3 of the 8 that the run uses there. The CPUs are divided in a Slurm job
alone (MSRL_BIND_CPUS=1 of the job script); the process takes them before its program starts
(`processes.parent_death`). Compilers write below MSRL_LOCAL, a folder of the job on the node's own disk: many
processes that share one cache on a network file system wait for its locks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_scalerl.processes.parent_death import CPUS, cpus_in

CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
SHARE = "MSRL_SHARE"
"""Variable of a program on another host: its share, or for all ranks of the host the number behind the `/`."""
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
        own = cpus_of([int(device) for device in devices.split(",")], near_devices(int(of)))
        found |= {CPUS: ",".join(map(str, sorted(own)))} if own else {}
    return found


def _own(folder: Path) -> bool:
    """Whether a folder, made here, and the one above it are this user's alone: what is compiled there is executed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = [path.lstat() for path in (folder, folder.parent)]
    except OSError:
        return False
    return all(each.st_uid == os.getuid() and not each.st_mode & 0o022 for each in found)


def cpus_of(devices: Sequence[int], near: Sequence[Sequence[int]]) -> set[int]:
    """The CPUs of a process with these devices; none where a device would have less than one.

    near: CPUs near each device of the host, of which devices with the same ones get equal parts.

    >>> cpus_of([1], [range(4), range(4), range(4, 8)]), cpus_of([0, 1], [range(5)] * 2), cpus_of([0], [[0], [0]])
    ({2, 3}, {0, 1, 2, 3, 4}, set())
    """
    own: set[int] = set()
    for device in devices:
        cpus = near[device]
        alike = [other for other, theirs in enumerate(near) if list(theirs) == list(cpus)]
        part, count = alike.index(device), len(alike)
        if len(cpus) < count:
            return set()
        own |= set(cpus[len(cpus) * part // count : len(cpus) * (part + 1) // count])
    return own


def near_devices(count: int) -> list[list[int]]:
    """CPUs that this process may use near each of its host's devices, those of a core side by side.

    Without GPUs, or where the kernel does not know, all.
    """
    allowed = sorted(os.sched_getaffinity(0), key=lambda cpu: (min(_siblings(cpu), default=cpu), cpu))
    near = [allowed] * count
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
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
            near[device] = [cpu for cpu in allowed if cpu in local] or allowed
    return near


def _siblings(cpu: int) -> set[int]:
    """The CPUs of the same core."""
    with contextlib.suppress(OSError):
        return cpus_in((_CPU / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
    return set()
