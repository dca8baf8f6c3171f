"""Read the table formats that runs are exported in: CSV, TSV, JSONL, a JSON list.

Rows keep the number that a spreadsheet shows (the header is row 1), so that an error can name it. TensorBoard's CSV
(`Wall time,Step,Value`) and JSON (`[[wall time, step, value], ...]`), and the CSV of a W&B chart (`Step`, then
`RUN - METRIC` with its `__MIN` and `__MAX`) are recognized by their columns.

JSONL is read here and not by `checkpoints.jsonl`: the forecast depends neither on msgspec nor on other packages of
the project, and the exports of other tools may contain a byte-order mark and blank lines.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TENSORBOARD = ("wall time", "step", "value")


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """Rows of one file; values are text (CSV) or JSON values."""

    path: Path
    """The file."""
    columns: tuple[str, ...]
    """Names of the columns, in the file's order."""
    rows: tuple[tuple[int, dict[str, Any]], ...]
    """(row number in the file, column -> value) of every row that is not blank."""
    sparse: bool
    """Whether a row may lack a column (JSONL, W&B). It is then skipped instead of refused."""
    kind: str
    """"csv", "jsonl", "tensorboard" or "wandb"."""


def read_table(path: Path) -> TableFile:
    """Read `path`, the format by suffix and columns. Raises ValueError, one line, if it is not a table."""
    if not path.exists():
        raise ValueError(f"{path}: expected a run folder or a CSV, JSONL or JSON file, found nothing there")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, found byte {error.object[error.start]:#04x}") from None
    if not text.strip():
        raise ValueError(f"{path}: expected a header and rows, found an empty file")
    if path.suffix in (".jsonl", ".ndjson"):
        return _from_jsonl(path, text)
    if path.suffix == ".json":
        return _from_json(path, text)
    return _from_csv(path, text)


def _from_csv(path: Path, text: str) -> TableFile:
    first = text.splitlines()[0]
    delimiter = max(",\t;", key=first.count)
    lines = csv.reader(text.splitlines(), delimiter=delimiter)
    header = tuple(name.strip() for name in next(lines))
    if len(header) < 2:
        raise ValueError(f"{path}: row 1: expected at least two columns, found one ({header[0]!r})")
    rows = []
    for number, cells in enumerate(lines, start=2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            where = f"{path}: row {number}"
            raise ValueError(f"{where}: expected {len(header)} cells as in the header, found {len(cells)}")
        rows.append((number, {name: cell.strip() for name, cell in zip(header, cells)}))
    if not rows:
        raise ValueError(f"{path}: expected rows below the header, found none")
    kind = _csv_kind(header)
    return TableFile(path=path, columns=header, rows=tuple(rows), sparse=kind == "wandb", kind=kind)


def _csv_kind(header: tuple[str, ...]) -> str:
    lowered = tuple(name.lower() for name in header)
    if lowered == TENSORBOARD:
        return "tensorboard"
    charted = [name for name in header[1:] if " - " in name]
    return "wandb" if charted and len(charted) == len(header) - 1 else "csv"


def _problem(error: ValueError | RecursionError) -> str:
    """What is wrong with JSON: of a number of thousands of digits without the advice to allow it."""
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(";")[0]


def _from_jsonl(path: Path, text: str) -> TableFile:
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if rows and text.endswith(line):  # without its newline: being written, or truncated by a crash
                break
            raise ValueError(f"{path}: row {number}: expected one JSON object, found {_problem(error)}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number}: expected one JSON object, found {type(row).__name__}")
        rows.append((number, row))
    columns = tuple(dict.fromkeys(name for _, row in rows for name in row))
    return TableFile(path=path, columns=columns, rows=tuple(rows), sparse=True, kind="jsonl")


def _from_json(path: Path, text: str) -> TableFile:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        row = f"row {error.lineno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{path}: {row}expected JSON, found {_problem(error)}") from None
    if not isinstance(value, list) or not value:
        raise ValueError(f"{path}: expected a JSON list of rows, found {type(value).__name__}")
    if all(isinstance(row, list) and len(row) == 3 for row in value):
        columns = ("Wall time", "Step", "Value")
        rows = [(n, dict(zip(columns, row))) for n, row in enumerate(value, start=1)]
        return TableFile(path=path, columns=columns, rows=tuple(rows), sparse=False, kind="tensorboard")
    for number, row in enumerate(value, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number}: expected an object, found {type(row).__name__}")
    columns = tuple(dict.fromkeys(name for row in value for name in row))
    return TableFile(path=path, columns=columns, rows=tuple(enumerate(value, start=1)), sparse=True, kind="jsonl")
