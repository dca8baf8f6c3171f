"""The report of a check: gpu_report.json, which is rewritten after every part."""

from __future__ import annotations

import getpass
import json
import socket
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import megatron_scalerl
from megatron_scalerl.check_gpu import page
from megatron_scalerl.check_gpu.findings import Finding
from megatron_scalerl.check_gpu.rows import Verdict, verdicts
from megatron_scalerl.check_gpu.runner import PartResult
from megatron_scalerl.check_gpu.setting import Size
from megatron_scalerl.check_gpu.table import PARTS, Layers, part_named
from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.plan.assumptions import Assumptions

FORMAT = 1
NAME = "gpu_report.json"
_CONSTANTS = {f.name for f in fields(Assumptions)}
_LARGEST = ("runtime_gib", "fragmentation", "engine_overhead_gib")
"""Memory that a plan has to leave free."""
_UNUSABLE = ("failed", "not run")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that a check found. Produced by the command line, part by part."""

    version: str
    """Of the package, with the commit where there is one."""
    command: str
    """With its date; several are separated by " ; "."""
    size: Size
    """toy means a rehearsal on a CPU, which proves nothing about a GPU."""
    gpus: tuple[str, ...] = ()
    """Names of the visible GPUs; () in a rehearsal."""
    parts: tuple[PartResult, ...] = ()

    @property
    def findings(self) -> list[Finding]:
        """Of all parts, in order."""
        return [finding for part in self.parts for finding in part.findings]

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
                for key in _constants_of(finding):
                    values.setdefault(key, []).append(float(finding.data[key]))
        return {key: max(v) if key in _LARGEST else statistics.median(v) for key, v in values.items()}


def _constants_of(finding: Finding) -> list[str]:
    if finding.status in _UNUSABLE:
        return []
    return [key for key, value in finding.data.items() if key in _CONSTANTS and value is not None]


def _has_constants(findings: Iterable[Finding]) -> bool:
    return any(_constants_of(finding) for finding in findings)


def write_report(report: Report, out: Path) -> None:
    """Write JSON and Markdown into `out`, each whole or not at all, without names of host, user and folders above."""
    body = {
        "format": FORMAT,
        "version": report.version,
        "command": report.command,
        "size": report.size,
        "gpus": report.gpus,
        "rows": [asdict(row) for row in report.rows()],
        "assumptions": report.assumptions(),
        "parts": [part.to_json() for part in report.parts],
    }
    for name, text in ((NAME, json.dumps(body, indent=1, allow_nan=False) + "\n"), (page.PAGE, page.page(report))):
        write_durably(out / name, _anonymous(text).encode())


def _anonymous(text: str) -> str:
    """Paths of the checkout and the home folder in short; host and user by those words."""
    root = str(Path(megatron_scalerl.__file__).parent.parent)
    words = {f"{root}/": "", f"{Path.home()}/": "~/", socket.gethostname(): "<host>", f"/{_user()}/": "/<user>/"}
    for found, shown in words.items():
        text = text.replace(found, shown) if len(found) > 3 else text
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name for this number
        return ""


def put_aside(out: Path) -> Path:
    """Rename a folder's report and page, which another is to replace; the new name of the report."""
    number = 1
    while (out / f"gpu_report.{number}.json").exists():
        number += 1
    if (out / page.PAGE).exists():
        (out / page.PAGE).rename(out / f"gpu_report.{number}.md")
    return (out / NAME).rename(out / f"gpu_report.{number}.json")


def read_report(path: Path) -> Report:
    """Raises ValueError for a file that is no report of this format, OSError for one that cannot be read."""
    try:
        body = json.loads(path.read_text(encoding="utf8"))
        found = body["format"]
        if found != FORMAT:
            raise ValueError(f"{path}: format: expected {FORMAT}, found {found}")
        parts = tuple(PartResult.from_json(part) for part in body["parts"])
        known = {part.name for part in PARTS}
        for part in parts:
            if part.name not in known:
                raise ValueError(f"{path}: parts: expected some of {', '.join(sorted(known))}, found {part.name!r}")
        return Report(
            version=body["version"], command=body["command"], size=body["size"], gpus=tuple(body["gpus"]), parts=parts
        )
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected a report of check-gpu, found {type(error).__name__}: {error}") from None


def combined(reports: Sequence[tuple[Path, Report]]) -> Report:
    """One report from several on the same kind of GPU; of a part that occurs twice the later one.

    Raises ValueError for reports of different GPUs, versions or sizes.
    """
    (first_path, first), *others = reports
    result = first
    for path, report in others:
        for name in ("size", "version", "gpus"):
            expected, found = (_comparable(getattr(r, name)) for r in (first, report))
            if found != expected:
                raise ValueError(f"{path}: {name}: expected {expected} as in {first_path}, found {found}")
        for part in report.parts:
            earlier = next((known for known in result.parts if known.name == part.name), None)
            if earlier is None or earlier.started <= part.started:
                result = result.with_part(part)
    commands = dict.fromkeys(report.command for _, report in reports)
    return replace(result, command=" ; ".join(commands))


def _comparable(value: str | tuple[str, ...]) -> str:
    """Of GPUs the kinds: one machine may have more of them than another."""
    return value if isinstance(value, str) else ", ".join(sorted(set(value))) or "no GPU"
