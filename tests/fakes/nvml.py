"""A stand-in for nvidia-ml-py, the module pynvml, over the hosts of `HOSTS`: faults that no GPU shows on demand.

It has the functions that `cluster.gpus` calls, with pynvml's names, arguments and constants, and raises as they do.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

MIB = 2**20
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_UNKNOWN = 999
_TEXTS = {3: "Not Supported", 9: "Driver Not Loaded", 15: "GPU is lost", 999: "Unknown Error"}


class StandInError(Exception):
    """As pynvml.NVMLError."""

    def __init__(self, value):
        super().__init__(_TEXTS.get(value, f"error {value}"))
        self.value = value


@dataclass(frozen=True, kw_only=True)
class StandInGpu:
    """One GPU of a host."""

    name: str = "NVIDIA H100 80GB HBM3"
    processes: tuple[int, ...] = ()
    used_mib: int = 1
    volatile: int = 0
    aggregate: int = 0
    pending: int = 0
    broken: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    """Function -> the error that it returns for this GPU."""


class StandInNvml:
    """As the module pynvml on one host."""

    NVMLError = StandInError
    NVML_ERROR_NOT_SUPPORTED = NVML_ERROR_NOT_SUPPORTED
    NVML_ERROR_NO_PERMISSION = NVML_ERROR_NO_PERMISSION
    NVML_ERROR_DRIVER_NOT_LOADED = NVML_ERROR_DRIVER_NOT_LOADED
    NVML_ERROR_LIBRARY_NOT_FOUND = NVML_ERROR_LIBRARY_NOT_FOUND
    NVML_ERROR_FUNCTION_NOT_FOUND = NVML_ERROR_FUNCTION_NOT_FOUND
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_AGGREGATE_ECC = 1
    nvmlMemory_v2 = 0x02000028

    def __init__(self, gpus, *, errors=None, every=0):
        """errors: function -> its error on every GPU. every: the error of all functions after nvmlInit."""
        self._gpus, self._errors, self._every = gpus, errors or {}, every

    def _answer(self, function, handle=None):
        error = self._errors.get(function) or (function != "nvmlInit" and self._every)
        error = error or (handle.errors.get(function) if handle is not None else 0)
        if error:
            raise StandInError(error)

    def nvmlInit(self):
        self._answer("nvmlInit")

    def nvmlDeviceGetCount(self):
        if self._every != NVML_ERROR_NOT_SUPPORTED:
            self._answer("nvmlDeviceGetCount")
        return len(self._gpus)

    def nvmlSystemGetDriverVersion(self):
        self._answer("nvmlSystemGetDriverVersion")
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        self._answer("nvmlSystemGetCudaDriverVersion_v2")
        return 13000

    def nvmlDeviceGetHandleByIndex(self, index):
        if self._every != NVML_ERROR_NOT_SUPPORTED:
            self._answer("nvmlDeviceGetHandleByIndex", self._gpus[index])
        return self._gpus[index]

    def nvmlDeviceGetName(self, handle):
        if self._every != NVML_ERROR_NOT_SUPPORTED:
            self._answer("nvmlDeviceGetName", handle)
        return handle.name

    def nvmlDeviceGetUUID(self, handle):
        self._answer("nvmlDeviceGetUUID", handle)
        place = next(i for i, gpu in enumerate(self._gpus) if gpu is handle)
        return f"GPU-{place:08x}-0000-0000-0000-000000000000"

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self._answer("nvmlDeviceGetComputeRunningProcesses", handle)
        return [SimpleNamespace(pid=pid) for pid in handle.processes]

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        self._answer("nvmlDeviceGetMemoryInfo", handle)
        reserved = 0 if version == self.nvmlMemory_v2 else 600 * MIB  # version 1 counts the driver's own
        return SimpleNamespace(total=81_559 * MIB, used=handle.used_mib * MIB + reserved)

    def nvmlDeviceGetTotalEccErrors(self, handle, errorType, counterType):
        self._answer("nvmlDeviceGetTotalEccErrors", handle)
        assert errorType == self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return handle.aggregate if counterType == self.NVML_AGGREGATE_ECC else handle.volatile

    def nvmlDeviceGetRemappedRows(self, device):
        self._answer("nvmlDeviceGetRemappedRows", device)
        return (3, 1, device.pending, device.broken)


class HangingNvml(StandInNvml):
    """A stand-in whose driver does not answer."""

    def nvmlInit(self):
        time.sleep(3600)


class CrashingNvml(StandInNvml):
    """A stand-in whose library ends the process."""

    def nvmlInit(self):
        os._exit(7)


def eight(count=8, **changed):
    """GPUs of a host, of which number 3 is changed, or the last one of fewer."""
    gpus = [StandInGpu() for _ in range(count)]
    place = min(3, count - 1)
    gpus[place] = replace(gpus[place], **changed)
    return gpus


HOSTS = {
    "healthy": lambda: StandInNvml(eight()),
    "pending remap": lambda: StandInNvml(eight(pending=1)),
    "failed remap": lambda: StandInNvml(eight(broken=1)),
    "foreign memory": lambda: StandInNvml(eight(processes=(4711, 4712), used_mib=70_512)),
    "unseen memory": lambda: StandInNvml(eight(used_mib=70_512)),
    "monitoring agent": lambda: StandInNvml(eight(processes=(99,), used_mib=30)),
    "volatile ecc": lambda: StandInNvml(eight(volatile=2, aggregate=2)),
    "old ecc": lambda: StandInNvml(eight(aggregate=5)),
    "two models": lambda: StandInNvml(eight(name="NVIDIA A100-SXM4-80GB")),
    "seven": lambda: StandInNvml(eight(7)),
    "lost": lambda: StandInNvml(eight(errors={"nvmlDeviceGetHandleByIndex": NVML_ERROR_GPU_IS_LOST})),
    "nothing supported": lambda: StandInNvml(eight(), every=NVML_ERROR_NOT_SUPPORTED),
    "driver gone": lambda: StandInNvml(eight(), every=NVML_ERROR_DRIVER_NOT_LOADED),
    "no driver": lambda: StandInNvml([], errors={"nvmlInit": NVML_ERROR_DRIVER_NOT_LOADED}),
    "no library": lambda: StandInNvml([], errors={"nvmlInit": NVML_ERROR_LIBRARY_NOT_FOUND}),
    "unknown": lambda: StandInNvml([], errors={"nvmlInit": NVML_ERROR_UNKNOWN}),
    "no gpu": lambda: StandInNvml([]),
    "hanging": lambda: HangingNvml([]),
    "crashing": lambda: CrashingNvml([]),
}
