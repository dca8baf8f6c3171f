"""`--planner FILE`: the constants that a check measured, for `plan --assumptions FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_scalerl.check_gpu.report import Report
from megatron_scalerl.plan.assumptions import described
from megatron_scalerl.plan.assumptions_file import Measured, write_assumptions
from megatron_scalerl.plan.hardware import GPUS, gpu_of_device

if TYPE_CHECKING:
    from rich.console import Console

_KNOWN = {field.name for field in described()}


def check_target(path: Path, *, rehearsed: bool) -> None:
    """Raises ValueError, before anything runs, for a file that could not be written at the end."""
    if rehearsed:
        raise ValueError("--planner: expected figures measured on a GPU, found --rehearse")
    if not path.parent.is_dir():
        raise ValueError(f"--planner: {path}: expected its folder to exist, found none")


def write_planner(report: Report, path: Path, console: Console) -> None:
    """Write the constants. Raises ValueError where there are none, and for a GPU that the planner does not know."""
    values = {key: value for key, value in report.assumptions().items() if value >= 0 and key in _KNOWN}
    if not values or not report.gpus:
        raise ValueError(f"--planner: expected measured constants in the report, found none; {path} was not written")
    [gpu, *others] = sorted(set(report.gpus))
    if others or gpu_of_device(gpu) is None:
        known = ", ".join(sorted(GPUS))
        found = ", ".join([gpu, *others])
        raise ValueError(f"--planner: expected one GPU that the planner knows ({known}), found {found}")
    source = f"check-gpu, megatron_scalerl {report.version}, {report.parts[-1].started[:10]}"
    measured = {key: Measured(value=value, source=source) for key, value in values.items()}
    write_assumptions(path, measured, gpu=gpu, layers=report.layers)
    console.print(f"{path}: {', '.join(values)}", highlight=False)
