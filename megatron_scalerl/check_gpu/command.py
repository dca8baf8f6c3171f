"""The command line of the check: `megatron-scalerl check-gpu [options]`."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron_scalerl
from megatron_scalerl.check_gpu.report import NAME, PAGE, Report, combined, read_report, summary, write_report
from megatron_scalerl.check_gpu.runner import Machine, PartResult, probe_machine, run_parts
from megatron_scalerl.check_gpu.setting import Size
from megatron_scalerl.check_gpu.table import PARTS, Part, part_named

if TYPE_CHECKING:
    from rich.console import Console

_COLORS = {"passed": "green", "measured": "cyan", "failed": "bold red", "not run": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--only", metavar="PART[,PART]", help="run these parts; --list names them")
    parser.add_argument("--quick", action="store_true", help="what fits into 5 minutes: no engine, one shape")
    parser.add_argument("--rehearse", action="store_true", help="every part at toy size on the CPU; proves no GPU")
    parser.add_argument("--out", default="runs/gpu_check", metavar="DIR", help="default: runs/gpu_check; parts that "
                        "an earlier call reported there are kept")  # fmt: skip
    parser.add_argument("--planner", metavar="FILE", help="write the measured constants for plan.py --assumptions")
    parser.add_argument("--combine", nargs="+", metavar="REPORT", help="run nothing: make one report of several")
    parser.add_argument("--list", action="store_true", help="the parts, what each does and its time limit")


def check_gpu(options: argparse.Namespace, console: Console) -> int:
    """Run the check; 0 if nothing failed, else 1. Raises ValueError for bad input, RuntimeError without torch."""
    if options.list:
        return _list(console)
    if options.quick and options.rehearse:
        raise ValueError("check-gpu: expected one of --quick and --rehearse, found both")
    out = Path(options.out)
    if options.combine:
        paths = [Path(name) for name in options.combine]
        report = combined([(path, read_report(path)) for path in paths])
        out.mkdir(parents=True, exist_ok=True)
    else:
        report = _run(options, out, console)
    write_report(report, out)
    if options.planner:
        _write_planner(report, Path(options.planner), console)
    return _conclude(report, out, console)


def _run(options: argparse.Namespace, out: Path, console: Console) -> Report:
    size: Size = "toy" if options.rehearse else "quick" if options.quick else "full"
    parts = _selected(options.only, size)
    machine = probe_machine(hide_gpus=options.rehearse)
    if not machine.gpus and not options.rehearse:
        why = f"{machine.no_gpu}; --rehearse runs the parts at toy size on the CPU"
        raise ValueError(f"check-gpu: expected a GPU, found none: {why}")
    report = _started(out, size, machine)
    limit = sum({"toy": p.rehearsal_s, "quick": p.quick_s or 0.0, "full": p.limit_s}[size] for p in parts)
    where = ", ".join(machine.gpus) or f"the CPU of this machine ({machine.no_gpu})"
    console.print(f"check-gpu: {len(parts)} parts on {where}, at most {limit / 60:.0f} minutes", highlight=False)
    return asyncio.run(_each(parts, machine, report, out, console))


async def _each(parts: Sequence[Part], machine: Machine, report: Report, out: Path, console: Console) -> Report:
    async for result in run_parts(parts, machine, report.size, out):
        report = report.with_part(result)
        write_report(report, out)
        _show(result, console)
    return report


def _selected(only: str | None, size: Size) -> list[Part]:
    if only:
        chosen = [part_named(name.strip()) for name in only.split(",") if name.strip()]
        if not chosen:
            raise ValueError(f"--only: expected names of parts, found {only!r}")
        return [part for part in PARTS if part in chosen]
    return [part for part in PARTS if size != "quick" or part.quick_s]


def _started(out: Path, size: Size, machine: Machine) -> Report:
    """An empty report, or the one in `out` that goes on."""
    fresh = Report(version=_version(), command=_command_line(), size=size)
    out.mkdir(parents=True, exist_ok=True)
    if not (out / NAME).exists():
        return fresh
    earlier = read_report(out / NAME)
    gpu = "" if size == "toy" else ", ".join(sorted(set(machine.gpus)))
    for name, found, wanted in (("gpu", earlier.gpu, gpu), ("version", earlier.version, fresh.version),
                                ("size", earlier.size, size)):  # fmt: skip
        if earlier.parts and found != wanted:
            raise ValueError(f"{out / NAME}: {name}: expected {wanted!r}, found {found!r}; choose another --out")
    commands = dict.fromkeys([*earlier.command.split(" ; "), fresh.command])
    return replace(fresh, parts=earlier.parts, command=" ; ".join(commands))


def _show(result: PartResult, console: Console) -> None:
    """One line a check, with its detail; a part that did not run at all is one line."""
    reasons = {finding.detail for finding in result.findings}
    if len(reasons) == 1 and all(finding.status == "not run" for finding in result.findings):
        console.print(f"{result.name}: not run: {reasons.pop()}", style="bold", highlight=False, markup=False)
        return
    for finding in result.findings:
        figure = "" if finding.value is None else f"{finding.value:.4g} {finding.unit}".strip()
        bound = f" ({finding.bound()})" if finding.target is not None else ""
        status = f"[{_COLORS[finding.status]}]{finding.status:<9}[/]"
        console.print(f"  {status} {finding.check:<40} {figure}{bound}".rstrip(), highlight=False)
        if finding.detail:
            console.print(f"            {finding.detail}", style="dim", highlight=False, markup=False)
    end = f", {result.end}" if result.end else ""
    console.print(f"{result.name}: {result.seconds:g} s{end}", style="bold", highlight=False, markup=False)


def _conclude(report: Report, out: Path, console: Console) -> int:
    if report.size != "toy":
        console.print("rows of docs/gpu.md that this proves:", highlight=False)
        for row in report.rows():
            console.print(f"  {'proved    ' if row.proved else 'not proved'} {row.component}", highlight=False)
    counts = ", ".join(f"{count} {status}" for status, count in summary(report).items())
    console.print(f"{out / PAGE}: {counts}", highlight=False)
    if report.failures:
        failed = f"failed: {', '.join(report.failures)}; logs in {out / 'logs'}"
        console.print(failed, style="bold red", highlight=False)
    return 1 if report.failures else 0


def _write_planner(report: Report, path: Path, console: Console) -> None:
    from megatron_scalerl.plan.assumptions_file import Measured, write_assumptions

    values = report.assumptions()
    if not values or not report.gpu:
        raise ValueError(f"--planner: expected figures measured on a GPU, found none; {path} was not written")
    source = f"check-gpu on {report.gpu}, {report.parts[-1].started[:10]}"
    measured = {key: Measured(value=value, source=source) for key, value in values.items()}
    layers: Any = {"te": "fused"}.get(report.layers or "", report.layers)
    write_assumptions(path, measured, gpu=report.gpu, layers=layers)
    console.print(f"{path}: {', '.join(values)}", highlight=False)


def _list(console: Console) -> int:
    for part in PARTS:
        quick = f", quick {part.quick_s:g} s" if part.quick_s else ""
        gpus = f", {part.gpus} GPUs" if part.gpus > 1 else ""
        console.print(f"{part.name:<16} {part.what} (at most {part.limit_s:g} s{quick}{gpus})", highlight=False)
    return 0


def _command_line() -> str:
    return shlex.join(["megatron-scalerl", *sys.argv[1:]]) + f" ({datetime.now(UTC):%Y-%m-%d})"


def _version() -> str:
    """Of the package, and the commit of its checkout, with a plus where files were changed."""
    root = Path(megatron_scalerl.__file__).parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return megatron_scalerl.__version__
    return f"{megatron_scalerl.__version__} {done.stdout.strip()}".strip()
