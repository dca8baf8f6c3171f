"""The Markdown page of a report: the verdict first, every figure last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_scalerl.check_gpu.findings import Finding, Status
from megatron_scalerl.check_gpu.rows import Verdict

if TYPE_CHECKING:
    from megatron_scalerl.check_gpu.report import Report
    from megatron_scalerl.check_gpu.runner import PartResult

PAGE = "gpu_report.md"
_STATUSES: tuple[Status, ...] = ("passed", "measured", "missed", "failed", "not run")


def verdict(report: Report) -> str:
    """One line: how many checks came out how."""
    found = Counter(finding.status for finding in report.findings)
    names = {"missed": "targets missed"}
    return ", ".join(f"{found[status]} {names.get(status, status)}" for status in _STATUSES)


def page(report: Report) -> str:
    """The report as Markdown."""
    where = ", ".join(f"{count} x {name}" for name, count in Counter(report.gpus).items())
    title = f"# check-gpu on {where}" if where else "# check-gpu, a rehearsal on a CPU: it proves nothing about GPUs"
    lines = [title, "", f"**{verdict(report)}.** megatron_scalerl {report.version}", ""]
    lines += [f"* {command}" for command in report.command.split(" ; ")]
    wrong = [f"{part.name}: {part.end}" for part in report.parts if part.end]
    wrong += [_told(finding) for finding in report.findings if finding.status == "failed"]
    lines += _listed("Failed", wrong)
    lines += _listed("Targets missed", [_told(finding) for finding in report.findings if finding.status == "missed"])
    if where:
        rows = map(_row, report.rows())
        lines += ["", "## What this proves", "", *_table(("component", "proved", "because"), rows)]
    ran = [_figures(finding) for finding in report.findings if finding.status != "not run"]
    lines += ["", "## Figures", "", *_table(("check", "figure", "bound", "result", "detail"), ran)]
    lines += _listed("Not run", _reasons(report.findings))
    constants = [(name, f"{value:.4g}") for name, value in report.assumptions().items()]
    if constants:
        lines += ["", "## The planner's constants", "", *_table(("constant", "measured"), constants)]
    lines += [
        "",
        "## Parts",
        "",
        *_table(("part", "started (UTC)", "seconds", "limit", *_STATUSES), [_part(part) for part in report.parts]),
    ]
    return "\n".join([*lines, "", "## Environment", "", *_machines(report.parts)]) + "\n"


def _listed(heading: str, entries: Sequence[str]) -> list[str]:
    return ["", f"## {heading}", "", *(f"* {entry}" for entry in entries)] if entries else []


def _told(finding: Finding) -> str:
    figure = f"{_figure(finding)} ({finding.bound()}), " if finding.value is not None else ""
    return f"{finding.check}: {figure}{finding.detail}"


def _reasons(findings: Iterable[Finding]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if finding.status == "not run":
            reasons.setdefault(finding.detail, []).append(finding.check)
    return [f"{reason}: {', '.join(checks)}" for reason, checks in reasons.items()]


def _machines(parts: Iterable[PartResult]) -> list[str]:
    """Each machine, or environment, once, with the parts that ran there."""
    groups: dict[str, list[str]] = {}
    for part in parts:
        m = part.machine
        packages = ", ".join(f"{name} {version}" for name, version in m.get("packages", {}).items())
        gpus = m.get("gpus") or []
        has = "no GPU"
        if gpus:
            has = f"{len(gpus)} x {gpus[0]}, driver {m.get('driver')}, torch's CUDA {m.get('cuda_version')}"
        host = f"{m.get('cpu')}, {m.get('cores')} cores; Python {m.get('python')}"
        groups.setdefault(f"{has}; {host}; {packages}", []).append(part.name)
    return [f"* {', '.join(names)}: {text}" for text, names in groups.items()]


def _part(part: PartResult) -> tuple[str, ...]:
    counts = Counter(finding.status for finding in part.findings)
    return part.name, part.started, f"{part.seconds:g}", f"{part.limit_s:g}", *(str(counts[s]) for s in _STATUSES)


def _figure(finding: Finding) -> str:
    return "" if finding.value is None else f"{finding.value:.4g} {finding.unit}".strip()


def _figures(finding: Finding) -> tuple[str, ...]:
    status = "**failed**" if finding.status == "failed" else finding.status
    return finding.check, _figure(finding), finding.bound(), status, finding.detail


def _row(row: Verdict) -> tuple[str, ...]:
    parts = [f"failed or missed: {', '.join(row.failed)}"] if row.failed else []
    parts += [f"not run: {', '.join(row.missing)}"] if row.missing else []
    return row.component, "yes" if row.proved else "no", "; ".join(parts) or "all of its checks passed"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    clean = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *clean)]
