"""The command line: `megatron-scalerl check-gpu [options]`."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import megatron_scalerl
from megatron_scalerl.check_gpu.page import PAGE, counted, not_run, summary
from megatron_scalerl.check_gpu.part import Size
from megatron_scalerl.check_gpu.report import (
    NAME,
    Report,
    check_target,
    combined,
    put_aside,
    read_report,
    write_planner,
    write_report,
)
from megatron_scalerl.check_gpu.runner import Machine, PartResult, probe_machine, run_parts, unable
from megatron_scalerl.check_gpu.table import PARTS, Part, part_named

if TYPE_CHECKING:
    from rich.console import Console

FOLDERS: dict[Size, str] = {"full": "runs/gpu_check", "quick": "runs/gpu_check_quick", "toy": "runs/gpu_rehearsal"}
"""Default of --out."""
_COLORS = {"passed": "green", "measured": "cyan", "missed": "yellow", "failed": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Check correctness and speed of every component on the GPUs of this machine."
    parser.epilog = "docs/gpu.md describes the checks and how to send the report."
    parser.add_argument("--only", metavar="PART[,PART]", help="run only these parts; --list names them")
    parser.add_argument("--quick", action="store_true", help="what fits in 5 minutes: no engine, one shape")
    parser.add_argument(
        "--rehearse", action="store_true", help="run every part at toy size on the CPU, without a GPU"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help=f"default: {', '.join(FOLDERS.values())} (full, --quick, "
        "--rehearse); results of parts that an earlier call left there are kept",
    )
    parser.add_argument(
        "--planner", metavar="FILE", help="write the measured constants for megatron-scalerl plan --assumptions FILE"
    )
    parser.add_argument("--combine", nargs="+", metavar="REPORT", help="run nothing: combine several reports")
    parser.add_argument("--list", action="store_true", help="list the parts, what each does and its time limit")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the check. Returns 0 if nothing failed, else 1. Raises ValueError, RuntimeError without torch."""
    _check(options)
    if options.list:
        return _list(console)
    report, out = _combine(options) if options.combine else _run(options, console)
    write_report(report, out)
    code = _conclude(report, out, console)
    if options.planner:
        write_planner(report, Path(options.planner), console)
    return code


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that contradict each other."""
    if options.quick and options.rehearse:
        raise ValueError("check-gpu: expected one of --quick and --rehearse, found both")
    runs = [name for name in ("only", "quick", "rehearse") if getattr(options, name)]
    for alone in ("combine", "list"):
        if getattr(options, alone) and runs:
            raise ValueError(f"--{alone}: expected no --{runs[0]} with it, since nothing runs")
    if options.combine and not options.out:
        raise ValueError("--combine: expected --out DIR for the combined report, found none")
    if options.planner:
        check_target(Path(options.planner), rehearsed=options.rehearse)


def _combine(options: argparse.Namespace) -> tuple[Report, Path]:
    paths, out = [Path(name) for name in options.combine], _folder(options.out)
    try:
        return combined([(path, read_report(path)) for path in paths]), out
    except OSError as error:
        raise ValueError(f"--combine: {error.filename}: expected a report, found: {error.strerror}") from None


def _run(options: argparse.Namespace, console: Console) -> tuple[Report, Path]:
    size: Size = "toy" if options.rehearse else "quick" if options.quick else "full"
    parts = _selected(options.only, size)
    machine = probe_machine(hide_gpus=options.rehearse)
    if not machine.gpus and not options.rehearse:
        why = f"{machine.no_gpu}; --rehearse runs the parts at toy size on the CPU"
        raise ValueError(f"check-gpu: expected a GPU, found none: {why}")
    out = _folder(options.out or FOLDERS[size])
    fresh = Report(version=_version(), command=_command_line(), size=size, gpus=machine.gpus)
    report = _continued(out, fresh, console)
    able = [part for part in parts if not unable(part, machine, size)]
    seconds = sum(part.seconds(size) for part in able)
    console.print(
        f"check-gpu on {counted(machine.gpus) or 'the CPU'}: {len(able)} of {len(parts)} parts can run, in at most "
        f"{seconds / 60:.0f} minutes; report in {out}",
        highlight=False,
    )
    return asyncio.run(_each(parts, machine, report, out, console)), out


async def _each(parts: Sequence[Part], machine: Machine, report: Report, out: Path, console: Console) -> Report:
    async for result in run_parts(parts, machine, report.size, out):
        report = report.with_part(result)
        write_report(report, out)
        _show(result, console)
    return report


def _selected(only: str | None, size: Size) -> list[Part]:
    if only is not None:
        chosen = [part_named(name.strip()) for name in only.split(",") if name.strip()]
        if not chosen:
            raise ValueError(f"--only: expected names of parts, found {only!r}")
        return [part for part in PARTS if part in chosen]
    return [part for part in PARTS if size != "quick" or part.quick_s]


def _folder(name: str) -> Path:
    """The folder, created if needed. Raises ValueError for one that other users can write."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise ValueError(f"--out: {name}: expected a folder that can be written, found: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        kind = stat.filemode(found.st_mode)
        raise ValueError(
            f"--out: {name}: expected a folder of user {os.geteuid()} that nobody else can write (compiled code is "
            f"kept there), found {kind} of user {found.st_uid}"
        )
    return path


def _continued(out: Path, fresh: Report, console: Console) -> Report:
    """The report in `out` if it has the same GPUs, version and size; any other report is renamed."""
    if not (out / NAME).exists():
        return fresh
    earlier = read_report(out / NAME)
    if (earlier.gpus, earlier.version, earlier.size) != (fresh.gpus, fresh.version, fresh.size):
        console.print(f"report of another GPU, version or size renamed to {put_aside(out)}", highlight=False)
        return fresh
    commands = dict.fromkeys([*earlier.command.split(" ; "), fresh.command])
    return replace(fresh, parts=earlier.parts, command=" ; ".join(commands))


def _show(result: PartResult, console: Console) -> None:
    """One line per check with its detail; checks that did not run are grouped by reason."""
    from rich.text import Text

    for finding in result.findings:
        if finding.status == "not run":
            continue
        bound = f" ({finding.bound()})" if finding.target is not None else ""
        status = (f"{finding.status:<9}", _COLORS[finding.status])
        figure = f" {finding.check:<40} {finding.figure()}{bound}".rstrip()
        console.print(Text.assemble("  ", status, figure), highlight=False)
        if finding.detail:
            console.print(f"            {finding.detail}", highlight=False)
    for reason, checks in not_run(result.findings).items():
        names = ", ".join(check.partition("/")[2] for check in checks)
        console.print(f"  not run   {names}: {reason}", highlight=False)
    end = f", {result.end}" if result.end else ""
    console.print(f"{result.name}: {result.seconds:g} s{end}", style="bold", highlight=False)


def _conclude(report: Report, out: Path, console: Console) -> int:
    if report.size != "toy":
        console.print("components verified on this GPU (docs/gpu.md):", highlight=False)
        for row in report.rows():
            console.print(f"  {'verified    ' if row.proved else 'not verified'} {row.component}", highlight=False)
    console.print(f"{out / PAGE}: {summary(report)}", highlight=False)
    if report.failures:
        logs = f"; logs in {out / 'logs'}" if (out / "logs").is_dir() else ""
        console.print(f"failed: {', '.join(report.failures)}{logs}", style="bold red", highlight=False)
    return 1 if report.failures else 0


def _list(console: Console) -> int:
    for part in PARTS:
        quick = f", quick {part.quick_s:g} s" if part.quick_s else ""
        gpus = f", {part.gpus} GPUs" if part.gpus > 1 else ""
        console.print(f"{part.name:<16} {part.what} (at most {part.limit_s:g} s{quick}{gpus})", highlight=False)
    return 0


def _command_line() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}: {shlex.join(['megatron-scalerl', *sys.argv[1:]])}"


def _version() -> str:
    """The package's version and its checkout's commit, "+" if files were modified; else a hash of its files."""
    package = Path(megatron_scalerl.__file__).parent
    root = package.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        commit = done.stdout.strip() if (root / ".git").exists() else ""
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    return f"{megatron_scalerl.__version__} {commit or _hash(package)}"


def _hash(package: Path) -> str:
    """SHA-256 of its Python files and their names."""
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return f"sha256:{found.hexdigest()[:12]}"
