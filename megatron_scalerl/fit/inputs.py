"""From what a user names on the command line to checked points of runs, ready to fit.

An input is a run folder (its validation.jsonl and the unit of its ledger.jsonl) or a table file. Whatever
cannot be right is refused in one line with file, row, expected and found; whatever was put right is noted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_scalerl.fit.sigmoid import Array
from megatron_scalerl.fit.tables import Table, read_table

COMPUTE_COLUMNS = ("gpu_hours", "device_hours", "compute", "gpu-hours", "hours", "flops")
IDENTITY_COLUMNS = ("run", "series", "name", "figure", "recipe", "experiment", "model")
"""Columns that tell runs apart; rows that differ in one of them are one run only if the user says so."""
STEP_COLUMNS = ("step", "_step", "global_step", "steps", "trainer/global_step")
SCORE_COLUMNS = ("pass_rate", "score", "mean@16", "validation/pass_rate", "val/pass_rate", "reward", "value")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The validation points of one run, checked, sorted by compute."""

    name: str
    source: Path
    compute: Array = field(repr=False)
    """[n] > 0, ascending."""
    pass_rate: Array = field(repr=False)
    """[n] in [0, 1]."""
    initial: float | None
    """R_0 from a point at step 0 or compute 0; None where there is none."""
    prompts: int | None
    generations: int | None
    truncated_share: Array | None = field(repr=False, default=None)
    """[n] share of truncated completions, where recorded."""
    unit: str = "gpu_hours"
    notes: tuple[str, ...] = ()
    """What was put right on the way, one sentence each."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the user said about the columns."""

    compute: str | None = None
    score: str | None = None
    series: tuple[tuple[str, str], ...] = ()
    """(column, value) pairs that a row must match; value "*" makes one run of each value."""
    hours_per_step: float | None = None
    """Turns a step column into compute: steps x a constant, as in Khatri et al. (2025)."""


def read_curves(path: str | Path, choice: Choice | None = None) -> list[Curve]:
    """Read every run that `path` holds: one for a run folder, one or more for a table.

    Raises ValueError in one line for bad input.
    """
    path, choice = Path(path), choice or Choice()
    if path.is_dir():
        return [_read_run_folder(path, choice)]
    table = read_table(path)
    if table.kind == "wandb" and choice.score is None:
        columns = [c for c in table.columns[1:] if not c.endswith(("__MIN", "__MAX"))]
        return [_curve(table, replace(choice, score=c), c.split(" - ")[0]) for c in columns]
    selections = _selections(table, choice)
    return [_curve(part, choice, name) for name, part in selections]


def _read_run_folder(path: Path, choice: Choice) -> Curve:
    file = path / "validation.jsonl"
    if not file.exists():
        raise ValueError(f"{path}: expected a run folder with validation.jsonl, found none")
    table = read_table(file)
    latest = {row.get("step", number): (number, row) for number, row in table.rows}
    table = replace(table, rows=tuple(latest.values()))
    curve = _curve(table, replace(choice, compute=choice.compute or "gpu_hours"), path.resolve().name)
    return replace(curve, unit=_ledger_unit(path / "ledger.jsonl"), source=path)


def _ledger_unit(path: Path) -> str:
    if not path.exists():
        return "gpu_hours"
    with open(path, encoding="utf-8") as handle:
        head = handle.readline()
    if not head.endswith("\n"):  # torn by a crash
        return "gpu_hours"
    try:
        return str(json.loads(head).get("unit", "gpu_hours"))
    except (json.JSONDecodeError, AttributeError):
        raise ValueError(f"{path}: row 1: expected a JSON object with the unit, found {head.strip()!r}") from None


def _selections(table: Table, choice: Choice) -> list[tuple[str, Table]]:
    if not choice.series:
        return [(table.path.stem, table)]
    groups: dict[tuple[str, ...], list[tuple[int, dict[str, Any]]]] = {}
    for column, _ in choice.series:
        _need(table, column, "--series")
    for number, row in table.rows:
        if all(value in ("*", str(row.get(column))) for column, value in choice.series):
            groups.setdefault(tuple(str(row.get(column)) for column, _ in choice.series), []).append((number, row))
    if not groups:
        column, value = choice.series[-1]
        known = sorted({str(row.get(column)) for _, row in table.rows})[:8]
        raise ValueError(f"{table.path}: expected rows with {column} = {value}, found {column} in {known}")
    starred = [n for n, (_, value) in enumerate(choice.series) if value == "*"] or [len(choice.series) - 1]
    return [("/".join(key[n] for n in starred), replace(table, rows=tuple(rows))) for key, rows in groups.items()]


def _curve(table: Table, choice: Choice, name: str) -> Curve:
    compute_column, scale, unit = _compute_column(table, choice)
    score_column = choice.score or _guess(table, SCORE_COLUMNS, "a score", "--score")
    _need(table, score_column, "--score")
    points, notes = [], _mixed(table)
    for number, row in table.rows:
        if table.sparse and _blank(row.get(score_column)):
            continue
        c = _number(table, number, compute_column, row) * scale
        y = _number(table, number, score_column, row)
        if c < 0:
            raise ValueError(f"{table.path}: row {number}: {compute_column}: expected compute >= 0, found {c:g}")
        if not 0.0 <= y <= 1.0:
            where = f"{table.path}: row {number}: {score_column}"
            raise ValueError(f"{where}: expected a pass rate in [0, 1], found {y:g}")
        points.append((c, y, row.get("step"), row))
    if not points:
        raise ValueError(f"{table.path}: expected rows with {score_column}, found none")
    starts = [p for p in points if p[0] == 0 or (table.kind == "jsonl" and p[2] == 0)]
    points = [p for p in points if p not in starts]
    if any(a[0] > b[0] for a, b in zip(points, points[1:])):
        notes.append(f"{table.path.name}: rows were not sorted by {compute_column}; they were sorted")
        points.sort(key=lambda p: p[0])
    points, doubled = _without_copies(points)
    notes += [f"{table.path.name}: {text}" for text in doubled]
    if not points:
        raise ValueError(f"{table.path}: expected rows with {compute_column} > 0, found none")
    return Curve(
        name=name,
        source=table.path,
        compute=np.array([p[0] for p in points]),
        pass_rate=np.array([p[1] for p in points]),
        initial=float(np.mean([p[1] for p in starts])) if starts else None,
        prompts=_size(points, "prompts"),
        generations=_size(points, "generations"),
        truncated_share=_shares(points),
        unit=unit,
        notes=tuple(notes),
    )


def _mixed(table: Table) -> list[str]:
    notes = []
    for column in table.columns:
        values = {str(row.get(column)) for _, row in table.rows}
        if column.lower() in IDENTITY_COLUMNS and len(values) > 1:
            notes.append(
                f"{table.path.name}: rows of {len(values)} different {column} were fitted as one run; "
                f"choose with --series {column}=VALUE"
            )
    return notes


def _compute_column(table: Table, choice: Choice) -> tuple[str, float, str]:
    """(column, factor, unit): a compute column as it is, a step column times the hours of a step."""
    if choice.compute is not None:
        _need(table, choice.compute, "--compute")
        column = choice.compute
    elif table.kind in ("tensorboard", "wandb"):
        column = "Step" if "Step" in table.columns else table.columns[0]
    else:
        column = _guess(table, COMPUTE_COLUMNS + STEP_COLUMNS, "a compute", "--compute")
    if column.lower() not in STEP_COLUMNS:
        return column, 1.0, column if column.lower() in COMPUTE_COLUMNS else "gpu_hours"
    if choice.hours_per_step is None:
        return column, 1.0, "steps"
    return column, choice.hours_per_step, "gpu_hours"


def _guess(table: Table, known: Sequence[str], what: str, option: str) -> str:
    lowered = {name.lower(): name for name in table.columns}
    for name in known:
        if name in lowered:
            return lowered[name]
    raise ValueError(
        f"{table.path}: row 1: expected {what} column (name it with {option}), found {', '.join(table.columns)}"
    )


def _need(table: Table, column: str, option: str) -> None:
    if column not in table.columns:
        raise ValueError(
            f"{table.path}: row 1: expected column {column!r} ({option}), found {', '.join(table.columns)}"
        )


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _number(table: Table, number: int, column: str, row: dict[str, Any]) -> float:
    value = row.get(column)
    try:
        parsed = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError):
        parsed = math.nan
    if not math.isfinite(parsed):
        raise ValueError(f"{table.path}: row {number}: {column}: expected a finite number, found {value!r}")
    return parsed


def _without_copies(points: list[tuple]) -> tuple[list[tuple], list[str]]:
    kept, copies, seen = [], 0, set()
    for point in points:
        if point[:2] in seen:
            copies += 1
            continue
        seen.add(point[:2])
        kept.append(point)
    notes = []
    if copies:
        notes.append(f"{copies} rows repeat another row's compute and pass rate; each was counted once")
    again = len(kept) - len({point[0] for point in kept})
    if again:
        notes.append(f"{again} points share their compute with another one; both were kept as measurements")
    return kept, notes


def _size(points: list[tuple], key: str) -> int | None:
    values = [int(p[3][key]) for p in points if str(p[3].get(key, "")).strip().isdigit()]
    return int(np.median(values)) if len(values) == len(points) else None


def _shares(points: list[tuple]) -> Array | None:
    values = [p[3].get("truncated_share") for p in points]
    if any(_blank(value) for value in values):
        return None
    return np.array([float(value) for value in values])
