"""The report of a check: gpu_report.json, rewritten after every part, and the planner's constants in it."""

from __future__ import annotations

import getpass
import json
import socket
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import megatron_scalerl
from megatron_scalerl.check_gpu import page
from megatron_scalerl.check_gpu.findings import Finding
from megatron_scalerl.check_gpu.part import Size
from megatron_scalerl.check_gpu.runner import PartResult
from megatron_scalerl.check_gpu.table import PARTS, Layers, Verdict, part_named, verdicts
from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.plan.assumptions import OLD_NAMES, Assumptions
from megatron_scalerl.plan.assumptions_file import Measured, write_assumptions
from megatron_scalerl.plan.hardware import GPUS, gpu_of_device

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 1
NAME = "gpu_report.json"
_CONSTANTS = {f.name for f in fields(Assumptions)}
_LARGEST = ("runtime_gib", "fragmentation", "engine_overhead_gib")
"""Memory reserves of a plan: the largest measurement counts."""
_UNUSABLE = ("failed", "not run")


@dataclass(frozen=True, kw_only=True)
class Report:
    """All results of a check. Produced by the command line, part by part."""

    version: str
    """Of the package, with the commit if there is one."""
    command: str
    """Command line with its date; several are separated by " ; "."""
    size: Size
    """toy: a rehearsal on a CPU, which verifies nothing on a GPU."""
    gpus: tuple[str, ...] = ()
    """Names of the visible GPUs; () in a rehearsal."""
    parts: tuple[PartResult, ...] = ()

    @property
    def findings(self) -> list[Finding]:
        """Of all parts, in order."""
        return [finding for part in self.parts for finding in part.findings]

    @property
    def failures(self) -> list[str]:
        """Parts whose process failed, then failed checks."""
        failed = [finding.check for finding in self.findings if finding.status == "failed"]
        return [*(part.name for part in self.parts if part.end), *failed]

    def with_part(self, result: PartResult) -> "Report":
        """A report with the part added or replaced, in the order of the table."""
        order = [part.name for part in PARTS]
        parts = [part for part in self.parts if part.name != result.name] + [result]
        return replace(self, parts=tuple(sorted(parts, key=lambda part: order.index(part.name))))

    def rows(self) -> list[Verdict]:
        """The components of docs/gpu.md; a rehearsal verifies none."""
        status = {} if self.size == "toy" else {finding.check: finding.status for finding in self.findings}
        return verdicts(status)

    @property
    def layers(self) -> Layers | None:
        """Layers of the measured trainer, te if both kinds were measured; None if no constants were measured."""
        measured = {part_named(p.name).layers for p in self.parts if any(map(_constants_of, p.findings))}
        return "te" if "te" in measured else "plain" if "plain" in measured else None

    def assumptions(self) -> dict[str, float]:
        """Measured constants of the planner for `layers`, by field: the median over the findings that have one.

        Memory reserves are taken at their largest.
        """
        values: dict[str, list[float]] = {}
        for part in self.parts:
            if part_named(part.name).layers not in (None, self.layers):
                continue
            for finding in part.findings:
                for key, value in _constants_of(finding).items():
                    values.setdefault(key, []).append(value)
        return {key: max(v) if key in _LARGEST else statistics.median(v) for key, v in values.items()}


def _constants_of(finding: Finding) -> dict[str, float]:
    if finding.status in _UNUSABLE:
        return {}
    found = {OLD_NAMES.get(key, key): value for key, value in finding.data.items() if value is not None}
    return {key: float(value) for key, value in found.items() if key in _CONSTANTS}


def write_report(report: Report, out: Path) -> None:
    """Write JSON and Markdown into `out`, each atomically, without names of host, user and home folder."""
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
    """Replaces the checkout's and home folder's paths, host and user name."""
    root = str(Path(megatron_scalerl.__file__).parent.parent)
    words = {f"{root}/": "", f"{Path.home()}/": "~/", socket.gethostname(): "<host>", f"/{_user()}/": "/<user>/"}
    for found, shown in words.items():
        text = text.replace(found, shown) if len(found) > 3 else text
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return ""


def put_aside(out: Path) -> Path:
    """Rename the folder's report and page to make room for another; returns the report's new path."""
    number = 1
    while (out / f"gpu_report.{number}.json").exists():
        number += 1
    if (out / page.PAGE).exists():
        (out / page.PAGE).rename(out / f"gpu_report.{number}.md")
    return (out / NAME).rename(out / f"gpu_report.{number}.json")


def read_report(path: Path) -> Report:
    """Raises ValueError for a file that is not a report in this format, OSError for one that cannot be read."""
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
    """Combine reports on the same kind of GPU; of a part that occurs twice, the later result is kept.

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
    """Kinds of GPUs without their number: one machine may have more than another."""
    return value if isinstance(value, str) else ", ".join(sorted(set(value))) or "no GPU"


def check_target(path: Path, *, rehearsed: bool) -> None:
    """Raises ValueError, before anything runs, for a file that could not be written afterwards."""
    if rehearsed:
        raise ValueError("--planner: expected figures measured on a GPU, found --rehearse")
    if not path.parent.is_dir():
        raise ValueError(f"--planner: {path}: expected its folder to exist, found none")


def write_planner(report: Report, path: Path, console: Console) -> None:
    """Write the measured constants for `plan --assumptions FILE`.

    Raises ValueError without any, and for a GPU that the planner does not support.
    """
    values = {key: value for key, value in report.assumptions().items() if value >= 0 and key in _CONSTANTS}
    if not values or not report.gpus:
        raise ValueError(f"--planner: expected measured constants in the report, found none; {path} was not written")
    [gpu, *others] = sorted(set(report.gpus))
    if others or gpu_of_device(gpu) is None:
        known = ", ".join(sorted(GPUS))
        found = ", ".join([gpu, *others])
        raise ValueError(f"--planner: expected one GPU type that the planner supports ({known}), found {found}")
    source = f"check-gpu, megatron_scalerl {report.version}, {report.parts[-1].started[:10]}"
    measured = {key: Measured(value=value, source=source) for key, value in values.items()}
    write_assumptions(path, measured, gpu=gpu, layers=report.layers)
    console.print(f"{path}: {', '.join(values)}", highlight=False)
