"""Reads the GPUs' state through NVML (nvidia-ml-py), in a process with a time limit, since a broken driver can hang.

A query that fails is part of the reading, so one lost GPU hides nothing about the others. No CUDA context is created
and no setting is changed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from megatron_scalerl.cluster.check import MIB

LIMIT_S = 60.0
"""Time limit of the whole reading (s)."""
_KILLED_S = 5.0
"""After SIGKILL; a process inside the driver may not end (s)."""
T = TypeVar("T")


class NvmlFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A query that NVML did not answer."""

    unsupported: bool
    """True if this GPU, or this driver, does not have the query; False if something is wrong."""
    text: str
    """NVML's error."""


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that computes on a GPU."""

    pid: int
    """In the PID namespace of the driver, that is of the host."""
    mib: int | None
    """Device memory (MiB); None if the driver does not say."""


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one GPU; a field is a failure where NVML did not answer."""

    index: int
    """NVML's, in the order of PCI addresses."""
    name: str | NvmlFailure
    uuid: str | NvmlFailure
    processes: list[GpuProcess] | NvmlFailure
    used_mib: int | NvmlFailure
    """Device memory in use, without what the driver reserves (MiB)."""
    ecc_volatile: int | NvmlFailure
    """Uncorrected memory errors since the driver was loaded."""
    ecc_aggregate: int | NvmlFailure
    """Uncorrected memory errors over the GPU's life."""
    remapping: list[int] | NvmlFailure
    """(pending, failed) of row remapping, 0 or 1 each."""
    clocks: int | NvmlFailure
    """Bit mask of the reasons for which clocks are lowered now (nvmlClocksEventReasons)."""
    links: list[bool] | NvmlFailure
    """Whether each of the GPU's NVLinks is active; empty without NVLink."""
    persistent: bool | NvmlFailure
    """Persistence mode."""
    mig: bool | NvmlFailure
    """MIG mode."""


class NvmlReading(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML says about this node. Produced by `read` and `read_in_process`."""

    absent: str = ""
    """Why this node has no NVML: library, driver or nvidia-ml-py is not there. "" if it has."""
    failure: str = ""
    """How NVML failed as a whole; "" if it did not."""
    driver: str | NvmlFailure = ""
    cuda_version: int | NvmlFailure = 0
    """The newest CUDA that the driver supports, 1000 x major + 10 x minor."""
    gpus: list[GpuState] = []


def read(nvml: Any) -> NvmlReading:
    """Query everything. nvml: the module pynvml, or a stand-in with its functions, constants and NVMLError."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return NvmlReading(absent=f"NVML: {error}")
        return NvmlReading(failure=f"NVML: {error}")
    try:
        count = nvml.nvmlDeviceGetCount()
        return NvmlReading(
            driver=_asked(nvml, nvml.nvmlSystemGetDriverVersion),
            cuda_version=_asked(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2),
            gpus=[_gpu(nvml, index) for index in range(count)],
        )
    except nvml.NVMLError as error:
        return NvmlReading(failure=f"NVML: {error}")
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def read_in_process(limit_s: float = LIMIT_S) -> NvmlReading:
    """The reading of a process of its own, which is killed after `limit_s`."""
    own = ["-m", "megatron_scalerl.processes.parent_death", str(os.getpid())]
    argv = [sys.executable, *own, sys.executable, "-m", "megatron_scalerl.cluster.nvml"]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, log = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_S)
        return NvmlReading(failure=f"NVML did not answer within {limit_s:g} s")
    try:
        return msgspec.json.decode(output, type=NvmlReading)
    except msgspec.DecodeError:
        last = (log.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        return NvmlReading(failure=f"the process that queries NVML ended with code {process.returncode}: {last}")


def _asked(nvml: Any, query: Callable[[], T]) -> T | NvmlFailure:
    try:
        return query()
    except nvml.NVMLError as error:
        lacking = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION)
        return NvmlFailure(unsupported=error.value in lacking, text=str(error))


def _gpu(nvml: Any, index: int) -> GpuState:
    handle = _asked(nvml, lambda: nvml.nvmlDeviceGetHandleByIndex(index))

    def asked(query: Callable[[Any], T]) -> T | NvmlFailure:
        return handle if isinstance(handle, NvmlFailure) else _asked(nvml, lambda: query(handle))

    def ecc(counter: int) -> int | NvmlFailure:
        kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return asked(lambda h: nvml.nvmlDeviceGetTotalEccErrors(h, kind, counter))

    return GpuState(
        index=index,
        name=asked(nvml.nvmlDeviceGetName),
        uuid=asked(nvml.nvmlDeviceGetUUID),
        processes=asked(lambda h: [_process(p) for p in nvml.nvmlDeviceGetComputeRunningProcesses(h)]),
        used_mib=asked(lambda h: nvml.nvmlDeviceGetMemoryInfo(h, nvml.nvmlMemory_v2).used // MIB),
        ecc_volatile=ecc(nvml.NVML_VOLATILE_ECC),
        ecc_aggregate=ecc(nvml.NVML_AGGREGATE_ECC),
        remapping=asked(lambda h: list(nvml.nvmlDeviceGetRemappedRows(h)[2:])),
        clocks=asked(lambda h: _clocks(nvml, h)),
        links=asked(lambda h: _links(nvml, h)),
        persistent=asked(lambda h: nvml.nvmlDeviceGetPersistenceMode(h) == nvml.NVML_FEATURE_ENABLED),
        mig=asked(lambda h: nvml.nvmlDeviceGetMigMode(h)[0] == 1),
    )


def _process(found: Any) -> GpuProcess:
    return GpuProcess(pid=found.pid, mib=None if found.usedGpuMemory is None else found.usedGpuMemory // MIB)


def _clocks(nvml: Any, handle: Any) -> int:
    try:
        reasons: int = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)  # its name before driver 535
    return reasons


def _links(nvml: Any, handle: Any) -> list[bool]:
    """States of the links that this GPU has; those beyond its last one are unsupported or invalid arguments."""
    states = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                raise
    return states


def main() -> None:
    """Print the reading as JSON."""
    try:
        import pynvml
    except ModuleNotFoundError:
        reading = NvmlReading(absent="package nvidia-ml-py is not installed")
    else:
        reading = read(pynvml)
    sys.stdout.buffer.write(msgspec.json.encode(reading))


if __name__ == "__main__":
    main()
