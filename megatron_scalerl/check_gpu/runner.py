"""Runs parts one after another, each in its own process group with a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_scalerl.check_gpu.findings import Finding, read_findings
from megatron_scalerl.check_gpu.part import PartSetting, Size
from megatron_scalerl.check_gpu.programs import last_line, run_command
from megatron_scalerl.check_gpu.table import Part

_PROBE_S = 120.0
_GRACE_S = 5.0
_CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that parts run on. Produced by `probe_machine`."""

    gpus: tuple[str, ...]
    """Names of the visible GPUs."""
    no_gpu: str
    """Why no GPU is visible; "" if one is."""
    modules: tuple[str, ...]
    """Installed modules among transformer_engine, vllm and apex."""
    details: Mapping[str, Any]
    """Driver, CUDA, CPU, Python and package versions."""


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """The result of one part; nested values are JSON types."""

    name: str
    started: str
    """UTC, ISO 8601."""
    seconds: float
    limit_s: float
    end: str
    """How its process failed, in one line; "" if it did not."""
    machine: Mapping[str, Any]
    findings: tuple[Finding, ...] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "PartResult":
        """Raises KeyError or TypeError for invalid contents."""
        return cls(**{**value, "findings": tuple(Finding(**found) for found in value["findings"])})


def probe_machine(*, hide_gpus: bool) -> Machine:
    """Query GPUs and packages in a separate process. Raises RuntimeError if that fails, e.g. without torch."""
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {})
    command = [sys.executable, "-m", "megatron_scalerl.check_gpu.probe"]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_PROBE_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"environment: expected to import torch within {_PROBE_S:g} s, found that it takes longer"
        ) from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"environment: expected a Python that imports torch, found {sys.executable}: {why}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Machine(
        gpus=tuple(found.pop("gpus")), no_gpu=found.pop("no_gpu"), modules=tuple(found.pop("modules")), details=found
    )


async def run_parts(parts: Sequence[Part], machine: Machine, size: Size, out: Path) -> AsyncIterator[PartResult]:
    """Yields the result of each part when it has ended. Closing the iterator stops the running part."""
    for part in parts:
        yield await _run(part, machine, size, out)


async def _run(part: Part, machine: Machine, size: Size, out: Path) -> PartResult:
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    limit = part.seconds(size)
    why = unable(part, machine, size)
    if why:
        findings, end = tuple(_not_run(part, why)), ""
    else:
        findings, end = await _in_process(part, machine, size, out, limit)
    return PartResult(
        name=part.name,
        started=started,
        seconds=round(time.monotonic() - began, 1),
        limit_s=limit,
        end=end,
        machine={"gpus": list(machine.gpus), **machine.details},
        findings=findings,
    )


def unable(part: Part, machine: Machine, size: Size) -> str:
    """Why a part cannot run here; "" if it can."""
    if size == "toy":
        if part.not_on_cpu:
            return part.not_on_cpu
    elif len(machine.gpus) < part.gpus:
        return f"expected {part.gpus} GPUs, found {len(machine.gpus)}"
    if part.package and part.package not in machine.modules:
        return f"{part.package} is not installed"
    return ""


def _not_run(part: Part, why: str, but: Sequence[str] = ()) -> list[Finding]:
    names = (f"{part.name}/{check}" for check in part.checks)
    return [Finding(check=name, status="not run", detail=why) for name in names if name not in but]


async def _in_process(
    part: Part, machine: Machine, size: Size, out: Path, limit: float
) -> tuple[tuple[Finding, ...], str]:
    """(findings, how the process failed)."""
    path = out / "findings" / f"{part.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    scratch = out / "scratch"
    scratch.mkdir(exist_ok=True)
    log = out / "logs" / f"{part.name}.log"
    setting = PartSetting(
        part=part.name,
        module=part.module,
        on_gpu=size != "toy",
        size=size,
        layers=part.layers,
        folder=str(scratch.resolve()),
        findings=str(path.resolve()),
        limit_s=limit,
        gpus=0 if size == "toy" else len(machine.gpus),
    )
    argv = [sys.executable, "-m", "megatron_scalerl.check_gpu.part", setting.to_json()]
    env = _environment(part, size, scratch.resolve() / "caches")
    done = await run_command(argv, log, limit_s=limit, env=env, grace_s=_GRACE_S)
    # the last error in its log may be that of a check that failed before
    end = "; ".join(filter(None, [done.failure(last_line), done.survived]))
    found = read_findings(path)
    declared = {f"{part.name}/{check}" for check in part.checks}
    undeclared = [finding.check for finding in found if finding.check not in declared]
    if undeclared:
        end = "; ".join(filter(None, [end, f"reported undeclared checks: {', '.join(undeclared)}"]))
    missing = _not_run(part, end or "not reported by the part", [finding.check for finding in found])
    return (*found, *missing), end


def _environment(part: Part, size: Size, caches: Path) -> dict[str, str]:
    """Environment of a part's process: offline, with kernel caches in a folder of this user.

    The default caches in the temporary directory have names that another user of the host could create first.
    """
    env = {name: value for name, value in os.environ.items() if name != "MSRL_LAYERS"}
    for variable, name in _CACHES.items():
        folder = caches / name
        folder.mkdir(parents=True, exist_ok=True)
        env[variable] = str(folder)
    env |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "WANDB_MODE": "disabled",
        # checks parse vLLM's log at this level (`programs.serving_facts`)
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning",
    }
    if part.layers:
        env["MSRL_LAYERS"] = part.layers
    if size == "toy":
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return env
