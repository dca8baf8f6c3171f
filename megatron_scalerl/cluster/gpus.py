"""Checks of the GPUs that this process may use, from a reading of NVML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_scalerl.cluster.check import Check, Status, failed, ok, skipped, some, warning
from megatron_scalerl.cluster.nvml import GpuState, NvmlFailure, NvmlReading

FOREIGN_MIB = 256
"""Device memory of other processes from which a GPU counts as in use (MiB): a CUDA context takes more, a monitoring
agent or an MPS server less. An assumption."""
_OTHER_NODE = "take another node (sbatch --exclude) and report this one to its administrator"
_HARDWARE = {0x40: "hardware thermal slowdown", 0x80: "power brake", 0x08: "hardware slowdown"}
_THERMAL = {0x20: "software thermal slowdown"}
"""nvmlClocksEventReasons; an idle GPU, a power cap and clocks that were set are no fault."""


def gpu_checks(reading: NvmlReading, *, needed: int | None, visible: str | None) -> list[Check]:
    """All checks of GPUs.

    needed: GPUs that the run takes on this node; None if unknown, 0 if none. visible: CUDA_VISIBLE_DEVICES, None if
    unset; GPUs outside it belong to other jobs.
    """
    if needed == 0:
        return [skipped("GPUs", "the run takes none here")]
    if reading.failure:
        found, remedy = reading.failure, "run nvidia-smi; a driver that does not answer needs a reboot of the node"
        return [failed("GPUs", expected="NVML's answer", found=found, remedy=remedy)]
    gpus, unknown = visible_gpus(reading.gpus, visible)
    if not gpus and not unknown:
        why = reading.absent or (f"CUDA_VISIBLE_DEVICES is {visible!r}" if reading.gpus else "NVML lists none")
        if needed:
            remedy = "install the driver, or ask Slurm for GPUs (--gpus-per-node)"
            return [failed("GPUs", expected=f"{needed} GPUs", found=f"none: {why}", remedy=remedy)]
        return [skipped("GPUs", f"no GPU: {why}")]
    return [
        _count(gpus, unknown, needed),
        *(_checked(rule, gpus) for rule in _RULES),
        _links(gpus),
        _driver(reading),
    ]


def visible_gpus(gpus: Sequence[GpuState], visible: str | None) -> tuple[list[GpuState], list[str]]:
    """(the GPUs that CUDA_VISIBLE_DEVICES names, its entries that name none).

    CUDA's own default order is by speed; it is that of PCI addresses, which NVML has, where all GPUs are equal.
    """
    if visible is None:
        return list(gpus), []
    found, unknown = [], []
    for entry in (text.strip() for text in visible.split(",") if text.strip()):
        named = [gpu for gpu in gpus if _is_named(gpu, entry)]
        found += named[:1]
        unknown += [] if named else [entry]
    return found, unknown


def names(gpus: Sequence[GpuState]) -> str:
    """Number and model, such as "8 x NVIDIA H100 80GB HBM3"; "" without GPUs."""
    counts = Counter(g.name if isinstance(g.name, str) else f"(unnamed: {g.name.text})" for g in gpus)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def _is_named(gpu: GpuState, entry: str) -> bool:
    by_uuid = entry.startswith("GPU-") and isinstance(gpu.uuid, str) and gpu.uuid.startswith(entry)
    return by_uuid or entry == str(gpu.index)


def _count(gpus: list[GpuState], unknown: list[str], needed: int | None) -> Check:
    found = names(gpus) or "none"
    if unknown:
        return failed(
            "GPUs",
            expected="GPUs of this node in CUDA_VISIBLE_DEVICES",
            found=f"{found}; no GPU is called {some(unknown)}",
            remedy="a GPU fell off the bus, or the variable is another node's",
        )
    if needed and len(gpus) < needed:
        remedy = f"ask for more GPUs, or pass --gpus with what the run takes here; if one is lost, {_OTHER_NODE}"
        return failed("GPUs", expected=f"{needed} GPUs", found=found, remedy=remedy)
    if len({g.name for g in gpus if isinstance(g.name, str)}) > 1:
        remedy = "take nodes of one type (sbatch --constraint or --gres=gpu:TYPE:N)"
        return failed("GPUs", expected="GPUs of one model", found=found, remedy=remedy)
    if any(isinstance(g.name, NvmlFailure) for g in gpus):
        return failed("GPUs", expected="every GPU's name", found=found, remedy=_OTHER_NODE)
    return ok("GPUs", found)


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """A check that looks at one GPU at a time."""

    name: str
    read: Callable[[GpuState], Any]
    """The state that is judged, or the failure to read it."""
    judge: Callable[[Any], tuple[Status, str]]
    """(status, what was found) of a state."""
    expected: str
    remedy: str


def _checked(rule: _Rule, gpus: Sequence[GpuState]) -> Check:
    """The worst of all GPUs; skipped if none of them has the query."""
    lacking: list[str] = []
    faults: dict[Status, list[str]] = {"failed": [], "warning": []}
    for gpu in gpus:
        state = rule.read(gpu)
        if isinstance(state, NvmlFailure):
            (lacking if state.unsupported else faults["failed"]).append(f"GPU {gpu.index}: {state.text}")
            continue
        status, found = rule.judge(state)
        if status != "ok":
            faults[status].append(f"GPU {gpu.index}: {found}")
    if faults["failed"]:
        return failed(rule.name, expected=rule.expected, found="; ".join(faults["failed"]), remedy=rule.remedy)
    if faults["warning"]:
        return warning(rule.name, expected=rule.expected, found="; ".join(faults["warning"]), remedy=rule.remedy)
    if len(lacking) == len(gpus):
        return skipped(rule.name, "; ".join(lacking[:1]))
    return ok(rule.name, rule.expected + (f" (not known: {some(lacking)})" if lacking else ""))


def _memory(gpu: GpuState) -> Any:
    """(processes, used MiB): in a container the driver counts memory of processes that it does not list."""
    for state in (gpu.processes, gpu.used_mib):
        if isinstance(state, NvmlFailure) and not state.unsupported:
            return state
    if isinstance(gpu.used_mib, NvmlFailure):
        return gpu.used_mib if isinstance(gpu.processes, NvmlFailure) else (gpu.processes, 0)
    return [] if isinstance(gpu.processes, NvmlFailure) else gpu.processes, gpu.used_mib


def _judge_memory(state: Any) -> tuple[Status, str]:
    processes, used = state
    listed = ", ".join(f"pid {p.pid} {'?' if p.mib is None else p.mib} MiB" for p in processes)
    held = max(used, sum(p.mib or 0 for p in processes))
    if held >= FOREIGN_MIB:
        return "failed", f"{held} MiB in use by {listed or 'processes that are not visible here'}"
    return ("warning", f"in use by {listed}") if processes else ("ok", "")


def _judge_remapping(state: list[int]) -> tuple[Status, str]:
    pending, broken = state
    found = [text for text, is_so in (("row remapping failed", broken), ("row remapping pending", pending)) if is_so]
    return ("failed", " and ".join(found)) if found else ("ok", "")


def _judge_clocks(mask: int) -> tuple[Status, str]:
    hardware = [text for bit, text in _HARDWARE.items() if mask & bit]
    thermal = [text for bit, text in _THERMAL.items() if mask & bit]
    status: Status = "failed" if hardware else "warning" if thermal else "ok"
    return status, ", ".join(hardware + thermal)


_RULES = (
    _Rule(
        name="GPU memory",
        read=_memory,
        judge=_judge_memory,
        expected="no memory held by other processes",
        remedy="end the processes of earlier jobs on this node, or take another one",
    ),
    _Rule(
        name="ECC, since the driver was loaded",
        read=lambda gpu: gpu.ecc_volatile,
        judge=lambda count: ("failed", f"{count} uncorrected errors") if count else ("ok", ""),
        expected="no uncorrected errors",
        remedy=f"results on this GPU cannot be trusted: {_OTHER_NODE}",
    ),
    _Rule(
        name="ECC, over the GPU's life",
        read=lambda gpu: gpu.ecc_aggregate,
        judge=lambda count: ("warning", f"{count} uncorrected errors") if count else ("ok", ""),
        expected="no uncorrected errors",
        remedy="harmless if the row remapping is in order; mention it to the administrator",
    ),
    _Rule(
        name="row remapping",
        read=lambda gpu: gpu.remapping,
        judge=_judge_remapping,
        expected="none pending, none failed",
        remedy="pending: the GPU needs a reset by the administrator; failed: it needs to be replaced",
    ),
    _Rule(
        name="GPU clocks",
        read=lambda gpu: gpu.clocks,
        judge=_judge_clocks,
        expected="not lowered for heat or power supply",
        remedy=f"the slowest GPU sets the pace of a step: {_OTHER_NODE}",
    ),
    _Rule(
        name="MIG",
        read=lambda gpu: gpu.mig,
        judge=lambda enabled: ("failed", "enabled") if enabled else ("ok", ""),
        expected="disabled: a rank takes a whole GPU",
        remedy="take nodes without MIG",
    ),
    _Rule(
        name="persistence mode",
        read=lambda gpu: gpu.persistent,
        judge=lambda enabled: ("ok", "") if enabled else ("warning", "off"),
        expected="on",
        remedy="the driver is loaded anew when a GPU's last process ends; an administrator turns it on",
    ),
)


def _links(gpus: Sequence[GpuState]) -> Check:
    """A link that is down on one GPU and up on the others is a fault; a GPU without bridge has all of them down."""
    name, expected = "NVLink", "the same number of active links on every GPU"
    states = {gpu.index: gpu.links for gpu in gpus}
    broken = [f"GPU {i}: {s.text}" for i, s in states.items() if isinstance(s, NvmlFailure) and not s.unsupported]
    if broken:
        return failed(name, expected=expected, found="; ".join(broken), remedy=_OTHER_NODE)
    links = {i: s for i, s in states.items() if isinstance(s, list) and s}
    if not links:
        return skipped(name, "these GPUs report no NVLink")
    active = {i: sum(s) for i, s in links.items()}
    most = max(active.values())
    short = [f"GPU {i}: {n} of {len(links[i])} links active" for i, n in active.items() if n < most]
    short += [f"GPU {i}: no links" for i in states if i not in links]
    if short:
        return failed(name, expected=f"{most} active links on every GPU", found="; ".join(short), remedy=_OTHER_NODE)
    down = [f"GPU {i}: {len(s) - sum(s)} of {len(s)} links inactive" for i, s in links.items() if not all(s)]
    if down:
        remedy = "normal for GPUs without NVLink bridges; elsewhere collectives are slower than planned"
        return warning(name, expected="all links active", found=some(down), remedy=remedy)
    return ok(name, f"{most} active links on every GPU")


def _driver(reading: NvmlReading) -> Check:
    version = reading.driver
    if isinstance(version, NvmlFailure):
        if version.unsupported:
            return skipped("driver", version.text)
        return failed("driver", expected="its version", found=version.text, remedy=_OTHER_NODE)
    cuda = cuda_text(reading.cuda_version)
    return ok("driver", f"{version}, for CUDA up to {cuda}" if cuda else version)


def cuda_text(version: int | NvmlFailure) -> str:
    """NVML's CUDA version as text, "13.0" for 13000; "" if it is not known."""
    return f"{version // 1000}.{version % 1000 // 10}" if isinstance(version, int) and version else ""
