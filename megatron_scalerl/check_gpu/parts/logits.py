"""Part logits: parity of the logit projection, and its benchmark against peers and targets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any, Literal

import torch

import megatron_scalerl
from megatron_scalerl.check_gpu import logit_parity
from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.part import Deadline, PartSetting
from megatron_scalerl.check_gpu.programs import run_command
from megatron_scalerl.logits import chosen_backend
from megatron_scalerl.logits.choice import BACKENDS
from megatron_scalerl.logits.contenders import contenders_on
from megatron_scalerl.logits.targets import targets

TARGETS = {
    ("cuda", "gemm_share_forward"): "forward GEMM share",
    ("cuda", "gemm_share"): "GEMM share",
    ("cuda", "extra_mib_forward"): "forward extra memory",
    ("cuda", "block_mib"): "block memory",
    ("cuda", "total_seconds over Liger"): "over Liger",
    ("cuda", "total_seconds over cut_cross_entropy, no filter"): "over cut-cross-entropy",
    ("cuda", "total_seconds over naive, bf16 logits"): "over naive bf16",
}
"""(contender, figure) of a target in tools/bench_logits.py -> its check."""
_TOY = ["--device=cpu", "--tokens=64", "--hidden=32", "--vocab=512", "--rounds=1", "--threads=1", "--peers=none"]
_PATIENCE_S = 30.0
"""Time limit without output of one contender, which covers imports, CUDA and kernel compilation."""


def run(setting: PartSetting, record: Recorder) -> None:
    """Report the part's checks."""
    deadline = Deadline(setting.limit_s)
    device = torch.accelerator.current_accelerator() if setting.on_gpu else torch.device("cpu")
    assert device is not None, "the runner found a GPU"
    for backend in ("torch", "cuda", "triton"):
        _parity(setting, record, device, backend)
    expected = "cuda" if setting.on_gpu else "torch"
    with record.guarded("chosen backend"):
        found = chosen_backend(device, torch.bfloat16), chosen_backend(device, torch.float64)
        record.holds("chosen backend", found == (expected, "torch"), f"bf16 {found[0]}, fp64 {found[1]}")
    with record.guarded("workspace bound"):
        if setting.on_gpu:
            share = max(logit_parity.memory_over_bound(device, name) for name in ("cuda", "triton"))
            record.measured("workspace bound", share, "of tolerance", at_most=1.0)
        else:
            record.not_run("workspace bound", "requires the peak memory of a GPU's allocator")
    with record.guarded("benchmark"):
        _benchmark(setting, record, deadline)


def _parity(setting: PartSetting, record: Recorder, device: torch.device, backend: str) -> None:
    check = f"parity {backend}"
    if backend != "torch" and not setting.on_gpu:
        record.not_run(check, "Triton kernels require a GPU; the fast tests run them in Triton's interpreter")
        return
    with record.guarded(check):
        shares = logit_parity.shares_of_bounds(device, backend)
        worst = max(shares, key=lambda case: shares[case])
        record.measured(check, shares[worst], "of tolerance", at_most=1.0, detail=f"worst: {worst}", data=shares)
    if backend == ("cuda" if setting.on_gpu else "torch"):
        with record.guarded("no TF32"):
            share = logit_parity.tf32_share(device, backend)
            record.measured("no TF32", share, "of tolerance", at_most=1.0, detail="with TF32 enabled by the user")


def _benchmark(setting: PartSetting, record: Recorder, deadline: Deadline) -> None:
    """Run tools/bench_logits.py: its JSON lines go into the report, its targets become checks.

    It has the remaining time of the part; lines written before it is stopped count.
    """
    tool = Path(megatron_scalerl.__file__).parent.parent / "tools" / "bench_logits.py"
    if not tool.exists():
        raise FileNotFoundError(f"{tool}: expected the repository's tools beside the package, found none")
    rounds = 2 if setting.size == "quick" else 5
    peers = "none" if setting.size == "quick" else "all"
    options = _TOY if setting.toy else ["--device=gpu", f"--rounds={rounds}", f"--peers={peers}"]
    output = setting.scratch / "bench_logits.log"
    argv = [sys.executable, str(tool), *options, f"--patience={_PATIENCE_S:g}"]
    done = asyncio.run(run_command(argv, output, limit_s=deadline.left(), grace_s=1.0))
    print(done.output, file=sys.stderr, flush=True)
    ours = ours_on("gpu" if setting.on_gpu else "cpu")
    report_benchmark(record, whole_lines(done.output), done.failure(), ours)


def ours_on(device: Literal["cpu", "gpu"]) -> list[str]:
    """This project's contenders."""
    names = [contender.name for contender in contenders_on(device)]
    return [name for name in names if name.partition(",")[0] in BACKENDS]


def whole_lines(output: str) -> list[dict[str, Any]]:
    """The benchmark's JSON lines; the last one may be truncated."""
    found = []
    for line in output.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(line[max(0, line.find("{")) :])  # a warning may precede it
            if isinstance(value, dict):
                found.append(value)
    return found


def report_benchmark(record: Recorder, lines: list[dict[str, Any]], why: str, ours: list[str]) -> None:
    """Record findings from the benchmark's lines: one for the run, one for each target of the `cuda` backend.

    why: how the benchmark failed, "" if it did not. ours: contenders that all have to be measured.
    """
    status = {line["contender"]: line["status"] for line in lines if "contender" in line}
    rate = next((line["gemm_tflops"] for line in lines if "gemm_tflops" in line), None)
    measured = [name for name, result in status.items() if result == "measured"]
    missing = {name: result for name, result in status.items() if result != "measured"}
    missing |= {name: "no line" for name in ours if name not in status}
    ok = not why and rate is not None and all(name in measured for name in ours)
    text = "; ".join(
        [
            *filter(None, [why]),
            f"{len(measured)} contenders measured, GEMM {rate} TFLOP/s",
            *(f"{name}: {result}" for name, result in sorted(missing.items(), key=lambda pair: pair[0] not in ours)),
        ]
    )
    record.holds("benchmark", ok, text, {"lines": lines})
    found = [line for line in lines if "contender" in line]
    judged = {(target["contender"], target["what"]): target for target in targets(found, "gpu")}
    for key, check in TARGETS.items():
        target = judged[key]
        if target["found"] is None:
            record.not_run(check, _why_not(key[1], status, why))
            continue
        sign, bound = target["target"].split()
        record.measured(
            check,
            float(target["found"]),
            _unit(key[1]),
            at_most=float(bound) if sign == "<=" else None,
            at_least=float(bound) if sign == ">=" else None,
            goal=True,
            detail=f"{key[0]}: {key[1]}",
        )


PEERS = {"Liger": "pip install liger-kernel", "cut_cross_entropy, no filter": "pip install cut-cross-entropy"}


def _why_not(figure: str, status: dict[str, str], why: str) -> str:
    """Why a target was not measured: the benchmark's status of our backend or of the peer."""
    for name in ("cuda", figure.partition(" over ")[2]):
        if name and status.get(name) != "measured":
            how = f" ({PEERS[name]})" if name in PEERS and "not installed" in status.get(name, "") else ""
            return f"{name}: {status.get(name, why or 'not part of this run')}{how}"
    return "not reported by the benchmark"


def _unit(figure: str) -> str:
    if "_mib" in figure:
        return "MiB"
    return "of the GEMM rate" if "gemm_share" in figure else "ratio"
