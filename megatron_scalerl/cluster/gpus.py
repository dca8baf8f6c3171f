"""Checks of the GPUs that this process may use. NVML (nvidia-ml-py) is asked in a process with a time limit, since a
broken driver can hang.

A query that fails counts as a fault of one GPU, so one lost GPU hides no result of another GPU. No CUDA context is
created and no setting is changed.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from megatron_scalerl.cluster.check import MIB, Check
from megatron_scalerl.cluster.probe import answer_of
from megatron_scalerl.processes.logs import listed
from megatron_scalerl.record import record

LIMIT_S = 60.0
"""Time limit of all queries together (s)."""
FOREIGN_MIB = 256
"""Device memory of other processes from which a GPU counts as in use (MiB): a CUDA context takes more, a monitoring
agent or an MPS server less. An assumption."""
GPUS = "GPUs"
"""Name of the check of the GPUs' number and model."""
_OTHER_NODE = "take another node (sbatch --exclude) and report this node to the administrator"


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """NVML's answers about this node. Produced by `examine_gpus` and `gpus_in_process`."""

    checks: list[Check]
    cuda_version: str = ""
    """The newest CUDA that the driver supports, such as "13.0"; "" if unknown."""


@record
class Gpu:
    """NVML's answers about one GPU."""

    index: int
    name: str
    """Model of the GPU, or NVML's error in parentheses if the GPU does not answer."""
    uuid: str = ""
    handle: Any = None
    """NVML's handle; None where the GPU does not answer."""


def gpus_in_process(needed_gpus: int | None, limit_s: float = LIMIT_S) -> GpuReport:
    """`examine_gpus` in another process, which is killed after `limit_s`."""
    try:
        answer = answer_of("megatron_scalerl.cluster.gpus", str(needed_gpus or 0), limit_s=limit_s)
        return msgspec.json.decode(answer, type=GpuReport)
    except (RuntimeError, msgspec.DecodeError) as error:
        return _failure(str(error))


def main() -> None:
    """Run in the separate process: print the report as JSON. The argument is `needed_gpus`, 0 if unknown."""
    needed_gpus = int(sys.argv[1])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import pynvml
    except ModuleNotFoundError:
        report = GpuReport(checks=_without_gpus("package nvidia-ml-py is not installed", needed_gpus))
    else:
        report = examine_gpus(pynvml, needed_gpus=needed_gpus, visible=visible)
    print(msgspec.json.encode(report).decode())


def examine_gpus(nvml: Any, *, needed_gpus: int | None, visible: str | None) -> GpuReport:
    """All checks of GPUs.

    nvml: the module pynvml, or a stand-in with the same functions, constants and NVMLError. needed_gpus: GPUs that
    the run takes on this node, at least 1; None if unknown. visible: CUDA_VISIBLE_DEVICES, None if unset; GPUs
    outside `visible` belong to other jobs.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return GpuReport(checks=_without_gpus(f"NVML: {error}", needed_gpus))
        return _failure(f"NVML: {error}")
    try:
        return _examined(nvml, needed_gpus, visible)
    except nvml.NVMLError as error:
        return _failure(f"NVML: {error}")


def _examined(nvml: Any, needed_gpus: int | None, visible: str | None) -> GpuReport:
    driver = _answer(nvml, nvml.nvmlSystemGetDriverVersion) or "(unknown)"
    # NVML writes CUDA 13.0 as 13000, and CUDA 12.8 as 12080
    number = _answer(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
    cuda = ""
    if number:
        cuda = f"{number // 1000}.{number % 1000 // 10}"
    node_gpus = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    gpus, unknown_entries = visible_gpus(node_gpus, visible)
    if not gpus and not unknown_entries:
        reason = f"CUDA_VISIBLE_DEVICES is {visible!r}" if node_gpus else "NVML lists none"
        return GpuReport(checks=_without_gpus(reason, needed_gpus), cuda_version=cuda)
    faults = "; ".join(f"GPU {gpu.index}: {fault}" for gpu in gpus for fault in _faults(nvml, gpu))
    health = Check("GPU health", "ok", "no memory in use, no errors")
    if faults:
        remedy = f"end processes of earlier jobs that hold memory; for errors, {_OTHER_NODE}"
        health = Check("GPU health", "failed", f"{faults}; {remedy}")
    version = Check("driver", "ok", f"{driver}, for CUDA up to {cuda or '(unknown)'}")
    return GpuReport(checks=[_count(gpus, unknown_entries, needed_gpus), health, version], cuda_version=cuda)


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = nvml.nvmlDeviceGetName(handle)
        uuid = _answer(nvml, nvml.nvmlDeviceGetUUID, handle) or ""
        return Gpu(index=index, name=name, uuid=uuid, handle=handle)
    except nvml.NVMLError as error:
        return Gpu(index=index, name=f"({error})")


def _faults(nvml: Any, gpu: Gpu) -> Iterator[str]:
    if gpu.handle is None:
        yield gpu.name.strip("()")
        return
    try:
        # version 2 of this query (nvmlMemory_v2) leaves out the driver's own memory
        memory = _answer(nvml, nvml.nvmlDeviceGetMemoryInfo, gpu.handle, nvml.nvmlMemory_v2)
        if memory and memory.used // MIB >= FOREIGN_MIB:
            processes = _answer(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, gpu.handle)
            # in a container this list may lack processes whose memory the driver counts
            pids = ", ".join(f"pid {process.pid}" for process in processes or ())
            yield f"{memory.used // MIB} MiB in use by {pids or 'processes that are not visible here'}"
        kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        errors = _answer(nvml, nvml.nvmlDeviceGetTotalEccErrors, gpu.handle, *kinds)
        if errors:
            yield f"{errors} uncorrected memory errors since the driver was loaded"
        # four values: rows with corrected errors, with uncorrected errors, whether a remapping is pending, whether
        # one failed
        rows = _answer(nvml, nvml.nvmlDeviceGetRemappedRows, gpu.handle)
        if rows and any(rows[2:]):
            yield "row remapping is pending or has failed"
    except nvml.NVMLError as error:
        yield str(error)


def _answer(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    """The answer to a query; None if GPU or driver lacks or forbids the query. Raises NVMLError for other errors."""
    try:
        return query(*arguments)
    except nvml.NVMLError as error:
        lacking = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION)
        if error.value not in lacking:
            raise
        return None


def _failure(problem: str) -> GpuReport:
    """The report if NVML does not answer at all."""
    remedy = "run nvidia-smi; a driver that does not answer needs a reboot of the node"
    return GpuReport(checks=[Check(GPUS, "failed", f"{problem}; {remedy}")])


def _without_gpus(reason: str, needed_gpus: int | None) -> list[Check]:
    if needed_gpus:
        remedy = "install the driver, or ask Slurm for GPUs (--gpus-per-node)"
        return [Check(GPUS, "failed", f"the run takes {needed_gpus}, but no GPU was found: {reason}; {remedy}")]
    return [Check(GPUS, "skipped", f"no GPU: {reason}")]


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> tuple[list[Gpu], list[str]]:
    """(the GPUs that CUDA_VISIBLE_DEVICES names, the entries that name no GPU). visible: value of the variable.

    An index in the variable is taken for NVML's index. By default CUDA numbers GPUs by speed, and GPUs of equal speed
    by PCI address, as NVML does.
    """
    if visible is None:
        return list(gpus), []
    chosen = []
    unknown_entries = []
    for entry in filter(None, map(str.strip, visible.split(","))):
        # CUDA takes the first characters of a UUID for the whole UUID
        matches = [gpu for gpu in gpus if entry == str(gpu.index) or gpu.uuid.startswith(entry)]
        chosen += matches[:1]
        if not matches:
            unknown_entries.append(entry)
    return chosen, unknown_entries


def _count(gpus: Sequence[Gpu], unknown_entries: Sequence[str], needed_gpus: int | None) -> Check:
    names = Counter(gpu.name for gpu in gpus)
    summary = ", ".join(f"{number} x {name}" for name, number in names.items()) or "none"
    wrong = ""
    if unknown_entries:
        wrong = f"CUDA_VISIBLE_DEVICES names {listed(unknown_entries, 4)}, not found: lost, or set for another node"
    elif needed_gpus and len(gpus) < needed_gpus:
        wrong = f"the run takes {needed_gpus}: request more GPUs, or correct --gpus; if a GPU is lost, {_OTHER_NODE}"
    elif len(names) > 1:
        wrong = "all GPUs have to answer and be of one model; request a model (sbatch --gres=gpu:TYPE:N)"
    if wrong:
        return Check(GPUS, "failed", f"{summary}; {wrong}")
    return Check(GPUS, "ok", summary)


if __name__ == "__main__":
    main()
