"""Read the inputs of the command line into the checked points of runs.

An input is a run folder (its validation.jsonl) or a file of another tool. Invalid data is refused in one line with
file, row, expected and found. `Curve.read` says in one line what was understood; corrections are noted.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_scalerl.fit import columns
from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.formatting import short_number, unit_name
from megatron_scalerl.fit.noise import HIGHEST_VARIANCE
from megatron_scalerl.fit.sigmoid import Array
from megatron_scalerl.fit.table_file import Row, TableFile, read_tables

IDENTITY_COLUMNS = ("run", "run_id", "run_name", "series", "name", "figure", "recipe", "experiment", "model", "seed")
"""Columns that identify a run: a table is read as one run of each value, where each has a few rows."""
RECORD_COLUMNS = (
    *("type", "record_type", "kind", "event", "split", "phase", "stage", "mode", "subset", "metric", "tag", "key"),
    *("dataset", "data_source", "benchmark", "env", "env_id", "task"),
)
"""Columns that say what a row measures: rows of one value are read."""
SEED_COLUMN = "seed"
"""Name of the column with the seed of a run."""
FEW_ROWS, MANY_RUNS = 3, 24
"""Rows of a run, below which it cannot be fitted; and runs of one table that are fitted unasked."""
MISSING = frozenset(("", "-", "none", "null", "na", "n/a", "<na>", "nan", "inf", "infinity", "undefined"))
"""Cells that are no number and no mistake, in lower case, a sign apart."""


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
    score_range: tuple[float, float] | None = None
    """(lowest, highest) value of the score, mapped to 0 and 1; None: (0, 1), or (0, 100) for percent."""
    hours_per_step: float | None = None
    """Hours per step: compute = steps x this constant, as in Khatri et al. (2025)."""


def read_curves(path: str | Path, options: ColumnOptions | None = None) -> list[Curve]:
    """Read every run in `path`: one for a run folder, one or more for a file of another tool.

    Raises ValueError, one line, for invalid input.
    """
    path, options = Path(path), options or ColumnOptions()
    if options.hours_per_step is not None and not 0 < options.hours_per_step < math.inf:
        raise ValueError(f"--hours-per-step: expected hours > 0, found {options.hours_per_step:g}")
    if (path / "validation.jsonl").is_file():
        return [_read_run_folder(path, options)]
    curves: list[Curve] = []
    failed: list[ValueError] = []
    tables = read_tables(path)
    for table in tables:
        try:
            curves += _curves_of(table, options)
        except ValueError as error:
            failed.append(error)
    if not curves:
        raise failed[0]
    short = [curve.name for curve in curves if len(curve.compute) < FEW_ROWS]
    long = [curve for curve in curves if len(curve.compute) >= FEW_ROWS] or curves
    left_out = [*map(str, failed), *(f"{name} has fewer than {FEW_ROWS} points" for name in short)]
    if left_out and long is not curves:
        note = f"{len(left_out)} runs of {path.name} were left out: {left_out[0]}"
        long[0] = replace(long[0], notes=(*long[0].notes, note))
    return long


def _curves_of(table: TableFile, options: ColumnOptions) -> list[Curve]:
    parts = [(name, *_one_kind(part, options)) for name, part in _selections(table, options)]
    return [_selected_curve(part, options, name, kind) for name, part, kind in parts]


def curve_of_rows(rows: Sequence[Mapping[str, Any]], *, name: str) -> Curve:
    """The run of rows of validation.jsonl in memory. Raises ValueError for invalid rows."""
    numbered = tuple((number, dict(row)) for number, row in enumerate(rows, start=1))
    names = tuple(dict.fromkeys(column for _, row in numbered for column in row))
    table = TableFile(path=Path("validation.jsonl"), layout="run folder", rows=numbered, columns=names)
    return _curve(table, ColumnOptions(compute="compute"), name)


def _selected_curve(table: TableFile, options: ColumnOptions, name: str, kind: str) -> Curve:
    """The run of these rows; one of several seeds of an arm where --series names the seed's column."""
    curve = _curve(table, options, name, kind)
    named = [column for column, _ in options.series]
    if SEED_COLUMN not in named or len(named) < 2:
        return curve
    row = table.rows[0][1]
    seed = str(row.get(SEED_COLUMN))
    arm = "/".join(str(row.get(column)) for column in named if column != SEED_COLUMN)
    return replace(curve, name=f"{arm} seed {seed}", arm=arm, seed=int(seed) if seed.isdigit() else None)


def _read_run_folder(path: Path, options: ColumnOptions) -> Curve:
    [table] = read_tables(path / "validation.jsonl")
    # a step validated again after a resume: its last row counts
    latest = {row.get("step", number): (number, row) for number, row in table.rows}
    table = replace(table, rows=tuple(latest.values()), layout="run folder")
    compute = options.compute or ("compute" if options.hours_per_step is None else "step")
    curve = _curve(table, replace(options, compute=compute), path.resolve().name)
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


def _candidates(table: TableFile, options: ColumnOptions) -> list[str]:
    """Columns that the pass rate may be in, best first."""
    if options.task or options.score:
        option = "--task" if options.task else "--score"
        name = f"pass_rate/{options.task}" if options.task else str(options.score)
        return [_named(table, name, option)]
    known = columns.scores(table.columns)
    if not known and table.x and len(table.columns) == 2:  # a chart of one metric: the user has chosen it
        return list(table.columns[1:])
    return known


def _one_kind(table: TableFile, options: ColumnOptions) -> tuple[TableFile, str]:
    """The rows of one kind of record, a validation's if there is one, and what they are in words.

    Kinds that follow one another, such as the phases of a run, are one. Raises ValueError for several that are equal.
    """
    said = []
    for column in (c for c in table.columns if c.lower() in RECORD_COLUMNS and c not in dict(options.series)):
        candidates = _candidates(table, options)
        kinds: dict[str, list[tuple[int, Row]]] = {}
        for number, row in table.rows:
            if any(_has_number(row, candidate) for candidate in candidates):
                kinds.setdefault(str(row.get(column)), []).append((number, row))
        ranked = sorted(kinds, key=_kind_rank)
        if len(ranked) < 2:
            continue
        is_metric = columns.score_rank(ranked[0]) is not None
        if not is_metric and not _overlap(table, list(kinds.values())):
            continue
        best = [kind for kind in ranked if _kind_rank(kind) == _kind_rank(ranked[0])]
        if len(best) > 1 and not is_metric:
            choice = f"choose with --series {column}=VALUE"
            raise ValueError(f"{table.path}: expected rows of one {column}, found {', '.join(best[:8])}; {choice}")
        table = replace(table, rows=tuple(kinds[ranked[0]]))
        said.append(f"rows with {column} = {ranked[0]}, not {', '.join(ranked[1:4])}")
    return table, "; ".join(said)


def _overlap(table: TableFile, kinds: Sequence[Sequence[tuple[int, Row]]]) -> bool:
    """Whether two kinds of rows lie in one range of compute."""
    x = next(iter(columns.computes(table.columns)), None)
    at = [[v for n, row in rows if x and (v := _number(table, n, x, row)) is not None] for rows in kinds]
    ends = sorted((min(values), max(values)) for values in at if values)
    return not ends or any(before[1] > after[0] for before, after in zip(ends, ends[1:]))


def _kind_rank(kind: str) -> tuple[int, ...]:
    return columns.score_rank(kind) or (columns.stage(kind), len(columns.SCORES))


def _selections(table: TableFile, options: ColumnOptions) -> list[tuple[str, TableFile]]:
    """(name, rows) of each run that --series chooses; without it of each run that the table tells apart."""
    name = table.run or table.path.name.removesuffix(".gz").rpartition(".")[0]
    series = options.series or tuple((column, "*") for column in _identity(table, FEW_ROWS))
    if not series:
        return [(name, table)]
    groups: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    for column, _ in series:
        _named(table, column, "--series")
    for number, row in table.rows:
        if all(value in ("*", str(row.get(column))) for column, value in series):
            groups.setdefault(tuple(str(row.get(column)) for column, _ in series), []).append((number, row))
    if not groups:
        column, value = series[-1]
        values = sorted({str(row.get(column)) for _, row in table.rows})[:8]
        raise ValueError(f"{table.path}: expected rows with {column} = {value}, found {column} in {values}")
    if len(groups) > MANY_RUNS and not options.series:
        raise ValueError(
            f"{table.path}: expected at most {MANY_RUNS} runs, found {len(groups)}; "
            f"choose with --series {series[0][0]}=VALUE, or * for all"
        )
    starred = [n for n, (_, value) in enumerate(series) if value == "*"] or [len(series) - 1]
    return [("/".join(key[n] for n in starred), replace(table, rows=tuple(rows))) for key, rows in groups.items()]


def _identity(table: TableFile, rows_each: int) -> list[str]:
    """The columns that tell runs apart, with at least `rows_each` rows of each value on average."""
    found = (c for c in table.columns if c.lower() in IDENTITY_COLUMNS)
    return [c for c in found if 1 < len({str(row.get(c)) for _, row in table.rows}) <= len(table.rows) / rows_each]


class _Point(NamedTuple):
    compute: float
    pass_rate: float
    row: Row
    number: int


def _curve(table: TableFile, options: ColumnOptions, name: str, kind: str = "") -> Curve:
    score, *others = _scores(table, options)
    compute, scale, unit = _compute(table, options, score)
    found, said = _points(table, options, (compute, scale), score, others)
    at_start = [point.compute == 0 or point.row.get("step") == 0 for point in found]
    starts = [point for point, start in zip(found, at_start) if start]
    points, notes = _ordered([point for point, start in zip(found, at_start) if not start], compute)
    if not points:
        raise ValueError(f"{table.path}: expected rows with {compute} > 0, found none")
    notes = _identity_notes(table) + [f"{table.path.name}: {text}" for text in notes]
    over = f"{compute} x {options.hours_per_step:g} h" if options.hours_per_step is not None else compute
    ends = f"{short_number(points[0].compute)} to {short_number(points[-1].compute)}"
    read = f"read {name}: {table.layout}, {len(points)} points of {score} over {over} ({ends} {unit_name(unit)})"
    also = f"also there: {', '.join(others[:2])} (--score)" if others else ""
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
        read="; ".join(text for text in (read + (", R_0" if starts else ""), *said, kind, also) if text),
    )


def _scores(table: TableFile, options: ColumnOptions) -> list[str]:
    """Columns with the pass rate, best first; of those that have numbers."""
    if options.task and options.score:
        raise ValueError(f"--task: expected no --score beside it, found --score {options.score}")
    candidates = _candidates(table, options)
    found = [c for c in candidates if any(_has_number(row, c) for _, row in table.rows)]
    if found:
        return found
    if candidates:
        raise ValueError(f"{table.path}: expected rows with {candidates[0]}, found none with a number")
    others = [c for c in table.columns if c and (len(table.columns) < 7 or c not in columns.computes(table.columns))]
    names = columns.some_of(others, ("pass rate", "accuracy", "score", "reward", "success"))
    raise ValueError(f"{table.path}: row 1: expected a score column (name it with --score), found {names}")


def _compute(table: TableFile, options: ColumnOptions, score: str) -> tuple[str, float, str]:
    """(column, factor, unit): a compute column with factor 1, a step column with the hours per step."""
    measured = [row for _, row in table.rows if _has_number(row, score)]
    if options.compute is not None:
        column = _named(table, options.compute, "--compute")
    else:
        known = [table.x] if table.x else columns.computes(table.columns)
        known = [c for c in known if any(_has_number(row, c) for row in measured)] or known
        steps = [c for c in known if columns.unit_of(c) == "steps"]
        usable = known if options.hours_per_step is None else steps or known
        if not usable:
            names = columns.some_of([c for c in table.columns if c], ("step", "epoch", "tokens", "hours"))
            expected = "expected a compute column (name it with --compute)"
            raise ValueError(f"{table.path}: row 1: {expected}, found {names}")
        alike = [c for c in usable if columns.unit_of(c) == columns.unit_of(usable[0])]
        column = max(alike, key=lambda c: sum(_has_number(row, c) for row in measured))  # verl's step 0 lacks some
    units = [(n, row["unit"]) for n, row in table.rows if not _blank(row.get("unit"))] if column == "compute" else []
    if units:
        _same(table, "unit", units)
    unit = str(units[0][1]) if units else columns.unit_of(column)
    if options.hours_per_step is None:
        return column, 1.0, unit
    if unit != "steps":
        raise ValueError(
            f"--hours-per-step: expected a column of steps to multiply, found {column} ({unit_name(unit)})"
        )
    return column, options.hours_per_step, "gpu_hours"


def _points(
    table: TableFile, options: ColumnOptions, axis: tuple[str, float], score: str, others: Sequence[str]
) -> tuple[list[_Point], list[str]]:
    """The points of the rows with both numbers, and what was skipped and converted. axis: compute column, factor."""
    compute, scale = axis
    found, blank, no_number = [], 0, 0
    for number, row in table.rows:
        x, y = (_number(table, number, column, row) for column in (compute, score))
        if x is None or y is None:
            lacking = [row.get(column) for column, value in ((compute, x), (score, y)) if value is None]
            if any(map(_blank, lacking)):
                blank += 1
            else:
                no_number += 1
            continue
        where = f"{table.path}: row {number}"
        if x < 0:
            raise ValueError(f"{where}: {compute}: expected compute >= 0, found {x:g}")
        if columns.is_time_of_day(compute, x):
            how = "a time of day; export steps or the relative time, or name a column with --compute"
            raise ValueError(f"{where}: {compute}: expected compute since the start, found {how}")
        found.append(_Point(x * scale, y, row, number))
    if not found:
        raise ValueError(f"{table.path}: expected rows with {score} and {compute}, found none")
    said, (low, high) = [], options.score_range or (0.0, 1.0)
    if options.score_range is None and _is_percent(score, found):
        high = 100.0
        said.append("percent, divided by 100")
    elif options.score_range is not None:
        said.append(f"{low:g} to {high:g} mapped to 0 to 1")
    found = [point._replace(pass_rate=(point.pass_rate - low) / (high - low)) for point in found]
    wrong = next((point for point in found if not 0.0 <= point.pass_rate <= 1.0), None)
    if wrong is not None:
        expected = f"expected a pass rate in [0, 1], found {wrong.pass_rate:g}"
        hint = f"; other columns: {', '.join(others[:2])} (--score)" if others else ""
        if columns.is_reward(score) and options.score_range is None:
            hint += "; or map its range with --score-range=LO,HI"
        raise ValueError(f"{table.path}: row {wrong.number}: {score}: {expected}{hint}")
    skipped = [
        f"{count} {what}" for count, what in ((blank, "without a number"), (no_number, "NaN or infinite")) if count
    ]
    return found, said + ([f"skipped rows: {', '.join(skipped)}"] if skipped else [])


def _is_percent(score: str, points: Sequence[_Point]) -> bool:
    """Whether values in [0, 100] are percent: a sign says so, or most are above 1 and the name is no reward's."""
    values = [point.pass_rate for point in points]
    if not 0 <= min(values) <= max(values) <= 100:
        return False
    if any(str(point.row.get(score)).endswith("%") for point in points) or re.search(r"%|percent|pct", score.lower()):
        return True
    return sum(value > 1 for value in values) > len(values) / 2 and (max(values) > 10 or not columns.is_reward(score))


def _ordered(points: list[_Point], compute: str) -> tuple[list[_Point], list[str]]:
    """The points in the order of their compute, one of each, and what was corrected.

    Of a compute that a resumed run has again its last row counts. Where most have several rows one after another, all
    are measurements.
    """
    went_back = any(a.compute > b.compute for a, b in zip(points, points[1:]))
    latest = {point.compute: point for point in points}
    repeated = {point.compute for point in points if latest[point.compute] is not point}
    if repeated and not went_back and 2 * len(repeated) >= len(latest):
        return _measured_again(points)
    notes = []
    if repeated:
        notes.append(f"{len(points) - len(latest)} rows have a {compute} that a later row has again; the last counts")
    elif went_back:
        notes.append(f"rows were not sorted by {compute}; they were sorted")
    return sorted(latest.values(), key=lambda point: point.compute), notes


def _measured_again(points: list[_Point]) -> tuple[list[_Point], list[str]]:
    first = {(point.compute, point.pass_rate): point for point in reversed(points)}
    kept, notes = list(reversed(first.values())), []
    if copies := len(points) - len(kept):
        notes.append(f"{copies} rows repeat another row's compute and pass rate; each was counted once")
    if again := len(kept) - len({point.compute for point in kept}):
        notes.append(f"{again} points share their compute with another one; all were kept as measurements")
    return kept, notes


def _identity_notes(table: TableFile) -> list[str]:
    return [
        f"{table.path.name}: rows of {len({str(row.get(column)) for _, row in table.rows})} different {column} "
        f"were fitted as one run; choose with --series {column}=VALUE"
        for column in _identity(table, 1)
    ]


def _named(table: TableFile, name: str, option: str) -> str:
    if name in table.columns:
        return name
    names = columns.some_of(table.columns, (name,))
    raise ValueError(f"{table.path}: row 1: expected column {name!r} ({option}), found {names}")


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _has_number(row: Row, column: str) -> bool:
    value = row.get(column)
    if isinstance(value, int | float):
        return math.isfinite(value)
    return isinstance(value, str) and value.strip().lstrip("+-").lower() not in MISSING


def _number(table: TableFile, number: int, column: str, row: Row) -> float | None:
    """The number in a cell; None for an empty one, NaN and inf. Raises ValueError for other text."""
    value = row.get(column)
    if value is None or (isinstance(value, str) and value.strip().lstrip("+-").lower() in MISSING):
        return None
    try:
        text = value.strip().removesuffix("%") if isinstance(value, str) else value
        parsed = None if isinstance(value, bool) else float(text)
    except (TypeError, ValueError, OverflowError):
        parsed = None
    if parsed is None:
        raise ValueError(f"{table.path}: row {number}: {column}: expected a finite number, found {value!r:.80}")
    return parsed if math.isfinite(parsed) else None


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
    numbers = [_number(table, point.number, key, point.row) for point in points if key in table.columns]
    if all(value is None for value in numbers) or (missing is None and None in numbers):
        return None
    return np.array([missing if value is None else value for value in numbers], dtype=float)
