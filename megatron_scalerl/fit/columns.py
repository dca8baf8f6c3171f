"""Choose the runs, rows and columns of a table for a fit.

`selections` splits a table into runs by a column such as `run`, and `one_kind` keeps the rows of validations. Then
`score_columns` and `compute_column` choose columns.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_scalerl.fit.formatting import unit_name
from megatron_scalerl.fit.table_file import (
    FEW_ROWS,
    SCORES,
    Row,
    TableFile,
    computes,
    is_step_name,
    may_be_score,
    plain_value,
    score_rank,
    scores,
    some_of,
    stage,
    table_error,
    unit_of,
)
from megatron_scalerl.record import record

_IDENTITY = re.compile(
    r"(?:run|experiment|exp)(?:_(?:id|name))?|series|name|figure|recipe|model|seed|group|arm|method|algo(?:rithm)?"
    r"|variant|condition|config"
)
"""Pattern of the name of a column that identifies a run: rows with equal values belong to one run, if there are at
least `FEW_ROWS` rows per value on average."""
_RECORD = re.compile(
    r"(?:record_)?type|kind|event|split|phase|stage|mode|subset|metric|variable|tag|key|dataset|data_source"
    r"|benchmark|env(?:_id)?|task|domain|k|is_(?:eval|validation)"
)
"""Pattern of the name of a column that says which quantity a row measures. Only the rows with one value of the column
are read."""
_MISSING_CELL = re.compile(r"[-+]*(?:none|null|na|n/a|<na>|nan|inf|infinity|undefined)?", re.IGNORECASE)
"""Pattern of the text of a cell that counts as empty, not as a mistake."""
Rows = Sequence[tuple[int, Row]]
"""Each row is (row number in the file, column -> value)."""


@record
class ColumnOptions:
    """Options of the command line that choose columns and rows."""

    compute: str | None = None
    """Name of the compute column; None: the column is chosen by the columns' names."""
    score: str | None = None
    """Name of the pass rate column; None: the column is chosen by the columns' names."""
    series: tuple[tuple[str, str], ...] = ()
    """(column, value) pairs that rows must match; with "*" as the value, each value in the column makes a run."""
    score_range: tuple[float, float] | None = None
    """(lowest, highest) value of the score, mapped to 0 and 1; None: (0, 1), or (0, 100) for percent."""
    hours_per_step: float | None = None
    """GPU-hours per step: compute = steps x this constant, as in Khatri et al. (2025). None: the compute column is
    not multiplied."""


def score_columns(table: TableFile, options: ColumnOptions) -> list[str]:
    """Columns with numbers that may hold the pass rate, best first. Raises ValueError if there is no such column."""
    names = [_checked_column(table, options.score, "--score")] if options.score else scores(table.columns)
    if not names:
        axes = _axes(table)
        candidates = [column for column in table.columns if column and column not in axes]
        if axes and len(candidates) == 1 and may_be_score(candidates[0]):
            # the only column that may be a score, such as gsm8k beside step, is taken as the score
            names = candidates
        else:
            listed = some_of(candidates or table.columns, ("pass rate", "accuracy", "score", "reward", "success"))
            raise table_error(
                table.path, f"no column name looks like a score; choose one with --score; {listed}", "row 1"
            )
    measured = [name for name in names if any(_has_number(row, name) for _, row in table.rows)]
    if not measured:
        raise table_error(table.path, f"no row has a number in column {names[0]}; choose a column with --score")
    # columns with few rows come last: a training curve is better than a validation that has just begun
    return sorted(measured, key=lambda name: is_short(table, name))


def _axes(table: TableFile) -> list[str]:
    """Columns that may hold the compute, best first."""
    if table.x:
        return [table.x]
    return computes(table.columns)


def is_short(table: TableFile, column: str) -> bool:
    """Whether fewer than `FEW_ROWS` rows after compute 0 have a number in the column."""
    axis = next(iter(_axes(table)), "")
    return sum(_has_number(row, column) and plain_value(row.get(axis)) != 0 for _, row in table.rows) < FEW_ROWS


def one_kind(table: TableFile, options: ColumnOptions) -> TableFile:
    """The table with one kind of rows alone, such as the rows of validations where a column `split` names the kind.

    Rows of validations are preferred. Kinds that follow one another, such as the phases of a run, count as one kind.
    Raises ValueError if several kinds are equally likely to be the validations of the run.
    """
    for column in table.columns:
        if column in dict(options.series) or not _RECORD.fullmatch(column.lower()):
            continue
        names = score_columns(table, options)
        measured = [row for row in table.rows if any(_has_number(row[1], name) for name in names)]
        groups = {kind: rows for (kind,), rows in groups_of(measured, [column]).items()}
        kinds = sorted(groups, key=_kind_rank)
        is_metric = score_rank(kinds[0])
        if len(kinds) < 2 or not (is_metric or _overlap(table, groups.values())):
            continue
        equal = [kind for kind in kinds if _kind_rank(kind) == _kind_rank(kinds[0])]
        if len(equal) > 1 and not is_metric:
            choices = f"{', '.join(equal[:8])}; choose with --series {column}=VALUE"
            raise table_error(table.path, f"the rows differ in column {column}, with the values {choices}")
        layout = f"{table.layout}, rows with {column} = {kinds[0]}, not {', '.join(kinds[1:4])}"
        table = replace(table, rows=tuple(groups[kinds[0]]), layout=layout)
    return table


def groups_of(rows: Rows, columns: Sequence[str]) -> dict[tuple[str, ...], list[tuple[int, Row]]]:
    """Combination of values of `columns` -> the rows with this combination, in the order of the file."""
    groups: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row[1].get(column)) for column in columns), []).append(row)
    return groups


def _overlap(table: TableFile, kinds: Iterable[Rows]) -> bool:
    """Whether the ranges of compute of two kinds of rows overlap."""
    axis = next(iter(_axes(table)), "")
    ranges = sorted((min(values), max(values)) for rows in kinds if (values := _numbers(rows, axis)))
    return not ranges or any(lower[1] > upper[0] for lower, upper in pairwise(ranges))


def _kind_rank(kind: str) -> tuple[int, ...]:
    return score_rank(kind) or (stage(kind), len(SCORES))


def selections(table: TableFile, options: ColumnOptions) -> list[tuple[str, TableFile]]:
    """(name, table) of each run that --series chooses; without --series, of each run that a column identifies."""
    name = table.run or Path(table.path.name.removesuffix(".gz")).stem
    series = options.series or tuple((column, "*") for column in identity_columns(table, FEW_ROWS))
    if not series:
        return [(name, table)]
    columns = [_checked_column(table, column, "--series") for column, _ in series]
    chosen_values = [value for _, value in series]
    groups = {
        values: rows
        for values, rows in groups_of(table.rows, columns).items()
        if all(choice in ("*", value) for choice, value in zip(chosen_values, values))
    }
    if not groups:
        values = sorted({str(row.get(columns[-1])) for _, row in table.rows})[:8]
        raise table_error(
            table.path, f"no row has {columns[-1]} = {chosen_values[-1]}; this column has {', '.join(values)}"
        )
    # the run's name leaves out columns for which the user gave a value: all runs have this value
    starred = [n for n, choice in enumerate(chosen_values) if choice == "*"] or [len(chosen_values) - 1]
    return [("/".join(key[n] for n in starred), replace(table, rows=tuple(rows))) for key, rows in groups.items()]


def identity_columns(table: TableFile, rows_each: int) -> list[str]:
    """The columns that identify a run and have at least `rows_each` rows per value on average."""
    names = [c for c in table.columns if _IDENTITY.fullmatch(c.lower())]
    return [c for c in names if 1 < len(groups_of(table.rows, [c])) <= len(table.rows) / rows_each]


def compute_column(table: TableFile, options: ColumnOptions, score: str) -> tuple[str, float, str]:
    """(column, factor, unit) of the compute. The compute is the column's number times the factor: the value of
    --hours-per-step for a column of steps, else 1."""
    measured = [row for row in table.rows if _has_number(row[1], score)]
    hours = options.hours_per_step
    if options.compute is None:
        column = _axis(table, measured, steps=hours is not None)
    else:
        column = _checked_column(table, options.compute, "--compute")
    unit = unit_of(column)
    units = [(number, str(row["unit"])) for number, row in table.rows if row.get("unit")]
    if column == "compute" and units:
        check_same(table, "unit", units)
        unit = units[0][1]
    elif is_step_name(measured[0][1].get(column)):
        unit = "steps"
    if hours is None:
        return column, 1.0, unit
    if unit != "steps":
        raise ValueError(f"--hours-per-step needs a column of steps, and {column} is in {unit_name(unit)}")
    return column, hours, "gpu_hours"


def _axis(table: TableFile, measured: Rows, *, steps: bool) -> str:
    """The compute column of the rows that have a score. steps: prefer a column of steps.

    Raises ValueError if no column's name looks like a compute.
    """
    names = _axes(table)
    # --hours-per-step multiplies steps, so a column of steps goes before any other axis
    names = (steps and [c for c in names if unit_of(c) == "steps"]) or names
    names = [c for c in names if _grows(_numbers(measured, c))] or names
    if not names:
        listed = some_of(table.columns, ("step", "epoch", "tokens", "hours"))
        raise table_error(
            table.path, f"no column name looks like a compute; choose one with --compute; {listed}", "row 1"
        )
    alike = [c for c in names if unit_of(c) == unit_of(names[0])]
    # of columns in one unit, the one with most numbers is taken: verl's row of step 0 lacks some counters
    return max(alike, key=lambda c: sum(_has_number(row, c) for _, row in measured))


def _grows(values: Sequence[float]) -> bool:
    """Whether a column has numbers that grow: at most a quarter of the numbers is followed by a smaller number."""
    # a column with the hours of each step is named like an axis, but is no axis: the numbers do not grow
    return 0 < len(values) >= 4 * sum(value > successor for value, successor in pairwise(values))


def _checked_column(table: TableFile, name: str, option: str) -> str:
    if name in table.columns:
        return name
    raise table_error(
        table.path, f"{option}: there is no column {name!r}; {some_of(table.columns, (name,))}", "row 1"
    )


def _has_number(row: Row, column: str) -> bool:
    value = row.get(column)
    return isinstance(value, int | float | str) and not is_missing(value)


def is_missing(value: Any) -> bool:
    """Whether a cell is empty, NaN, None or infinite."""
    return bool(_MISSING_CELL.fullmatch(str(value).strip()))


def _numbers(rows: Rows, column: str) -> list[float]:
    """The numbers of a column, without cells that hold no number."""
    cells = (plain_value(row[column]) for _, row in rows if _has_number(row, column))
    return [cell for cell in cells if isinstance(cell, float)]


def check_same(table: TableFile, key: str, values: Sequence[tuple[int, str]]) -> None:
    """Raise ValueError at the first (row, value) pair whose value differs from the first pair's."""
    first, usual = values[0]
    for number, value in values:
        if value != usual:
            raise table_error(table.path, f"{value} has to equal {usual}, as in row {first}", f"row {number}", key)
