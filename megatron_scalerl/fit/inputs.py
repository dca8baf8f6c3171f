"""Read the inputs of the command line into the checked points of runs.

An input is a run folder with validation.jsonl, or a file of another tool. A file is read into tables, and a table is
split into runs. For each run, `columns` chooses the rows of validations and the columns of score and compute. Invalid
data is refused in one line with file and row. `Curve.read` describes the input in one line, and `Curve.notes` holds
corrections.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_scalerl.fit.columns import (
    ColumnOptions,
    check_same,
    compute_column,
    groups_of,
    identity_columns,
    is_missing,
    is_short,
    one_kind,
    score_columns,
    selections,
)
from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.formatting import short_number, unit_name
from megatron_scalerl.fit.observations import HIGHEST_VARIANCE
from megatron_scalerl.fit.sigmoid import Array
from megatron_scalerl.fit.table_file import (
    FEW_ROWS,
    Row,
    TableFile,
    is_time_of_day,
    plain_value,
    read_tables,
    table_error,
    table_of,
)

SEED_COLUMN = "seed"
"""Name of the column with the seed of a run."""
CLOCK = "a time of day is not a compute; export steps or the time since the start, or use another --compute"
Check = tuple[str, Callable[[float], bool]]
"""(description of a valid number, function that says whether a number is valid)."""
SIZE: Check = ("a whole number >= 1", lambda value: value >= 1 and value % 1 == 0)
VARIANCE: Check = (f"a variance in [0, {HIGHEST_VARIANCE:g}]", lambda value: 0 <= value <= HIGHEST_VARIANCE)


def read_curves(path: str | Path, options: ColumnOptions | None = None) -> list[Curve]:
    """Read every run in `path`: the run of a run folder, or all runs of another tool's file.

    Raises ValueError, one line, for invalid input.
    """
    path = Path(path)
    options = options or ColumnOptions()
    if options.hours_per_step is not None and not 0 < options.hours_per_step < math.inf:
        raise ValueError(f"--hours-per-step is {options.hours_per_step:g}; a step takes more than 0 hours")
    if (path / "validation.jsonl").is_file():
        return [_read_run_folder(path, options)]
    if (path / "recipe.yaml").is_file():
        raise table_error(
            path, "the run has no validation.jsonl, as its first validation has not ended; fit it later"
        )
    curves = []
    problems = []
    for table in read_tables(path):
        try:
            for name, rows in selections(table, options):
                curves.append(_selected_curve(one_kind(rows, options), options, name))
        except ValueError as error:
            problems.append(error)
    if not curves:
        raise problems[0]
    short = [f"{curve.name} has fewer than {FEW_ROWS} points" for curve in curves if len(curve.compute) < FEW_ROWS]
    left_out = [*map(str, problems), *short]
    if len(short) == len(curves) or not left_out:
        return curves
    note = f"{len(left_out)} runs of {path.name} were left out; the first: {left_out[0]}"
    first, *later_curves = (curve for curve in curves if len(curve.compute) >= FEW_ROWS)
    return [replace(first, notes=(*first.notes, note)), *later_curves]


def curve_of_rows(rows: Sequence[Mapping[str, Any]], *, name: str) -> Curve:
    """The curve of rows of validation.jsonl that are in memory. Raises ValueError for invalid rows."""
    table = table_of(Path("validation.jsonl"), "run folder", enumerate(map(dict, rows), start=1))
    return _curve(table, ColumnOptions(compute="compute"), name)


def _selected_curve(table: TableFile, options: ColumnOptions, name: str) -> Curve:
    """The curve of a table. Arm and seed are set if --series names the column `seed` and a further column."""
    curve = _curve(table, options, name)
    columns = [column for column, _ in options.series]
    if SEED_COLUMN not in columns or len(columns) < 2:
        return curve
    row = table.rows[0][1]
    seed = str(row.get(SEED_COLUMN)).removesuffix(".0")
    arm = "/".join(str(row.get(column)) for column in columns if column != SEED_COLUMN)
    return replace(curve, name=f"{arm} seed {seed}", arm=arm, seed=int(seed) if seed.isdigit() else None)


def _read_run_folder(path: Path, options: ColumnOptions) -> Curve:
    [table] = read_tables(path / "validation.jsonl")
    # a resumed run may repeat the validation of a step: the last row of a step counts
    latest = {row.get("step", number): (number, row) for number, row in table.rows}
    table = replace(table, rows=tuple(latest.values()), layout="run folder")
    compute = options.compute or ("compute" if options.hours_per_step is None else "step")
    curve = _curve(table, replace(options, compute=compute), path.resolve().name)
    if (path / "recipe.yaml").exists():
        from megatron_scalerl.recipe.file import read_run_recipe

        recipe = flattened(read_run_recipe(path))
        curve = replace(curve, recipe=recipe, seed=recipe.get("seed"))
    warning = unconfirmed(table.rows[-1][1]) if table.rows else ""
    return replace(curve, source=path, notes=(*curve.notes, *filter(None, [warning])))


def unconfirmed(row: Mapping[str, Any]) -> str:
    """A warning if the second judge confirms too small a share of the correct answers in a row of validation.jsonl
    (less than `confirmed_least`); else ""."""
    share = row.get("confirmed_share")
    if share is None or share >= (row.get("confirmed_least") or 0.0):
        return ""
    return (
        f"the second judge confirms {share:.0%} of the paid answers of step {row['step']}, too few to trust "
        "the pass rates and the forecast"
    )


def flattened(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Key path -> value of a nested mapping. An empty mapping counts as a value."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{path}.")
        else:
            flat[path] = value
    return flat


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key path, value before, value now) of each difference between two recipes, sorted by key.

    Where one recipe lacks a section, each key of the section differs. Two spellings of one file's path are equal.
    """
    old = flattened(before)
    new = flattened(now)
    changed = []
    for key in sorted(old.keys() | new.keys()):
        values = (old.get(key), new.get(key))
        is_path = key.endswith(("path", "policy.adapter", "kl.to")) and None not in values
        one_place = is_path and len({os.path.abspath(str(value)) for value in values}) == 1
        if values[0] != values[1] and {} not in values and not one_place:
            changed.append((key, *values))
    return changed


class _Point(NamedTuple):
    compute: float
    pass_rate: float
    row: tuple[int, Row]


def _curve(table: TableFile, options: ColumnOptions, name: str) -> Curve:
    score, *further_columns = score_columns(table, options)
    compute, scale, unit = compute_column(table, options, score)
    measured, texts = _points(table, options, compute, score)
    starts = [point for point in measured if point.compute == 0 or plain_value(point.row[1].get("step")) == 0]
    points, notes = _ordered_points([point for point in measured if point not in starts], compute)
    if not points:
        raise table_error(table.path, f"no row has {compute} > 0; a fit needs points after the start")
    for column in identity_columns(table, 1):
        different = f"{len(groups_of(table.rows, [column]))} different {column}"
        notes.append(f"rows of {different} were fitted as one run; choose with --series {column}=VALUE")
    over = compute
    if options.hours_per_step is not None:
        over += f" x {options.hours_per_step:g} h"
    positions = np.array([point.compute for point in points]) * scale
    ends = f"{short_number(positions[0])} to {short_number(positions[-1])}"
    read = f"read {name}: {table.layout}, {len(points)} points of {score} over {over} ({ends} {unit_name(unit)})"
    if starts:
        read += ", R_0"
    texts.insert(0, read)
    texts += _further(table, further_columns)
    task = score.removeprefix("pass_rate")
    if not task.startswith("/"):
        task = ""
    within = f"within_variance{task}"
    initial: dict[str, Any] = {"initial": None}
    if starts:
        start = starts[0].row
        size = _number(table, start, "generations", SIZE)
        initial["initial"] = float(np.mean([point.pass_rate for point in starts]))
        initial["initial_generations"] = size and int(size)
        initial["initial_within_variance"] = _number(table, start, within, VARIANCE)
    return Curve(
        name=name,
        source=table.path,
        compute=positions,
        pass_rate=np.array([point.pass_rate for point in points]),
        **initial,
        prompts=_prompts(table, points, f"prompts{task}"),
        generations=_values(table, points, "generations", SIZE),
        within_variance=_values(table, points, within, VARIANCE, complete=False),
        truncated_share=_values(table, points, "truncated_share", complete=False),
        unit=unit,
        notes=tuple(f"{table.path.name}: {note}" for note in notes),
        read="; ".join(texts),
    )


def _further(table: TableFile, columns: list[str]) -> list[str]:
    """Texts on the columns that may hold a score and were not chosen; the user may choose one with --score."""
    texts = []
    short = [column for column in columns if is_short(table, column)]
    if short:
        texts.append(f"columns with fewer than {FEW_ROWS} rows: {', '.join(short[:3])}")
    if columns:
        remainder = f" and {len(columns) - 2} more" if len(columns) > 2 else ""
        texts.append(f"further scores: {', '.join(columns[:2])}{remainder} (--score)")
    return texts


def _points(table: TableFile, options: ColumnOptions, compute: str, score: str) -> tuple[list[_Point], list[str]]:
    """(points, texts on skipped rows and converted values). compute, score: names of the columns with a point's
    compute and pass rate."""
    points = []
    for row in table.rows:
        x = _number(table, row, compute)
        y = _number(table, row, score)
        if x is None or y is None:
            continue
        problem = ""
        if x < 0:
            problem = f"{x:g} is below 0; choose another --compute"
        elif is_time_of_day(compute, x):
            problem = CLOCK
        if problem:
            raise table_error(table.path, problem, f"row {row[0]}", compute)
        points.append(_Point(x, y, row))
    if not points:
        raise table_error(table.path, f"no row has numbers in both {score} and {compute}")
    texts = []
    lowest, highest = options.score_range or (0.0, 1.0)
    if options.score_range:
        texts.append(f"{lowest:g} to {highest:g} mapped to 0 to 1")
    elif _is_percent(score, points):
        highest = 100.0
        texts.append("percent, divided by 100")
    points = [
        point._replace(pass_rate=_rounded_rate((point.pass_rate - lowest) / (highest - lowest))) for point in points
    ]
    for point in points:
        if not 0.0 <= point.pass_rate <= 1.0:
            problem = (
                f"{point.pass_rate:g} is not a pass rate in [0, 1]; give the score's range with --score-range=LO,HI "
                "(0,100 for percent), or choose another column with --score"
            )
            raise table_error(table.path, problem, f"row {point.row[0]}", score)
    if len(points) < len(table.rows):
        texts.append(f"skipped rows: {len(table.rows) - len(points)} without a number")
    return points, texts


def _rounded_rate(pass_rate: float) -> float:
    """The pass rate, clipped to [0, 1] if the excess is within the rounding of a mean in single precision."""
    nearest = min(max(pass_rate, 0.0), 1.0)
    if abs(pass_rate - nearest) < 1e-5:
        return nearest
    return pass_rate


def _is_percent(score: str, points: Sequence[_Point]) -> bool:
    """Whether the values are percent: a cell ends with %, or the column's name says percent and a value exceeds 1."""
    if any(str(point.row[1].get(score)).endswith("%") for point in points):
        return True
    return bool(re.search(r"%|percent|pct", score.lower())) and any(point.pass_rate > 1 for point in points)


def _ordered_points(points: list[_Point], compute: str) -> tuple[list[_Point], list[str]]:
    """(points sorted by compute, one for each compute; notes on corrections).

    Where a resumed run repeats a compute, the last row counts. Where most computes have several successive rows, the
    mean of the rows counts.
    """
    latest = {point.compute: point for point in points}
    repeated = {point.compute for point in points if latest[point.compute] is not point}
    went_back = any(point.compute > successor.compute for point, successor in pairwise(points))
    # rows that repeat a compute without going back are rows of single prompts or answers, so the mean is taken
    if repeated and not went_back and 2 * len(repeated) >= len(latest):
        rates: dict[float, list[float]] = {}
        for point in points:
            rates.setdefault(point.compute, []).append(point.pass_rate)
        means = [latest[x]._replace(pass_rate=float(np.mean(rates[x]))) for x in sorted(latest)]
        return means, [f"several rows of one {compute}: their mean was fitted"]
    notes = []
    if repeated:
        notes.append(f"{len(points) - len(latest)} rows were replaced by later rows with the same {compute}")
    elif went_back:
        notes.append(f"rows were not sorted by {compute}; they were sorted")
    lineage = sorted({point.compute for point in _lineage(points)})
    if len(lineage) < len(latest):
        left_out = len(latest) - len(lineage)
        notes.append(f"{left_out} rows were left out, because a resumed run replaced them")
    return [latest[x] for x in lineage], notes


def _lineage(points: Sequence[_Point]) -> Sequence[_Point]:
    """The points, without any point that a resumed run has replaced.

    Points of the earlier attempt after the checkpoint of the resume are left out once the resumed run has a later
    point. If a point goes back to a compute that no earlier point has, the run was not resumed: the points are
    unsorted, and all are returned.
    """
    lineage: list[_Point] = []
    for point, successor in zip(points, [*points[1:], None]):
        if lineage and point.compute < lineage[-1].compute:
            if point.compute not in {earlier.compute for earlier in lineage}:
                return points
            # a resumed run that has no later point may have validated the checkpoint alone, and has replaced no point
            if successor and successor.compute > point.compute:
                lineage = [earlier for earlier in lineage if earlier.compute < point.compute]
        lineage.append(point)
    return lineage


def _number(table: TableFile, row: tuple[int, Row], column: str, check: Check | None = None) -> float | None:
    """The number in a cell; None for an empty cell, NaN and inf. Raises ValueError for text, and if `check` fails."""
    value = row[1].get(column)
    if is_missing(value):
        return None
    parsed = plain_value(value)
    problem = f"{value!r:.80} is not a finite number"
    if isinstance(parsed, float | bool) and math.isfinite(parsed):
        if check is None or check[1](parsed):
            return float(parsed)
        problem = f"{parsed:g} is not {check[0]}"
    raise table_error(table.path, problem, f"row {row[0]}", column)


def _prompts(table: TableFile, points: list[_Point], key: str) -> int | None:
    """The number of validation prompts; None if not recorded. Raises ValueError if the number differs between
    points."""
    values = _values(table, points, key, SIZE)
    if values is None:
        return None
    check_same(table, key, [(point.row[0], f"{value:.0f}") for point, value in zip(points, values)])
    return int(values[0])


def _values(
    table: TableFile, points: list[_Point], key: str, check: Check | None = None, *, complete: bool = True
) -> Array | None:
    """[n] numbers of a column, NaN for an empty cell; None if all cells are empty.

    complete: return None even if a single cell is empty.
    """
    numbers = [_number(table, point.row, key, check) for point in points]
    values = np.array(numbers, dtype=float)
    empty = np.isnan(values)
    if empty.all() or (complete and empty.any()):
        return None
    return values
