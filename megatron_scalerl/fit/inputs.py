"""Read the inputs of the command line into the checked points of runs.

An input is a run folder (its validation.jsonl) or a table file. Invalid data is
refused in one line with file, row, expected and found. Corrections, such as sorting, are noted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.noise import HIGHEST_VARIANCE
from megatron_scalerl.fit.sigmoid import Array
from megatron_scalerl.fit.table_file import TableFile, read_table

COMPUTE_COLUMNS = ("gpu_hours", "device_hours", "compute", "gpu-hours", "hours", "flops")
"""Names of a compute column, in order of preference, lower case."""
IDENTITY_COLUMNS = ("run", "series", "name", "figure", "recipe", "experiment", "model")
"""Columns that identify a run. Rows that differ in one of them are noted when they are fitted as one run."""
SEED_COLUMN = "seed"
"""Name of the column with the seed of a run."""
STEP_COLUMNS = ("step", "_step", "global_step", "steps", "trainer/global_step")
"""Names of a step column."""
SCORE_COLUMNS = ("pass_rate", "score", "mean@16", "validation/pass_rate", "val/pass_rate", "reward", "value")
"""Names of a score column."""


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """The command line's options on columns and rows."""

    compute: str | None = None
    """Compute column; None: by its name."""
    score: str | None = None
    """Pass rate column; None: by its name."""
    task: str | None = None
    """Task of a mixture: its pass rate and prompts are the columns pass_rate/TASK and prompts/TASK."""
    series: tuple[tuple[str, str], ...] = ()
    """(column, value) pairs that a row must match; the value "*" makes one run of each value."""
    hours_per_step: float | None = None
    """Hours per step: compute = steps x this constant, as in Khatri et al. (2025)."""


def read_curves(path: str | Path, options: ColumnOptions | None = None) -> list[Curve]:
    """Read every run in `path`: one for a run folder, one or more for a table.

    Raises ValueError, one line, for invalid input.
    """
    path, options = Path(path), options or ColumnOptions()
    if path.is_dir():
        return [_read_run_folder(path, options)]
    table = read_table(path)
    if table.kind == "wandb" and options.score is None:
        columns = [c for c in table.columns[1:] if not c.endswith(("__MIN", "__MAX"))]
        return [_curve(table, replace(options, score=c), c.split(" - ")[0]) for c in columns]
    return [_selected_curve(part, options, name) for name, part in _selections(table, options)]


def curve_of_rows(rows: Sequence[Mapping[str, Any]], *, name: str) -> Curve:
    """The run of rows of validation.jsonl in memory. Raises ValueError for invalid rows."""
    numbered = tuple((number, dict(row)) for number, row in enumerate(rows, start=1))
    columns = tuple(dict.fromkeys(column for _, row in numbered for column in row))
    table = TableFile(path=Path("validation.jsonl"), kind="jsonl", sparse=True, rows=numbered, columns=columns)
    return _curve(table, ColumnOptions(compute="compute"), name)


def _selected_curve(table: TableFile, options: ColumnOptions, name: str) -> Curve:
    """The run of these rows; one of several seeds of an arm where --series names the seed's column."""
    curve = _curve(table, options, name)
    columns = [column for column, _ in options.series]
    if SEED_COLUMN not in columns or len(columns) < 2:
        return curve
    row = table.rows[0][1]
    seed = str(row.get(SEED_COLUMN))
    arm = "/".join(str(row.get(column)) for column in columns if column != SEED_COLUMN)
    return replace(curve, name=f"{arm} seed {seed}", arm=arm, seed=int(seed) if seed.isdigit() else None)


def _read_run_folder(path: Path, options: ColumnOptions) -> Curve:
    file = path / "validation.jsonl"
    if not file.exists():
        raise ValueError(f"{path}: expected a run folder with validation.jsonl, found none")
    table = read_table(file)
    # a step validated again after a resume: its last row counts
    latest = {row.get("step", number): (number, row) for number, row in table.rows}
    table = replace(table, rows=tuple(latest.values()))
    curve = _curve(table, replace(options, compute=options.compute or "compute"), path.resolve().name)
    recipe = _recipe(path)
    seed = None if recipe is None else recipe.get("seed")
    return replace(curve, source=path, recipe=recipe, seed=seed if isinstance(seed, int) else None)


def _recipe(run_dir: Path) -> dict[str, Any] | None:
    """Key path -> value of the run's recipe; None if the file is missing. Raises ValueError for an unreadable one."""
    if not (run_dir / "recipe.yaml").exists():
        return None
    from megatron_scalerl.recipe.file import read_run_recipe

    return flattened(read_run_recipe(run_dir))


def flattened(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Key path -> value of a nested mapping; an empty mapping is a value."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            out |= flattened(value, f"{prefix}{key}.")
        else:
            out[prefix + str(key)] = value
    return out


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key path, value, value) where two recipes differ, by key. Of a section that one lacks, its keys differ."""
    old, new = flattened(before), flattened(now)
    pairs = ((key, old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()))
    return [(key, a, b) for key, a, b in pairs if a != b and {} not in (a, b) and not _one_place(key, a, b)]


def _one_place(key: str, *values: object) -> bool:
    """Whether both are paths to one file or folder, however written."""
    return key.endswith("path") and None not in values and len({os.path.abspath(str(v)) for v in values}) == 1


def _selections(table: TableFile, options: ColumnOptions) -> list[tuple[str, TableFile]]:
    if not options.series:
        return [(table.path.stem, table)]
    groups: dict[tuple[str, ...], list[tuple[int, dict[str, Any]]]] = {}
    for column, _ in options.series:
        _column(table, column, (), "", "--series")
    for number, row in table.rows:
        if all(value in ("*", str(row.get(column))) for column, value in options.series):
            groups.setdefault(tuple(str(row.get(column)) for column, _ in options.series), []).append((number, row))
    if not groups:
        column, value = options.series[-1]
        values = sorted({str(row.get(column)) for _, row in table.rows})[:8]
        raise ValueError(f"{table.path}: expected rows with {column} = {value}, found {column} in {values}")
    starred = [n for n, (_, value) in enumerate(options.series) if value == "*"] or [len(options.series) - 1]
    return [("/".join(key[n] for n in starred), replace(table, rows=tuple(rows))) for key, rows in groups.items()]


class _Point(NamedTuple):
    compute: float
    pass_rate: float
    row: dict[str, Any]
    number: int


def _curve(table: TableFile, options: ColumnOptions, name: str) -> Curve:
    compute_column, scale, unit = _compute_column(table, options)
    if options.task and options.score:
        raise ValueError(f"--task: expected no --score beside it, found --score {options.score}")
    score = f"pass_rate/{options.task}" if options.task else options.score
    score_column = _column(table, score, SCORE_COLUMNS, "a score", "--task" if options.task else "--score")
    points: list[_Point] = []
    starts: list[_Point] = []
    notes = _identity_notes(table)
    for point in _points(table, compute_column, scale, score_column):
        at_start = point.compute == 0 or (table.kind == "jsonl" and point.row.get("step") == 0)
        (starts if at_start else points).append(point)
    if any(a.compute > b.compute for a, b in zip(points, points[1:])):
        notes.append(f"{table.path.name}: rows were not sorted by {compute_column}; they were sorted")
        points.sort(key=lambda p: p.compute)
    points, duplicates = _without_duplicates(points)
    notes += [f"{table.path.name}: {text}" for text in duplicates]
    if not points:
        raise ValueError(f"{table.path}: expected rows with {compute_column} > 0, found none")
    return Curve(
        name=name,
        source=table.path,
        compute=np.array([p.compute for p in points]),
        pass_rate=np.array([p.pass_rate for p in points]),
        initial=float(np.mean([p.pass_rate for p in starts])) if starts else None,
        prompts=_prompts(table, points, f"prompts/{options.task}" if options.task else "prompts"),
        generations=_sizes(table, points, "generations"),
        initial_generations=None if (first := _sizes(table, starts[:1], "generations")) is None else int(first[0]),
        within_variance=None if options.task else _variances(table, points),
        initial_within_variance=None if options.task else _variance(table, starts),
        truncated_share=_column_values(table, points, "truncated_share"),
        unit=unit,
        notes=tuple(notes),
    )


def _points(table: TableFile, compute_column: str, scale: float, score_column: str) -> list[_Point]:
    points = []
    for number, row in table.rows:
        if table.sparse and _blank(row.get(score_column)):
            continue
        c = _number(table, number, compute_column, row) * scale
        y = _number(table, number, score_column, row)
        where = f"{table.path}: row {number}"
        if c < 0:
            raise ValueError(f"{where}: {compute_column}: expected compute >= 0, found {c:g}")
        if not 0.0 <= y <= 1.0:
            raise ValueError(f"{where}: {score_column}: expected a pass rate in [0, 1], found {y:g}")
        points.append(_Point(c, y, row, number))
    if not points:
        raise ValueError(f"{table.path}: expected rows with {score_column}, found none")
    return points


def _identity_notes(table: TableFile) -> list[str]:
    notes = []
    for column in table.columns:
        values = {str(row.get(column)) for _, row in table.rows}
        if column.lower() in IDENTITY_COLUMNS and len(values) > 1:
            notes.append(
                f"{table.path.name}: rows of {len(values)} different {column} were fitted as one run; "
                f"choose with --series {column}=VALUE"
            )
    return notes


def _compute_column(table: TableFile, options: ColumnOptions) -> tuple[str, float, str]:
    """(column, factor, unit): a compute column with factor 1, a step column with the hours per step."""
    if options.compute is None and table.kind in ("tensorboard", "wandb"):
        column = "Step" if "Step" in table.columns else table.columns[0]
    else:
        column = _column(table, options.compute, COMPUTE_COLUMNS + STEP_COLUMNS, "a compute", "--compute")
    if column == "compute" and (units := [(n, row["unit"]) for n, row in table.rows if not _blank(row.get("unit"))]):
        _same(table, "unit", units)
        return column, 1.0, str(units[0][1])
    if column.lower() not in STEP_COLUMNS:
        return column, 1.0, column if column.lower() in COMPUTE_COLUMNS else "gpu_hours"
    if options.hours_per_step is None:
        return column, 1.0, "steps"
    return column, options.hours_per_step, "gpu_hours"


def _column(table: TableFile, name: str | None, known: Sequence[str], kind: str, option: str) -> str:
    """The column called `name`; for None the first of the known names."""
    lowered = {column.lower(): column for column in table.columns}
    found = name if name is not None else next((lowered[key] for key in known if key in lowered), None)
    if found in table.columns:
        return found
    expected = f"{kind} column (name it with {option})" if name is None else f"column {name!r} ({option})"
    raise ValueError(f"{table.path}: row 1: expected {expected}, found {', '.join(table.columns)}")


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _number(table: TableFile, number: int, column: str, row: dict[str, Any]) -> float:
    value = row.get(column)
    try:
        parsed = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError):
        parsed = math.nan
    if not math.isfinite(parsed):
        raise ValueError(f"{table.path}: row {number}: {column}: expected a finite number, found {value!r}")
    return parsed


def _without_duplicates(points: list[_Point]) -> tuple[list[_Point], list[str]]:
    first: dict[tuple[float, float], _Point] = {}
    for point in points:
        first.setdefault((point.compute, point.pass_rate), point)
    kept, notes = list(first.values()), []
    if copies := len(points) - len(kept):
        notes.append(f"{copies} rows repeat another row's compute and pass rate; each was counted once")
    if again := len(kept) - len({point.compute for point in kept}):
        notes.append(f"{again} points share their compute with another one; both were kept as measurements")
    return kept, notes


def _sizes(table: TableFile, points: list[_Point], key: str) -> Array | None:
    """[n] whole numbers >= 1 of a column; None where one is missing."""
    found = _column_values(table, points, key)
    for point, value in zip(points, () if found is None else found):
        if value < 1 or value % 1 != 0:
            raise ValueError(
                f"{table.path}: row {point.number}: {key}: expected a whole number >= 1, found {value:g}"
            )
    return found


def _prompts(table: TableFile, points: list[_Point], key: str) -> int | None:
    """How many there are: one number, as pass rates over different prompts are different curves."""
    found = _sizes(table, points, key)
    if found is None:
        return None
    _same(table, key, [(point.number, f"{value:.0f}") for point, value in zip(points, found)])
    return int(found[0])


def _same(table: TableFile, key: str, values: Sequence[tuple[int, object]]) -> None:
    """Raise ValueError at the first of the (row, value) whose value is not that of the first one."""
    first, expected = values[0]
    for number, value in values:
        if value != expected:
            what = f"{key}: expected {expected} as in row {first}, found {value}"
            raise ValueError(f"{table.path}: row {number}: {what}")


def _variances(table: TableFile, points: list[_Point]) -> Array | None:
    """[n] within_variance, NaN where it was not measured; None if it never was."""
    found = _column_values(table, points, "within_variance", missing=math.nan)
    for point, value in zip(points, () if found is None else found):
        if not (0.0 <= value <= HIGHEST_VARIANCE or math.isnan(value)):
            where = f"{table.path}: row {point.number}: within_variance"
            raise ValueError(f"{where}: expected a variance in [0, {HIGHEST_VARIANCE:g}], found {value:g}")
    return found


def _variance(table: TableFile, points: list[_Point]) -> float | None:
    found = _variances(table, points[:1])
    return None if found is None else float(found[0])


def _column_values(table: TableFile, points: list[_Point], key: str, *, missing: float | None = None) -> Array | None:
    """[n] numbers of a column; None where none, or without `missing` one, is there. Raises ValueError for a text."""
    blank = [_blank(point.row.get(key)) for point in points]
    if all(blank) or (missing is None and any(blank)):
        return None
    numbers = (missing if empty else _number(table, p.number, key, p.row) for p, empty in zip(points, blank))
    return np.array(list(numbers), dtype=float)
