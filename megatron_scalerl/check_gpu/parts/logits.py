"""The logit projection: parity, and the benchmark with its peers and targets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import megatron_scalerl
from megatron_scalerl.check_gpu import logit_parity
from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.setting import Setting
from megatron_scalerl.logits import chosen_backend

TARGETS = {
    ("cuda", "gemm_share_forward"): "forward GEMM share",
    ("cuda", "gemm_share"): "GEMM share",
    ("cuda", "extra_mib_forward"): "forward extra memory",
    ("cuda", "block_mib"): "block memory",
    ("cuda", "total_seconds over Liger"): "over Liger",
    ("cuda", "total_seconds over cut_cross_entropy, no filter"): "over cut-cross-entropy",
    ("cuda", "total_seconds over naive, bf16 logits"): "over naive bf16",
}
"""A target of tools/bench_logits.py by contender and figure -> the check that carries it."""
_TOY = ["--device=cpu", "--tokens=64", "--hidden=32", "--vocab=512", "--rounds=1", "--threads=1", "--peers=none"]


def run(setting: Setting, record: Recorder) -> None:
    """Report the part's checks."""
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
            record.not_run("workspace bound", "the allocator's peak is a GPU's")
    with record.guarded("benchmark"):
        _benchmark(setting, record)


def _parity(setting: Setting, record: Recorder, device: torch.device, backend: str) -> None:
    check = f"parity {backend}"
    if backend != "torch" and not setting.on_gpu:
        record.not_run(check, "Triton kernels need a GPU; the fast tests run them in Triton's interpreter")
        return
    with record.guarded(check):
        shares = logit_parity.shares_of_bounds(device, backend)
        worst = max(shares, key=lambda case: shares[case])
        record.measured(check, shares[worst], "of tolerance", at_most=1.0, detail=f"worst: {worst}", data=shares)
    if backend == ("cuda" if setting.on_gpu else "torch"):
        with record.guarded("no TF32"):
            share = logit_parity.tf32_share(device, backend)
            record.measured("no TF32", share, "of tolerance", at_most=1.0, detail="with TF32 allowed by the user")


def _benchmark(setting: Setting, record: Recorder) -> None:
    """tools/bench_logits.py as a process: its lines go to the report whole, its targets become checks."""
    tool = Path(megatron_scalerl.__file__).parent.parent / "tools" / "bench_logits.py"
    if not tool.exists():
        raise FileNotFoundError(f"{tool}: expected the repository's tools beside the package, found none")
    rounds = 2 if setting.size == "quick" else 5
    peers = "none" if setting.size == "quick" else "all"
    options = _TOY if setting.toy else ["--device=gpu", f"--rounds={rounds}", f"--peers={peers}"]
    done = subprocess.run(
        [sys.executable, str(tool), *options], stdout=subprocess.PIPE, text=True, timeout=setting.limit_s * 0.7
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    report_benchmark(record, lines, done.returncode)


def report_benchmark(record: Recorder, lines: list[dict[str, Any]], exit_code: int) -> None:
    """Findings from the benchmark's lines: one for the run, one for each target of the `cuda` backend."""
    measured = [line for line in lines if line.get("status") == "measured"]
    missing = [line for line in lines if line.get("status", "measured") != "measured"]
    ours = [line for line in measured if line["contender"].split(",")[0] in ("torch", "cuda", "triton")]
    rate = next((line["gemm_tflops"] for line in lines if "gemm_tflops" in line), None)
    text = f"exit code {exit_code}, {len(measured)} contenders measured, GEMM {rate} TFLOP/s"
    text += "".join(f"; {line['contender']}: {line['status']}" for line in missing)
    record.holds("benchmark", exit_code == 0 and bool(ours) and rate is not None, text, {"lines": lines})
    targets = {(t["contender"], t["what"]): t for line in lines for t in line.get("targets", ())}
    for key, check in TARGETS.items():
        target = targets.get(key)
        if target is None or target["found"] is None:
            record.not_run(check, _why_not(key[1], lines))
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


def _why_not(figure: str, lines: list[dict[str, Any]]) -> str:
    """Why a target was not measured: what the benchmark says of ours or of the peer."""
    status = {line["contender"]: line["status"] for line in lines if "contender" in line}
    for name in ("cuda", figure.partition(" over ")[2]):
        if name and status.get(name) != "measured":
            how = f" ({PEERS[name]})" if name in PEERS and "not installed" in status.get(name, "") else ""
            return f"{name}: {status.get(name, 'not asked for in this run')}{how}"
    return "the benchmark gave no figure"


def _unit(figure: str) -> str:
    if "_mib" in figure:
        return "MiB"
    return "of the GEMM rate" if "gemm_share" in figure else "ratio"
