"""Checks of the GPUs that this process may use. NVML (nvidia-ml-py) is asked in a process with a time limit, since a
broken driver can hang.

A query that fails is a fault of its GPU alone, so one lost GPU hides nothing about the others. No CUDA context is
created and no setting is changed.
"""

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from megatron_scalerl.cluster.check import MIB, Check, Status, failed, ok, skipped, warning
from megatron_scalerl.processes.logs import listed
from megatron_scalerl.record import record

LIMIT_S = 60.0
"""Time limit of all queries together (s)."""
_KILLED_S = 5.0
"""After SIGKILL; a process inside the driver may not end (s)."""
FOREIGN_MIB = 256
"""Device memory of other processes from which a GPU counts as in use (MiB): a CUDA context takes more, a monitoring
agent or an MPS server less. An assumption."""
GPUS = "GPUs"
"""Name of the check of the GPUs' number and model, and of the fact in which nodes have to agree."""
_OTHER_NODE = "take another node (sbatch --exclude) and report this one to its administrator"
_HARDWARE = {0x40: "hardware thermal slowdown", 0x80: "power brake", 0x08: "hardware slowdown"}
_THERMAL = {0x20: "software thermal slowdown"}
"""nvmlClocksEventReasons; an idle GPU, a power cap and clocks that were set are no fault."""
T = TypeVar("T")


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """NVML's answers about this node. Produced by `examine_gpus` and `gpus_in_process`."""

    checks: list[Check]
    names: str = ""
    """Number and model of the GPUs that the run may use, such as "8 x NVIDIA H100 80GB HBM3"."""
    driver: str = ""
    """The driver's version; "" if it is not known."""
    cuda_version: str = ""
    """The newest CUDA that the driver supports, such as "13.0"; "" if it is not known."""


def gpus_in_process(needed: int | None, limit_s: float = LIMIT_S) -> GpuReport:
    """`examine_gpus` in another process, which is killed after `limit_s`."""
    wrapper = ["-m", "megatron_scalerl.processes.parent_death", str(os.getpid())]
    argv = [sys.executable, *wrapper, sys.executable, "-m", "megatron_scalerl.cluster.gpus"]
    if needed is not None:
        argv.append(str(needed))
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, log = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # inside a broken driver it may outlive the signal: then it is left behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_S)
        return _failure(f"NVML did not answer within {limit_s:g} s")
    try:
        return msgspec.json.decode(output, type=GpuReport)
    except msgspec.DecodeError:
        last = (log.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        return _failure(f"the process that queries NVML ended with code {process.returncode}: {last}")


def main() -> None:
    """The process: print the report as JSON. Its only argument is `needed`."""
    needed = next(map(int, sys.argv[1:]), None)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import pynvml
    except ModuleNotFoundError:
        report = GpuReport(checks=_without_gpus("package nvidia-ml-py is not installed", needed))
    else:
        report = examine_gpus(pynvml, needed=needed, visible=visible)
    sys.stdout.buffer.write(msgspec.json.encode(report))


def examine_gpus(nvml: Any, *, needed: int | None, visible: str | None) -> GpuReport:
    """All checks of GPUs.

    nvml: the module pynvml, or a stand-in with its functions, constants and NVMLError. needed: GPUs that the run
    takes on this node, at least 1; None if unknown. visible: CUDA_VISIBLE_DEVICES, None if unset; GPUs outside it
    belong to other jobs.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return GpuReport(checks=_without_gpus(f"NVML: {error}", needed))
        return _failure(f"NVML: {error}")
    try:
        return _examined(nvml, needed, visible)
    except nvml.NVMLError as error:
        return _failure(f"NVML: {error}")
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _examined(nvml: Any, needed: int | None, visible: str | None) -> GpuReport:
    version = _answer(nvml, nvml.nvmlSystemGetDriverVersion)
    # CUDA 13.0 is 13000, 12.8 is 12080
    number = int(_answer(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2) or 0)
    cuda = ""
    if number:
        cuda = f"{number // 1000}.{number % 1000 // 10}"
    count = nvml.nvmlDeviceGetCount()
    gpus, unknown = visible_gpus(nvml, range(count), visible)
    if not gpus and not unknown:
        why = f"CUDA_VISIBLE_DEVICES is {visible!r}" if count else "NVML lists none"
        return GpuReport(checks=_without_gpus(why, needed), driver=version, cuda_version=cuda)
    # a GPU that does not tell its name is counted: it is on the bus, and its check fails
    answers, broken, lacking = _queried(nvml, gpus, nvml.nvmlDeviceGetName)
    unnamed = {gpu: f"(unnamed: {why})" for gpu, why in (broken | lacking).items()}
    names = Counter((answers | unnamed)[gpu] for gpu in gpus)
    summary = ", ".join(f"{number} x {name}" for name, number in names.items())
    count_check = _count(len(gpus), len(names), summary, unknown, needed, unnamed=bool(unnamed))
    checks = [count_check, *(_checked(nvml, rule, gpus) for rule in _RULES), _links(nvml, gpus)]
    driver = skipped("driver", "it does not say its version")
    if version:
        driver = ok("driver", f"{version}, for CUDA up to {cuda or '(unknown)'}")
    checks.append(driver)
    return GpuReport(checks=checks, names=summary, driver=version, cuda_version=cuda)


def _answer(nvml: Any, query: Callable[[], Any]) -> str:
    """The answer to a query about the driver; "" if it does not have the query. Raises NVMLError for other errors."""
    try:
        return str(query())
    except nvml.NVMLError as error:
        if not _is_lacking(nvml, error):
            raise
        return ""


def _failure(found: str) -> GpuReport:
    """The report where NVML as a whole does not answer."""
    remedy = "run nvidia-smi; a driver that does not answer needs a reboot of the node"
    return GpuReport(checks=[failed(GPUS, expected="NVML's answer", found=found, remedy=remedy)])


def _without_gpus(why: str, needed: int | None) -> list[Check]:
    if needed:
        remedy = "install the driver, or ask Slurm for GPUs (--gpus-per-node)"
        return [failed(GPUS, expected=f"{needed} GPUs", found=f"none: {why}", remedy=remedy)]
    return [skipped(GPUS, f"no GPU: {why}")]


def visible_gpus(nvml: Any, gpus: Sequence[int], visible: str | None) -> tuple[list[int], list[str]]:
    """(NVML's indices of the GPUs that CUDA_VISIBLE_DEVICES names, its entries that name none).

    CUDA's own default order is by speed; it is that of PCI addresses, which NVML has, where all GPUs are equal.
    """
    if visible is None:
        return list(gpus), []
    # an entry may be the beginning of a UUID, as CUDA allows
    uuids, _, _ = _queried(nvml, gpus, nvml.nvmlDeviceGetUUID)
    indices = []
    unknown = []
    for entry in filter(None, map(str.strip, visible.split(","))):
        named = [gpu for gpu in gpus if entry == str(gpu)]
        if entry.startswith("GPU-"):
            named = [gpu for gpu in gpus if uuids.get(gpu, "").startswith(entry)]
        indices += named[:1]
        if not named:
            unknown.append(entry)
    return indices, unknown


def _queried(
    nvml: Any, gpus: Sequence[int], query: Callable[[Any], T]
) -> tuple[dict[int, T], dict[int, str], dict[int, str]]:
    """(answers, errors, errors that only say that a GPU or the driver does not have the query), by NVML's index.

    query: takes the handle of a GPU.
    """
    answers = {}
    broken: dict[int, str] = {}
    lacking: dict[int, str] = {}
    for gpu in gpus:
        try:
            answers[gpu] = query(nvml.nvmlDeviceGetHandleByIndex(gpu))
        except nvml.NVMLError as error:
            errors = broken
            if _is_lacking(nvml, error):
                errors = lacking
            errors[gpu] = str(error)
    return answers, broken, lacking


def _is_lacking(nvml: Any, error: Any) -> bool:
    lacking = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION)
    return error.value in lacking


def _count(number: int, models: int, summary: str, unknown: list[str], needed: int | None, *, unnamed: bool) -> Check:
    if unknown:
        expected = "GPUs of this node in CUDA_VISIBLE_DEVICES"
        names = f"{summary or 'none'}; no GPU is called {listed(unknown, 4)}"
        remedy = "a GPU fell off the bus, or the variable is another node's"
        return failed(GPUS, expected=expected, found=names, remedy=remedy)
    if needed and number < needed:
        remedy = f"ask for more GPUs, or pass --gpus with what the run takes here; if one is lost, {_OTHER_NODE}"
        return failed(GPUS, expected=f"{needed} GPUs", found=summary, remedy=remedy)
    if unnamed:
        return failed(GPUS, expected="every GPU's name", found=summary, remedy=_OTHER_NODE)
    if models > 1:
        remedy = "take nodes of one type (sbatch --constraint or --gres=gpu:TYPE:N)"
        return failed(GPUS, expected="GPUs of one model", found=summary, remedy=remedy)
    return ok(GPUS, summary)


@record
class _Rule:
    """A check that looks at one GPU at a time."""

    name: str
    judge: Callable[[Any, Any], tuple[Status, str]]
    """Takes pynvml and a GPU's handle; returns a status and the reason for it. Raises NVMLError."""
    expected: str
    remedy: str


def _checked(nvml: Any, rule: _Rule, gpus: Sequence[int]) -> Check:
    """A rule's result for all GPUs, the worst of theirs; skipped if none of them has the query."""
    judged, broken, lacking = _queried(nvml, gpus, lambda handle: rule.judge(nvml, handle))
    faults: dict[str, dict[int, str]] = {"failed": dict(broken), "warning": {}, "ok": {}}
    for gpu, (status, text) in judged.items():
        faults[status][gpu] = text
    for status, make in (("failed", failed), ("warning", warning)):
        if faults[status]:
            lines = "; ".join(_lines(faults[status]))
            return make(rule.name, expected=rule.expected, found=lines, remedy=rule.remedy)
    if len(lacking) == len(gpus):
        return skipped(rule.name, _lines(lacking)[0])
    if lacking:
        return ok(rule.name, f"{rule.expected} (not known: {listed(_lines(lacking), 4)})")
    return ok(rule.name, rule.expected)


def _lines(texts: Mapping[int, str]) -> list[str]:
    return [f"GPU {gpu}: {texts[gpu]}" for gpu in sorted(texts)]


def _judge_memory(nvml: Any, handle: Any) -> tuple[Status, str]:
    """Whether other processes use the GPU's memory.

    In a container the driver counts memory of processes that it does not list.
    """
    used = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used // MIB  # without the driver's own
    if used < FOREIGN_MIB:
        return "ok", ""
    processes = []
    with contextlib.suppress(nvml.NVMLError):
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    named = [f"pid {process.pid} {(process.usedGpuMemory or 0) // MIB} MiB" for process in processes]
    return "failed", f"{used} MiB in use by {', '.join(named) or 'processes that are not visible here'}"


def _judge_errors(nvml: Any, handle: Any) -> tuple[Status, str]:
    count = nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return _fault(count, f"{count} uncorrected errors")


def _judge_remapping(nvml: Any, handle: Any) -> tuple[Status, str]:
    # (corrected rows, uncorrected rows, a remapping waits for a reset, a remapping failed)
    pending, broken = nvml.nvmlDeviceGetRemappedRows(handle)[2:]
    faults = []
    if broken:
        faults.append("row remapping failed")
    if pending:
        faults.append("row remapping pending")
    return _fault(faults, " and ".join(faults))


def _judge_clocks(nvml: Any, handle: Any) -> tuple[Status, str]:
    try:
        mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)  # its name before driver 535
    hardware = [text for bit, text in _HARDWARE.items() if mask & bit]
    thermal = [text for bit, text in _THERMAL.items() if mask & bit]
    if thermal and not hardware:
        return "warning", ", ".join(thermal)
    return _fault(hardware, ", ".join(hardware + thermal))


def _fault(is_so: object, text: str) -> tuple[Status, str]:
    if is_so:
        return "failed", text
    return "ok", ""


_RULES = (
    _Rule(
        name="GPU memory",
        judge=_judge_memory,
        expected="no memory held by other processes",
        remedy="end the processes of earlier jobs on this node, or take another one",
    ),
    _Rule(
        name="ECC, since the driver was loaded",
        judge=_judge_errors,
        expected="no uncorrected errors",
        remedy=f"results on this GPU cannot be trusted: {_OTHER_NODE}",
    ),
    _Rule(
        name="row remapping",
        judge=_judge_remapping,
        expected="none pending, none failed",
        remedy="pending: the GPU needs a reset by the administrator; failed: it needs to be replaced",
    ),
    _Rule(
        name="GPU clocks",
        judge=_judge_clocks,
        expected="not lowered for heat or power supply",
        remedy=f"the slowest GPU sets the pace of a step: {_OTHER_NODE}",
    ),
    _Rule(  # NVML returns (the current mode, the mode after a reset)
        name="MIG",
        judge=lambda nvml, gpu: _fault(nvml.nvmlDeviceGetMigMode(gpu)[0] == 1, "enabled"),
        expected="disabled: a rank takes a whole GPU",
        remedy="take nodes without MIG",
    ),
)


def _links(nvml: Any, gpus: Sequence[int]) -> Check:
    """A check of NVLink: a link that is down on one GPU and up on the others is a fault."""
    name = "NVLink"
    states, broken, _ = _queried(nvml, gpus, lambda handle: _link_states(nvml, handle))
    active = {gpu: sum(links) for gpu, links in states.items()}
    most = max(active.values(), default=0)
    short = {gpu: f"{active[gpu]} of {len(states[gpu])} links active" for gpu in active if active[gpu] < most}
    if broken or short:
        lines = "; ".join(_lines(broken | short))
        return failed(name, expected="as many active links on every GPU", found=lines, remedy=_OTHER_NODE)
    if not most:
        return skipped(name, "no GPU has an active link")
    return ok(name, f"{most} active links on every GPU")


def _link_states(nvml: Any, handle: Any) -> list[bool]:
    """Whether each link of this GPU is active; those beyond its last one are unsupported or invalid arguments."""
    states = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                raise
    return states


if __name__ == "__main__":
    main()
