"""The report of a check: gpu_report.json, which is rewritten after every part, and a Markdown page of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from megatron_scalerl.check_gpu.findings import Finding, Status
from megatron_scalerl.check_gpu.rows import Verdict, verdicts
from megatron_scalerl.check_gpu.runner import PartResult
from megatron_scalerl.check_gpu.setting import Size
from megatron_scalerl.check_gpu.table import PARTS, Layers, part_named
from megatron_scalerl.durable import write_durably
from megatron_scalerl.plan.assumptions import Assumptions

_CONSTANTS = {f.name for f in fields(Assumptions)}
FORMAT = 1
NAME = "gpu_report.json"
PAGE = "gpu_report.md"
_MARKS: dict[Status, str] = {"passed": "pass", "failed": "**FAIL**", "measured": "-", "not run": "not run"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that a check found. Produced by the command line, part by part."""

    version: str
    """Of the package, with the commit where there is one."""
    command: str
    size: Size
    """toy means a rehearsal on a CPU, which proves nothing about a GPU."""
    parts: tuple[PartResult, ...] = ()

    @property
    def findings(self) -> list[Finding]:
        """Of all parts, in order."""
        return [finding for part in self.parts for finding in part.findings]

    @property
    def gpu(self) -> str:
        """Name of the GPU, "" for a rehearsal."""
        names = {name for part in self.parts for name in part.machine.get("gpus", ())}
        return "" if self.size == "toy" else ", ".join(sorted(names))

    @property
    def failures(self) -> list[str]:
        """What went wrong: failed checks, and parts that did not end well."""
        failed = [finding.check for finding in self.findings if finding.status == "failed"]
        return [*(part.name for part in self.parts if part.end), *failed]

    def with_part(self, result: PartResult) -> "Report":
        """The report with a part added, or replaced, in the order of the table."""
        order = [part.name for part in PARTS]
        parts = [part for part in self.parts if part.name != result.name] + [result]
        return replace(self, parts=tuple(sorted(parts, key=lambda part: order.index(part.name))))

    def rows(self) -> list[Verdict]:
        """The rows of docs/gpu.md's table; a rehearsal proves none."""
        status = {} if self.size == "toy" else {finding.check: finding.status for finding in self.findings}
        return verdicts(status)

    @property
    def layers(self) -> Layers | None:
        """Of the trainer whose shapes were measured: Transformer Engine's where they were, None if none was."""
        measured = {part_named(part.name).layers for part in self.parts if _has_constants(part.findings)}
        return "te" if "te" in measured else "plain" if "plain" in measured else None

    def assumptions(self) -> dict[str, float]:
        """Measured constants of the planner for `layers`, by field: the median over the findings that have one.

        Memory that a plan has to leave free is taken at its largest.
        """
        values: dict[str, list[float]] = {}
        for part in self.parts:
            if part_named(part.name).layers not in (None, self.layers):
                continue
            for finding in part.findings:
                for key in _CONSTANTS & set(finding.data) if finding.status != "failed" else ():
                    values.setdefault(key, []).append(float(finding.data[key]))
        largest = ("runtime_gib", "fragmentation", "engine_overhead_gib")
        return {key: max(v) if key in largest else statistics.median(v) for key, v in values.items()}


def _has_constants(findings: Iterable[Finding]) -> bool:
    return any(_CONSTANTS & set(finding.data) and finding.status != "failed" for finding in findings)


def write_report(report: Report, out: Path) -> None:
    """Write both files into `out`, each whole or not at all."""
    body = {
        "format": FORMAT,
        "version": report.version,
        "command": report.command,
        "size": report.size,
        "gpu": report.gpu,
        "rows": [asdict(row) for row in report.rows()],
        "assumptions": report.assumptions(),
        "parts": [part.to_json() for part in report.parts],
    }
    write_durably(out / NAME, (json.dumps(body, indent=1, allow_nan=False) + "\n").encode())
    write_durably(out / PAGE, page(report).encode())


def read_report(path: Path) -> Report:
    """Raises ValueError for a file that is no report of this format, OSError for one that cannot be read."""
    try:
        body = json.loads(path.read_text(encoding="utf8"))
        found = body["format"]
        if found != FORMAT:
            raise ValueError(f"{path}: format: expected {FORMAT}, found {found}")
        parts = tuple(PartResult.from_json(part) for part in body["parts"])
        return Report(version=body["version"], command=body["command"], size=body["size"], parts=parts)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected a report of check-gpu, found {type(error).__name__}: {error}") from None


def combined(reports: Sequence[tuple[Path, Report]]) -> Report:
    """One report from several on the same kind of GPU; of a part that occurs twice the later one.

    Raises ValueError for reports of different GPUs or versions, and for a rehearsal among others.
    """
    (first_path, first), *others = reports
    result = first
    for path, report in others:
        for name in ("gpu", "version", "size"):
            if getattr(report, name) != getattr(first, name) and not (name == "gpu" and not report.parts):
                raise ValueError(
                    f"{path}: {name}: expected {getattr(first, name)!r} as in {first_path}, "
                    f"found {getattr(report, name)!r}"
                )
        for part in report.parts:
            earlier = next((known for known in result.parts if known.name == part.name), None)
            if earlier is None or earlier.started <= part.started:
                result = result.with_part(part)
    commands = dict.fromkeys(report.command for _, report in reports)
    return replace(result, command=" ; ".join(commands))


def page(report: Report) -> str:
    """The report as Markdown."""
    where = report.gpu or "a CPU: a rehearsal, which proves nothing about GPUs"
    lines = [f"# check-gpu on {where}", "", f"`{report.command}`, megatron_scalerl {report.version}", ""]
    lines += _machines(report.parts)
    lines += ["## Parts", "", *_table(("part", "started (UTC)", "seconds", "limit", "passed", "failed", "not run"),
                                      [_part_row(part) for part in report.parts])]  # fmt: skip
    lines += [f"* {part.name}: {part.end}" for part in report.parts if part.end]
    lines += ["", "## Figures", "", *_table(("check", "figure", "target", "result", "detail"),
                                            [_finding_row(finding) for finding in report.findings])]  # fmt: skip
    if report.size != "toy":
        rows = map(_row_row, report.rows())
        lines += ["", "## What this proves", "", *_table(("component", "proved", "because"), rows)]
    if report.assumptions():
        constants = [(name, f"{value:.4g}") for name, value in report.assumptions().items()]
        lines += ["", "## The planner's constants", "", *_table(("constant", "measured"), constants)]
    return "\n".join(lines) + "\n"


def _machines(parts: Iterable[PartResult]) -> list[str]:
    """Each machine, or environment, once, with the parts that ran there."""
    groups: dict[str, list[str]] = {}
    for part in parts:
        m = part.machine
        packages = ", ".join(f"{name} {version}" for name, version in m.get("packages", {}).items())
        gpus = m.get("gpus") or []
        has = f"{len(gpus)} x {gpus[0]}, driver {m.get('driver')}, CUDA {m.get('cuda_version')}" if gpus else "no GPU"
        text = f"{has}; {m.get('cpu')}, {m.get('cores')} cores; Python {m.get('python')}; {packages}"
        groups.setdefault(text, []).append(part.name)
    return [line for text, names in groups.items() for line in (f"* {', '.join(names)}: {text}", "")]


def _part_row(part: PartResult) -> tuple[str, ...]:
    counts = [sum(finding.status in wanted for finding in part.findings)
              for wanted in (("passed", "measured"), ("failed",), ("not run",))]  # fmt: skip
    return part.name, part.started, f"{part.seconds:g}", f"{part.limit_s:g}", *map(str, counts)


def _finding_row(finding: Finding) -> tuple[str, ...]:
    figure = "" if finding.value is None else f"{finding.value:.4g} {finding.unit}".strip()
    return finding.check, figure, finding.bound(), _MARKS[finding.status], finding.detail


def _row_row(row: Verdict) -> tuple[str, ...]:
    parts = [f"failed: {', '.join(row.failed)}"] if row.failed else []
    parts += [f"not run: {', '.join(row.missing)}"] if row.missing else []
    return row.component, "yes" if row.proved else "no", "; ".join(parts) or "all of its checks passed"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    clean = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *clean)]


def summary(report: Report) -> Mapping[str, int]:
    """How many findings have each status."""
    found = [finding.status for finding in report.findings]
    return {status: found.count(status) for status in _MARKS}
