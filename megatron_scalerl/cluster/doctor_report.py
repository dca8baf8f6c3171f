"""A node's report: its table and its JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.cluster.check import Check, Status
from megatron_scalerl.cluster.node import NodeReport
from megatron_scalerl.processes.logs import printable

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 160
"""Columns of the table where the output is no terminal."""
_ORDER: tuple[Status, ...] = ("ok", "skipped", "warning", "failed")
_COLORS = {"ok": "green", "skipped": "dim", "warning": "yellow", "failed": "bold red"}


def show(report: NodeReport, console: Console) -> None:
    """Print one line per check, then what to do about those that did not pass, failed ones last."""
    from rich.table import Table
    from rich.text import Text

    if not console.is_terminal:
        console.width = _WIDTH
    ordered = sorted(report.checks, key=lambda check: _ORDER.index(check.status))
    table = Table(title=f"{report.host}, {report.time}", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("status")
    table.add_column("found", overflow="fold")
    for check in ordered:
        table.add_row(check.name, Text(check.status, _COLORS[check.status]), Text(check.found))
    console.print(table)
    for check in ordered:
        if check.status in ("warning", "failed"):
            console.print(Text.assemble((check.status, _COLORS[check.status]), f" {_advice(check)}"), highlight=False)
    counts = [f"{sum(c.status == status for c in ordered)} {status}" for status in _ORDER]
    console.print(", ".join(counts), highlight=False)


def _advice(check: Check) -> str:
    return f"{check.name}: expected {check.expected}, found {check.found}; {check.remedy}"


def to_json(report: NodeReport) -> bytes:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def write_report(report: NodeReport, path: Path) -> None:
    """Write the JSON file; whole or not at all. Raises OSError."""
    write_durably(path, to_json(report))


def read_report(path: Path) -> NodeReport:
    """The report in a file. Raises ValueError for a file that is missing or no report of this version."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=NodeReport)
    except OSError as error:
        raise ValueError(f"{path}: expected a report of doctor --json, found: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a report of doctor --json, found: {printable(str(error))}") from None
