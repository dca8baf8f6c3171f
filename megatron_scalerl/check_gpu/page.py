"""The Markdown page of a report: summary and failures first, all figures after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_scalerl.check_gpu.findings import Finding, Status
from megatron_scalerl.check_gpu.table import Verdict

if TYPE_CHECKING:
    from megatron_scalerl.check_gpu.report import Report
    from megatron_scalerl.check_gpu.runner import PartResult

PAGE = "gpu_report.md"
_STATUSES: tuple[Status, ...] = ("passed", "measured", "missed", "failed", "not run")


def summary(report: Report) -> str:
    """One line: the number of checks by result."""
    found = Counter(finding.status for finding in report.findings)
    return ", ".join(f"{found[s]} {'targets missed' if s == 'missed' else s}" for s in _STATUSES)


def counted(gpus: Iterable[str]) -> str:
    """GPU names with their number: "8 x NVIDIA H100"."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpus).items())


def not_run(findings: Iterable[Finding]) -> Mapping[str, list[str]]:
    """Reason -> the checks (PART/NAME) that were not run for it."""
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if finding.status == "not run":
            reasons.setdefault(finding.detail, []).append(finding.check)
    return reasons


def page(report: Report) -> str:
    """The report as Markdown."""
    gpus = counted(report.gpus)
    lines = [f"# check-gpu on {gpus}" if gpus else "# check-gpu: rehearsal on a CPU, verifies nothing on a GPU", ""]
    lines += [f"**{summary(report)}.** megatron_scalerl {report.version}", ""]
    lines += [f"* {command}" for command in report.command.split(" ; ")]
    failed = [f"{part.name}: {part.end}" for part in report.parts if part.end]
    failed += [_line(finding) for finding in report.findings if finding.status == "failed"]
    lines += _list("Failed", failed)
    lines += _list("Targets missed", [_line(finding) for finding in report.findings if finding.status == "missed"])
    if gpus:
        lines += _table("What this verifies", ("component", "verified", "because"), map(_row, report.rows()))
    ran = [_figures(finding) for finding in report.findings if finding.status != "not run"]
    lines += _table("Figures", ("check", "figure", "bound", "result", "detail"), ran)
    lines += _list("Not run", [f"{', '.join(checks)}: {why}" for why, checks in not_run(report.findings).items()])
    constants = [(name, f"{value:.4g}") for name, value in report.assumptions().items()]
    if constants:
        lines += _table("Constants for the planner", ("constant", "measured"), constants)
    columns = ("part", "started (UTC)", "seconds", "time limit", *_STATUSES)
    lines += _table("Parts", columns, map(_part, report.parts))
    return "\n".join([*lines, *_list("Environment", _machines(report.parts))]) + "\n"


def _list(heading: str, entries: Sequence[str]) -> list[str]:
    return ["", f"## {heading}", "", *(f"* {entry}" for entry in entries)] if entries else []


def _table(heading: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    clean = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = (f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *clean))
    return ["", f"## {heading}", "", *lines]


def _line(finding: Finding) -> str:
    figure = f"{finding.figure()} ({finding.bound()}), " if finding.value is not None else ""
    return f"{finding.check}: {figure}{finding.detail}"


def _machines(parts: Iterable[PartResult]) -> list[str]:
    """Each machine, or environment, once, with the parts that ran there."""
    groups: dict[str, list[str]] = {}
    for part in parts:
        m = part.machine
        packages = ", ".join(f"{name} {version}" for name, version in m.get("packages", {}).items())
        gpus = counted(m.get("gpus") or [])
        device = f"{gpus}, driver {m.get('driver')}, torch's CUDA {m.get('cuda_version')}" if gpus else "no GPU"
        host = f"{m.get('cpu')}, {m.get('cores')} cores; Python {m.get('python')}"
        groups.setdefault(f"{device}; {host}; {packages}", []).append(part.name)
    return [f"{', '.join(names)}: {text}" for text, names in groups.items()]


def _part(part: PartResult) -> tuple[str, ...]:
    counts = Counter(finding.status for finding in part.findings)
    return part.name, part.started, f"{part.seconds:g}", f"{part.limit_s:g}", *(str(counts[s]) for s in _STATUSES)


def _figures(finding: Finding) -> tuple[str, ...]:
    status = "**failed**" if finding.status == "failed" else finding.status
    return finding.check, finding.figure(), finding.bound(), status, finding.detail


def _row(row: Verdict) -> tuple[str, ...]:
    reasons = [f"failed or missed: {', '.join(row.failed)}"] if row.failed else []
    reasons += [f"not run: {', '.join(row.missing)}"] if row.missing else []
    return row.component, "yes" if row.proved else "no", "; ".join(reasons) or "all of its checks passed"
