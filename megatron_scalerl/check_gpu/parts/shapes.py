"""Parts shapes-*: speed of full-width shapes, and their peak memory compared with the planner's prediction.

Each shape trains in its own process (`shape_run`), so that peaks are not affected by earlier work; a rehearsal uses
one process for all. This process imports no torch and allocates nothing on the GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.part import PartSetting
from megatron_scalerl.check_gpu.programs import run_command
from megatron_scalerl.check_gpu.shape_run import SHAPES, SPARE, WARM_UP, Shape, toy
from megatron_scalerl.plan.hardware import GIB, GPUS, gpu_of_device

_LEAST_S = 30.0
"""A shape is not started with less time left: imports, build and warm-up take about that."""
_MEASURE_SHARE = 0.7
"""Share of a process's time after which it starts no further step."""
MEMORY_BOUND = 0.15
"""Tolerance of predicted over measured, around 1."""
_GRACE_S = 1.0
_END_S = 3.0
"""Reserved from the part's time to stop a shape's process."""


def run(setting: PartSetting, record: Recorder) -> None:
    """Report the part's checks."""
    end = time.monotonic() + setting.limit_s - _END_S
    folder = setting.scratch / setting.part
    folder.mkdir(parents=True, exist_ok=True)
    shapes = [toy(shape) if setting.toy else shape for shape in SHAPES.values()]
    if setting.size == "quick":
        chosen = [replace(shape, layers=2) for shape in shapes if shape.name == "8b"]
        for shape in shapes:
            if shape.name != "8b":
                not_run(shape.name, "not part of --quick", record)
        shapes = chosen
    groups = [shapes] if setting.toy else [[shape] for shape in shapes]
    for index, group in enumerate(groups):
        left = end - time.monotonic()
        if left < _LEAST_S and index:
            for shape in group:
                not_run(shape.name, f"{max(left, 0):.0f} s are left of the part's {setting.limit_s:g} s", record)
            continue
        # leaves time for later shapes if this one hangs
        limit = left if setting.toy else left / (len(groups) - index) * (1.5 if index + 1 < len(groups) else 1)
        problem = run_process(group, folder, setting, limit)
        for shape in group:
            path = folder / f"{shape.name}.json"
            report(shape, json.loads(path.read_text("utf8")) if path.exists() else None, problem, setting, record)


def run_process(shapes: Sequence[Shape], folder: Path, setting: PartSetting, limit: float) -> str:
    """Run the shapes' process for at most `limit` seconds; returns how it failed, "" if it did not."""
    for shape in shapes:
        (folder / f"{shape.name}.json").unlink(missing_ok=True)
    asked = {
        "shapes": [asdict(shape) for shape in shapes],
        "folder": str(folder),
        "on_gpu": setting.on_gpu,
        "measure_s": _MEASURE_SHARE * limit,
    }
    log = folder / f"{shapes[0].name}.log"
    env = {"MSRL_LAYERS": setting.layers} if setting.layers and setting.on_gpu else {}
    argv = [sys.executable, "-m", "megatron_scalerl.check_gpu.shape_run", json.dumps(asked)]
    done = asyncio.run(run_command(argv, log, limit_s=limit, env=os.environ | env, grace_s=_GRACE_S))
    print(done.output, file=sys.stderr, flush=True)
    return done.failure()


def not_run(name: str, why: str, record: Recorder) -> None:
    """Record both checks of a shape as not run."""
    for figure in ("MFU", "memory"):
        record.not_run(f"{name} {figure}", why)


def report(shape: Shape, found: dict[str, Any] | None, problem: str, setting: PartSetting, record: Recorder) -> None:
    """Record both checks of a shape from its process's result."""
    if found is None:
        for figure in ("MFU", "memory"):
            record.holds(f"{shape.name} {figure}", False, problem or "no result from its process")
        return
    if not found["fits"]:
        need, free = SPARE * found["predicted"]["total_bytes"] / GIB, found["free"] / GIB
        why = f"one layer needs {need:.1f} GiB (predicted, plus a tenth), {free:.1f} are free"
        not_run(shape.name, why, record)
        return
    with record.guarded(f"{shape.name} MFU"):
        _report_speed(shape, found, record)
    with record.guarded(f"{shape.name} memory"):
        said = found["predicted"]
        data = {"built_bytes": found["built"], "layers": found["layers"], "parameters": said["parameters"]}
        report_memory(record, f"{shape.name} memory", said, found["peak"], judged=setting.on_gpu, data=data)


def _report_speed(shape: Shape, found: dict[str, Any], record: Recorder) -> None:
    """Record model FLOP/s over the GPU's published bf16 peak; for other GPUs over a measured GEMM rate."""
    predicted = found["predicted"]
    step = statistics.median(found["seconds"][WARM_UP:])
    rate = found["tokens"] / step
    achieved = predicted["model_flops_per_token"] * rate
    key = gpu_of_device(found["gpu"])
    peak = GPUS[key].bf16_flops if key else None
    data: dict[str, Any] = {
        "step_seconds": step,
        "all_seconds": found["seconds"],
        "tokens": found["tokens"],
        "tokens_per_second": rate,
        "model_flops_per_second": achieved,
        "gemm_flops_per_second": found["gemm_flops"],
        "of_gemm": achieved / found["gemm_flops"],
        "of_peak": achieved / peak if peak else None,
        "layers": found["layers"],
        "kernels": "te" if found["te"] else "plain",
        "dtype": shape.dtype,
    } | planner_constants(shape, found, peak, rate)
    layers, asked = found["layers"], found["layers_asked"]
    fewer = f", {layers} layers instead of {asked}" if layers < asked else ""
    record.measured(
        f"{shape.name} MFU",
        achieved / peak if peak else achieved / found["gemm_flops"],
        f"of {GPUS[key].name}'s bf16 peak" if key else "of a measured GEMM rate",
        detail=f"{step:.3f} s per step of {found['tokens']:,} tokens, {rate:,.0f} tokens/s, {achieved / 1e12:.4g} "
        f"model TFLOP/s, {achieved / found['gemm_flops']:.3f} of a GEMM{fewer}",
        data=data,
    )


def planner_constants(shape: Shape, found: dict[str, Any], peak: float | None, rate: float) -> dict[str, float]:
    """Fields of the planner's `Assumptions` measured by this shape; empty unless on a GPU in bf16.

    `fragmentation` is peak reserved minus peak allocated memory, relative to the planner's temporary memory;
    `runtime_gib` is device memory outside the allocator.
    """
    if not found["gpu"] or shape.dtype != "bfloat16":
        return {}
    peak_memory = found["peak"]
    lost = max(0.0, peak_memory["reserved"] - peak_memory["allocated"])
    constants = {"fragmentation": lost / found["predicted"]["moving_bytes"]}
    if peak_memory["others_known"]:
        constants["runtime_gib"] = peak_memory["runtime"] / GIB
    utilization = found["predicted"]["hardware_flops_per_token"] * rate / peak if peak else 0.0
    if 0.0 < utilization <= 1.0:
        constants["dense_utilization"] = utilization
    return constants


def report_memory(
    record: Recorder,
    check: str,
    predicted: Mapping[str, Any],
    peak: Mapping[str, Any],
    *,
    judged: bool,
    data: Mapping[str, Any],
) -> None:
    """Record |predicted over measured - 1| of the peak memory.

    predicted: "total_bytes" and "terms" (bytes by name). peak: fields of a `Peak`. judged: with a bound, on a GPU.
    """
    total, found = predicted["total_bytes"], peak["total"]
    ratio = total / max(1, found)
    others = "" if peak["others_known"] else "; memory of other processes on the GPU is unknown"
    record.measured(
        check,
        abs(ratio - 1),
        "relative error",
        at_most=MEMORY_BOUND if judged else None,
        goal=True,
        detail=f"predicted {total / GIB:.3f} GiB, measured {found / GIB:.3f}, ratio {ratio:.3f}; "
        f"allocated {peak['allocated'] / GIB:.3f}, reserved {peak['reserved'] / GIB:.3f}, "
        f"beyond PyTorch {peak['runtime'] / GIB:.3f}{others}" + ("" if judged else "; no bound on a CPU"),
        data={
            "ratio": ratio,
            "predicted_bytes": total,
            "predicted_terms": predicted["terms"],
            **{f"peak_{name}": value for name, value in peak.items()},
            **data,
        },
    )
