"""Read the files that runs are kept in, whatever the tool, into tables with named columns.

`read_tables` knows the layouts by what is in the file, not by its suffix: CSV (also with tabs or semicolons), the
CSV of a W&B chart, JSON, JSON lines, trainer_state.json, TensorBoard's event files and exports, Parquet, and console
logs. Each may be compressed with gzip. Rows keep the number that a spreadsheet shows (the header is row 1), so that
an error can name it.

JSONL is read here and not by `checkpoints.jsonl`: the forecast depends neither on msgspec nor on other packages of
the project, and the exports of other tools may contain a byte-order mark and blank lines.
"""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FOLDER = ("trainer_state.json", "checkpoint-*/trainer_state.json", "metrics.jsonl")
"""Files that are looked for in a folder, in this order; of several the one with the highest number is read."""
WRAPPERS = ("data", "metrics", "logs", "log", "values", "scalars")
"""Keys of objects that are no part of a metric's name: verl's file logger writes {"step": 1, "data": {...}}."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_STEP_LINE = re.compile(r"\bstep:\s*(\d+) - (\S+:.*)")
"""verl: `(TaskRunner pid=7) step:5 - critic/score/mean:0.1 - actor/lr:1e-06`."""
_NUMPY = re.compile(r"\b(?:np|numpy|torch)?\.?(?:float|int|tensor)\d*\(([^()]*)\)")
_DICT_LINE = re.compile(r"\{'[^{}]*\}")
"""transformers: `{'loss': 0.1, 'reward': 0.5, 'epoch': 0.01}`."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """Rows of one run or of several; values are text (CSV) or JSON values."""

    path: Path
    """The file."""
    layout: str
    """What it is, in words."""
    columns: tuple[str, ...]
    """Names of the columns, in the file's order."""
    rows: tuple[tuple[int, Row], ...]
    """(row number in the file, column -> value) of every row that is not blank. A row may lack a column."""
    run: str | None = None
    """Name of the run, where the layout has it."""
    x: str | None = None
    """The column that the layout draws the others over."""


def read_tables(path: Path) -> list[TableFile]:
    """The tables of a file or folder: one, or one of each run. Raises ValueError, one line, if there is none."""
    if not path.exists():
        raise ValueError(f"{path}: expected a run folder or a CSV, JSONL or JSON file, found nothing there")
    if path.is_dir():
        for name in FOLDER:
            if inside := sorted(path.glob(name), key=lambda p: [int(n) for n in re.findall(r"\d+", p.parent.name)]):
                return [replace(table, run=path.resolve().name) for table in read_tables(inside[-1])]
    if path.is_dir() or "tfevents" in path.name:
        return _from_tensorboard(path)
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: expected a gzip file, found a damaged one ({error})") from None
    if data[:4] == b"PAR1":
        return [_from_parquet(path, data)]
    text = _text(path, data)
    if not text.strip():
        raise ValueError(f"{path}: expected a header and rows, found an empty file")
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    start = text.lstrip()[:2]
    if suffix not in (".json", ".jsonl", ".ndjson", ".csv", ".tsv") and (logged := _from_console(path, text)):
        return [logged]
    if suffix in (".log", ".out", ".err"):
        raise ValueError(
            f"{path}: expected lines like step:5 - reward:0.1 or {{'reward': 0.1, 'epoch': 1}}, found none"
        )
    if start[0] == "[" or suffix == ".json" or (start[0] == "{" and suffix not in (".jsonl", ".ndjson")):
        return [_from_json(path, text)]
    return [_from_jsonl(path, text)] if suffix in (".jsonl", ".ndjson") else _from_csv(path, text)


def _text(path: Path, data: bytes) -> str:
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, found byte {data[error.start]:#04x}") from None


def _table(path: Path, layout: str, rows: Sequence[tuple[int, Row]], **more: Any) -> TableFile:
    columns = tuple(dict.fromkeys(name for _, row in rows for name in row))
    return TableFile(path=path, layout=layout, columns=columns, rows=tuple(rows), **more)


def _from_csv(path: Path, text: str) -> list[TableFile]:
    first = text.lstrip().partition("\n")[0]
    delimiter = max(",\t;", key=first.count)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        header = tuple(name.strip() for name in next(filter(any, lines)))
        rows = [(lines.line_num, [cell.strip() for cell in cells]) for cells in lines]
    except csv.Error as error:
        raise ValueError(f"{path}: row {lines.line_num}: expected cells of a table, found {error}") from None
    where = f"{path}: row 1"
    if len(header) < 2:
        raise ValueError(f"{where}: expected at least two columns, found one ({header[0][:80]!r})")
    if all(re.fullmatch(r"[-+.\d]+", name) for name in header):
        raise ValueError(f"{where}: expected names of columns, found the numbers {', '.join(header)}")
    if twice := [name for name, count in Counter(header).items() if name and count > 1]:
        raise ValueError(f"{where}: expected each column once, found {twice[0]!r} {header.count(twice[0])} times")
    rows = [(number, cells) for number, cells in rows if any(cells)]
    for number, cells in rows:
        if len(cells) != len(header):
            expected = f"expected {len(header)} cells as in the header"
            raise ValueError(f"{path}: row {number}: {expected}, found {len(cells)}")
    if not rows:
        raise ValueError(f"{path}: expected rows below the header, found none")
    if delimiter != "," and not any(re.fullmatch(r"-?\d+\.\d+%?", cell) for _, cells in rows for cell in cells):
        rows = [(n, [re.sub(r"^(-?\d*),(\d+%?)$", r"\1.\2", cell) for cell in cells]) for n, cells in rows]
    named = [(number, dict(zip(header, cells))) for number, cells in rows]
    table = TableFile(path=path, layout="table", columns=header, rows=tuple(named))
    charted = [name for name in header[1:] if " - " in name]
    return _chart_runs(table) if charted and len(charted) == len(header) - 1 else [table]


def _chart_runs(table: TableFile) -> list[TableFile]:
    """A table of each run of a W&B chart: x, then `RUN - METRIC` with its __MIN and __MAX; runs may contain " - "."""
    x, runs = table.columns[0], dict[str, list[tuple[str, str]]]()
    for column in table.columns[1:]:
        run, _, metric = column.rpartition(" - ")
        if not metric.endswith(("__MIN", "__MAX")):
            runs.setdefault(run, []).append((column, metric))
    return [
        replace(
            table,
            layout="W&B chart",
            run=run,
            x=x,
            columns=(x, *(metric for _, metric in names)),
            rows=tuple((n, {x: row[x], **{metric: row[c] for c, metric in names}}) for n, row in table.rows),
        )
        for run, names in runs.items()
    ]


def _problem(error: ValueError | RecursionError) -> str:
    """What is wrong with JSON: of a number of thousands of digits without the advice to allow it."""
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(";")[0]


def _from_jsonl(path: Path, text: str) -> TableFile:
    rows: list[tuple[int, Row]] = []
    for number, line in enumerate(text.split("\n"), start=1):
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
        rows.append((number, _flat(row)))
    return _table(path, "JSON lines", rows)


def _from_json(path: Path, text: str) -> TableFile:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data" and text.lstrip()[0] == "{":
            return _from_jsonl(path, text)
        row = f"row {error.lineno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{path}: {row}expected JSON, found {_problem(error)}") from None
    if isinstance(value, dict) and set(map(type, value.values())) & {list, dict}:
        return _from_object(path, value)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{path}: expected a JSON list of rows, found {type(value).__name__}")
    if all(isinstance(row, list) and len(row) == 3 for row in value):
        triples = [(n, dict(zip(("Wall time", "Step", "Value"), row))) for n, row in enumerate(value, start=1)]
        return _table(path, "TensorBoard's JSON", triples)
    for number, row in enumerate(value, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number}: expected an object, found {type(row).__name__}")
    return _table(path, "JSON", [(n, _flat(row)) for n, row in enumerate(value, start=1)])


def _from_object(path: Path, value: Mapping[str, Any]) -> TableFile:
    """A JSON object that holds a list of rows (trainer_state.json: log_history), several, or columns (pandas)."""
    lists = {k: v for k, v in value.items() if isinstance(v, list) and v and all(isinstance(r, dict) for r in v)}
    if "log_history" in lists:
        return _table(
            path, "trainer_state.json", [(n, _flat(row)) for n, row in enumerate(lists["log_history"], start=1)]
        )
    if lists:
        named = [
            ({"kind": key} if len(lists) > 1 else {}) | _flat(row) for key, rows in lists.items() for row in rows
        ]
        return _table(path, f"JSON, {', '.join(lists)}", list(enumerate(named, start=1)))
    columns = {
        k: list(v.values()) if isinstance(v, dict) else v for k, v in value.items() if isinstance(v, list | dict)
    }
    if len({len(column) for column in columns.values()}) != 1:
        raise ValueError(f"{path}: expected a JSON list of rows, found an object with {', '.join(list(value)[:8])}")
    rows = [dict(zip(columns, cells)) for cells in zip(*columns.values())]
    return _table(path, "JSON columns", list(enumerate(rows, start=1)))


def _flat(row: Row) -> Row:
    """The row with the keys of its objects joined by "/"."""
    if not any(isinstance(value, dict) for value in row.values()):
        return row
    return dict(_items(row, ""))


def _items(row: Row, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _items(value, prefix if key in WRAPPERS else f"{prefix}{key}/")
        else:
            yield prefix + key, value


def _from_console(path: Path, text: str) -> TableFile | None:
    """The metrics of verl's and transformers' lines in a console's output; None if there are none."""
    rows: list[tuple[int, Row]] = []
    for number, line in enumerate(_NUMPY.sub(r"\1", _ANSI.sub("", text)).split("\n"), start=1):
        if found := _STEP_LINE.search(line):
            pairs = (item.strip().rpartition(":") for item in found[2].split(" - "))
            rows.append((number, {"step": found[1], **{k: (v.split() or [""])[0] for k, _, v in pairs if k}}))
        elif found := _DICT_LINE.search(line):
            try:
                row = ast.literal_eval(re.sub(r"\b(?:nan|inf)\b", "None", found[0]))
            except (ValueError, SyntaxError, MemoryError):
                continue
            rows.append((number, row))
    return _table(path, "console log", rows) if rows else None


def _from_parquet(path: Path, data: bytes) -> TableFile:
    from pyarrow import BufferReader, parquet

    rows = parquet.read_table(BufferReader(data)).to_pylist()
    return _table(path, "Parquet", [(n, _flat(row)) for n, row in enumerate(rows, start=1)])


def _from_tensorboard(path: Path) -> list[TableFile]:
    """A table of each folder with event files."""
    files = sorted(path.rglob("*tfevents*")) if path.is_dir() else [path]
    if not files:
        known = ", ".join((*FOLDER, "event files"))
        raise ValueError(f"{path}: expected a run folder with validation.jsonl, or {known}; found none")
    try:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.util.tensor_util import make_ndarray
    except ModuleNotFoundError:
        how = "found it missing: pip install tensorboard"
        raise ValueError(f"{path}: expected the package tensorboard for event files, {how}") from None
    folders: dict[Path, list[Row]] = {}
    latest: dict[tuple[Path, int], Row] = {}
    for file in files:
        rows = folders.setdefault(file.parent, [])
        for event in map(Event.FromString, RawEventFileLoader(str(file)).Load()):
            for value in event.summary.value:
                row = latest.get((file.parent, event.step))
                if row is None or value.tag in row:  # a step logged again after a resume is a row of its own
                    row = latest[file.parent, event.step] = {"step": event.step}
                    rows.append(row)
                tensor = make_ndarray(value.tensor) if value.WhichOneof("value") == "tensor" else None
                if value.WhichOneof("value") == "simple_value":
                    row[value.tag] = value.simple_value
                elif tensor is not None and tensor.size == 1 and tensor.dtype.kind in "fi":
                    row[value.tag] = float(tensor.reshape(()))
    named = {f: str(f.relative_to(path)) if path.is_dir() and f != path else f.resolve().name for f in folders}
    return [
        _table(path, "event files", list(enumerate(rows, start=1)), run=named[folder])
        for folder, rows in folders.items()
    ]
