"""Read the inputs of the command line into the checked points of runs.

An input is a run folder (its validation.jsonl) or a file of another tool. Invalid data is refused in one line with
file, row, expected and found. `Curve.read` says in one line what was understood; corrections are noted.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.formatting import short_number, unit_name
from megatron_scalerl.fit.noise import HIGHEST_VARIANCE
from megatron_scalerl.fit.sigmoid import Array
from megatron_scalerl.fit.table_file import (
    FEW_ROWS,
    SCORES,
    Row,
    TableFile,
    computes,
    is_reward,
    is_step_name,
    is_time_of_day,
    may_be_score,
    number_in,
    plain,
    read_tables,
    refused,
    score_rank,
    scores,
    some_of,
    stage,
    table_of,
    unit_of,
    words,
)
from megatron_scalerl.record import record

IDENTITY_COLUMNS = (
    *("run", "run_id", "run_name", "series", "name", "figure", "recipe", "experiment", "model", "seed", "group"),
    *("arm", "method", "algorithm", "algo", "variant", "condition", "config", "exp", "exp_name", "experiment_name"),
)
"""Columns that identify a run: a table is read as one run of each value, where each has a few rows."""
RECORD_COLUMNS = (
    *("type", "record_type", "kind", "event", "split", "phase", "stage", "mode", "subset", "metric", "tag", "key"),
    *("dataset", "data_source", "benchmark", "env", "env_id", "task", "is_eval", "is_validation"),
)
"""Columns that say what a row measures: rows of one value are read."""
SEED_COLUMN = "seed"
"""Name of the column with the seed of a run."""
_TOTAL = re.compile(r"\b(?:total|attempted|attempts|n|num problems|problems)\b")
"""In the name of a column with the number of problems, beside which whole numbers are counts."""
MANY_RUNS = 24
"""Runs of one table that are fitted unasked."""
WHY = (
    "a validation comes before training",
    "its name is a score's",
    f"a score of training, as no validation has {FEW_ROWS} rows",
)
"""Why a column is the score, by the stage that its name says."""
AXES = {"console log": "the number at the head of each line", "W&B chart": "the chart's own"}
"""Why a column is the axis, where the layout has one."""
CLOCK = "a time of day; export steps or the relative time, or choose with --compute"
Check = tuple[str, Callable[[float], bool]]
"""(what is expected, whether a number is it)."""
SIZE: Check = ("a whole number >= 1", lambda value: value >= 1 and value % 1 == 0)
VARIANCE: Check = (f"a variance in [0, {HIGHEST_VARIANCE:g}]", lambda value: 0 <= value <= HIGHEST_VARIANCE)
MISSING = frozenset(("", "-", "none", "null", "na", "n/a", "<na>", "nan", "inf", "infinity", "undefined"))
"""Cells that are no number and no mistake, in lower case, a sign apart."""


@record
class ColumnOptions:
    """The command line's options on columns and rows."""

    compute: str | None = None
    """Compute column; None: by its name."""
    score: str | None = None
    """Pass rate column; None: by its name."""
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
    if (path / "recipe.yaml").is_file():
        raise ValueError(f"{path}: expected a run folder with validation.jsonl of a first validation, found none")
    curves = []
    failed = []
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
    return [_selected_curve(*_one_kind(part, options), options, name) for name, part in _selections(table, options)]


def curve_of_rows(rows: Sequence[Mapping[str, Any]], *, name: str) -> Curve:
    """The run of rows of validation.jsonl in memory. Raises ValueError for invalid rows."""
    table = table_of(Path("validation.jsonl"), "run folder", map(dict, rows))
    return _curve(table, ColumnOptions(compute="compute"), name)


def _selected_curve(table: TableFile, kind: str, options: ColumnOptions, name: str) -> Curve:
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


def _scores(table: TableFile, options: ColumnOptions) -> list[str]:
    """Columns that the pass rate may be in, best first; of those that have numbers."""
    if options.score:
        known = [_named(table, options.score, "--score")]
    elif not (known := scores(table.columns)):
        axes = [table.x] if table.x else computes(table.columns)
        rest = [column for column in table.columns if column and column not in axes]
        known = rest if axes and len(rest) == 1 and may_be_score(rest[0]) else []  # gsm8k alone over step
    elif stage(known[0]) != 0 and len(bare := _validations_without_measure(table)) == 1:
        known = [*bare, *known]  # slime's eval/aime beside a training reward
    if not known:
        others = [c for c in table.columns if len(table.columns) < 7 or c not in computes(table.columns)]
        names = some_of(others, ("pass rate", "accuracy", "score", "reward", "success"))
        raise refused(table.path, "a score column (name it with --score)", names, "row 1")
    found = [column for column in known if any(_has_number(row, column) for _, row in table.rows)]
    if not found:
        raise refused(table.path, f"rows with {known[0]}", "none with a number")
    return sorted(found, key=lambda column: _is_short(table, column))


def _is_short(table: TableFile, column: str) -> bool:
    """Whether too few rows after the start have a number in the column."""
    [x, *_] = (table.x, *computes(table.columns)) if table.x else (*computes(table.columns), "")
    return sum(_has_number(row, column) and plain(row.get(x)) != 0 for _, row in table.rows) < FEW_ROWS


def _why(score: str) -> str:
    if score_rank(score) is None and stage(score) != 0:
        return "the only column that can be a score"
    return WHY[stage(score)]


def _validations_without_measure(table: TableFile) -> list[str]:
    """Columns of a validation whose names say no measure, such as eval/aime, with all values in [0, 1]."""
    names = [c for c in table.columns if stage(c) == 0 and may_be_score(c)]
    names = [c for c in names if "rate" not in words(c).split()]
    names = [c for c in names if score_rank(c) is None and c not in computes(table.columns)]
    return [
        c
        for c in names
        if (values := [v for _, row in table.rows if isinstance(v := plain(row.get(c)), float)])
        and 0 <= min(values) <= max(values) <= 1
    ]


def _tells_rows_apart(table: TableFile, column: str) -> bool:
    """Whether a column of words says what a row measures: the rows of one compute differ in it, and in nothing else.

    True for `domain` or `variable` in a table that repeats its steps for each of 2 to 24 values.
    """
    x = table.x or next(iter(computes(table.columns)), None)
    if x is None or column == x or column.lower() in IDENTITY_COLUMNS:
        return False
    cells = [(str(row.get(x)), row.get(column)) for _, row in table.rows if _has_number(row, x)]
    values = {str(value) for _, value in cells}
    as_words = column == "k" or all(isinstance(plain(value), str | bool) for _, value in cells)
    apart = len({(at, str(value)) for at, value in cells}) == len(cells) > len({at for at, _ in cells})
    return as_words and apart and 2 <= len(values) <= min(MANY_RUNS, len(cells) // 2)


def _one_kind(table: TableFile, options: ColumnOptions) -> tuple[TableFile, str]:
    """The rows of one kind of record, a validation's if there is one, and what they are in words.

    Kinds that follow one another, such as the phases of a run, are one. Raises ValueError for several that are equal.
    """
    said = []
    kinds_in = [c for c in table.columns if c.lower() in RECORD_COLUMNS or _tells_rows_apart(table, c)]
    kinds_in += [c for c in table.columns if _names_metrics(table, c)]
    for column in (c for c in kinds_in if c not in dict(options.series)):
        measures = _scores(table, options)
        kinds: dict[str, list[tuple[int, Row]]] = {}
        for number, row in table.rows:
            if any(_has_number(row, measure) for measure in measures):
                kinds.setdefault(str(row.get(column)), []).append((number, row))
        ranked = sorted(kinds, key=_kind_rank)
        if len(ranked) < 2:
            continue
        is_metric = score_rank(ranked[0]) is not None
        if not is_metric and not _overlap(table, list(kinds.values())):
            continue
        best = [kind for kind in ranked if _kind_rank(kind) == _kind_rank(ranked[0])]
        if len(best) > 1 and not is_metric:
            choices = f"{', '.join(best[:8])}; choose with --series {column}=VALUE"
            raise refused(table.path, f"rows of one {column}", choices)
        table = replace(table, rows=tuple(kinds[ranked[0]]))
        said.append(f"rows with {column} = {ranked[0]}, not {', '.join(ranked[1:4])}")
    return table, "; ".join(said)


def _overlap(table: TableFile, kinds: Sequence[Sequence[tuple[int, Row]]]) -> bool:
    """Whether two kinds of rows lie in one range of compute."""
    x = next(iter(computes(table.columns)), None)
    at = [[v for n, row in rows if x and (v := _number(table, n, x, row)) is not None] for rows in kinds]
    ends = sorted((min(values), max(values)) for values in at if values)
    return not ends or any(before[1] > after[0] for before, after in zip(ends, ends[1:]))


def _kind_rank(kind: str) -> tuple[int, ...]:
    return score_rank(kind) or (stage(kind), len(SCORES))


def _selections(table: TableFile, options: ColumnOptions) -> list[tuple[str, TableFile]]:
    """(name, rows) of each run that --series chooses; without it of each run that the table tells apart."""
    name = table.run or Path(table.path.name.removesuffix(".gz")).stem
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
        raise refused(table.path, f"rows with {column} = {value}", f"{column} in {values}")
    if len(groups) > MANY_RUNS and not options.series:
        how = f"{len(groups)}; choose with --series {series[0][0]}=VALUE, or * for all"
        raise refused(table.path, f"at most {MANY_RUNS} runs", how)
    starred = [n for n, (_, value) in enumerate(series) if value == "*"] or [len(series) - 1]
    return [("/".join(key[n] for n in starred), replace(table, rows=tuple(rows))) for key, rows in groups.items()]


def _identity(table: TableFile, rows_each: int) -> list[str]:
    """The columns that tell runs apart, with at least `rows_each` rows of each value on average."""
    found = (c for c in table.columns if c.lower() in IDENTITY_COLUMNS and not _names_metrics(table, c))
    return [c for c in found if 1 < len({str(row.get(c)) for _, row in table.rows}) <= len(table.rows) / rows_each]


def _names_metrics(table: TableFile, column: str) -> bool:
    """Whether `name` names metrics, whose values are in `value`, and no runs."""
    if column.lower() != "name" or "value" not in table.columns:
        return False
    return any(score_rank(name) is not None for name in {str(row.get(column)) for _, row in table.rows})


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
    if len(starts) > 1 and sum(a != b for a, b in zip(at_start, at_start[1:])) > 1:
        starts = starts[-1:]  # the file begins anew
    points, notes = _ordered([point for point, start in zip(found, at_start) if not start], compute)
    if not points:
        raise refused(table.path, f"rows with {compute} > 0", "none")
    for column in _identity(table, 1):
        different = f"{len({str(row.get(column)) for _, row in table.rows})} different {column}"
        notes.append(f"rows of {different} were fitted as one run; choose with --series {column}=VALUE")
    over = f"{compute} x {options.hours_per_step:g} h" if options.hours_per_step is not None else compute
    ends = f"{short_number(points[0].compute)} to {short_number(points[-1].compute)}"
    read = f"read {name}: {table.layout}, {len(points)} points of {score} over {over} ({ends} {unit_name(unit)})"
    if options.score is None and options.compute is None and (table.x or len(table.columns) > 2):
        axis = AXES[table.layout] if table.x else "its name ranks first"
        alike = [column for column in others if (score_rank(column) or ())[:-1] == (score_rank(score) or (0,))[:-1]]
        as_good = f" (as good by its name: {', '.join(alike[:3])})" if alike else ""
        said.append(f"why this score: {_why(score)}{as_good}; why this axis: {axis}")
    short = [column for column in others if _is_short(table, column)]
    if short:
        said.append(f"columns with fewer than {FEW_ROWS} rows: {', '.join(short[:3])}")
    more = f" and {len(others) - 2} more" if len(others) > 2 else ""
    also = f"also there: {', '.join(others[:2])}{more} (--score)" if others else ""
    axes = [column for column in computes(table.columns) if column != compute]
    also += f"{'; ' * bool(also)}other axes: {', '.join(axes[:3])} (--compute)" if axes else ""
    if stage(score) != 0 and options.score is None and (unread := _validations_without_measure(table)):
        said.append(f"validation columns without a measure: {', '.join(unread[:3])} (--score)")
    task = score.removeprefix("pass_rate/") if score.startswith("pass_rate/") else ""
    size = _column_values(table, starts[:1], "generations", SIZE)
    within, at_first = (
        None if task else _column_values(table, rows, "within_variance", VARIANCE, missing=math.nan)
        for rows in (points, starts[:1])
    )
    return Curve(
        name=name,
        source=table.path,
        compute=np.array([p.compute for p in points]),
        pass_rate=np.array([p.pass_rate for p in points]),
        initial=float(np.mean([p.pass_rate for p in starts])) if starts else None,
        prompts=_prompts(table, points, f"prompts/{task}" if task else "prompts"),
        generations=_column_values(table, points, "generations", SIZE),
        initial_generations=None if size is None else int(size[0]),
        within_variance=within,
        initial_within_variance=None if at_first is None else float(at_first[0]),
        truncated_share=_column_values(table, points, "truncated_share"),
        unit=unit,
        notes=tuple(f"{table.path.name}: {note}" for note in notes),
        read="; ".join(text for text in (read + (", R_0" if starts else ""), *said, kind, also) if text),
    )


def _compute(table: TableFile, options: ColumnOptions, score: str) -> tuple[str, float, str]:
    """(column, factor, unit): a compute column with factor 1, a step column with the hours per step."""
    measured = [row for _, row in table.rows if _has_number(row, score)]
    if options.compute is not None:
        column = _named(table, options.compute, "--compute")
    else:
        known = [table.x] if table.x else computes(table.columns)
        known = [c for c in known if any(_has_number(row, c) for row in measured)] or known
        for is_axis in (is_step_name, lambda cell: is_time_of_day("", str(cell))):
            known = known or [c for c in table.columns if all(is_axis(row.get(c)) for row in measured)]
        steps = [c for c in known if unit_of(c) == "steps"]
        usable = known if options.hours_per_step is None else steps or known
        usable = [c for c in usable if _grows([plain(row.get(c)) for row in measured])] or usable
        if not usable:
            names = some_of(table.columns, ("step", "epoch", "tokens", "hours"))
            raise refused(table.path, "a compute column (name it with --compute)", names, "row 1")
        alike = [c for c in usable if unit_of(c) == unit_of(usable[0])]
        column = max(alike, key=lambda c: sum(_has_number(row, c) for row in measured))  # verl's step 0 lacks some
    units = [(n, row["unit"]) for n, row in table.rows if row.get("unit")] if column == "compute" else []
    if units:
        _same(table, "unit", units)
    unit = "steps" if is_step_name(measured[0].get(column)) else unit_of(column)
    unit = str(units[0][1]) if units else unit
    if options.hours_per_step is None:
        return column, 1.0, unit
    if unit != "steps":
        found = f"{column} ({unit_name(unit)})"
        raise ValueError(f"--hours-per-step: expected a column of steps to multiply, found {found}")
    return column, options.hours_per_step, "gpu_hours"


def _grows(values: Sequence[Any]) -> bool:
    """Whether an axis falls between no more than a quarter of its rows, as one of hours per step does not."""
    known = [value for value in values if isinstance(value, float)]
    return 4 * sum(a > b for a, b in zip(known, known[1:])) <= len(known)


def _points(
    table: TableFile, options: ColumnOptions, axis: tuple[str, float], score: str, others: Sequence[str]
) -> tuple[list[_Point], list[str]]:
    """The points of the rows with both numbers, and what was skipped and converted. axis: compute column, factor."""
    compute, scale = axis
    found, skipped = [], 0
    for number, row in table.rows:
        x, y = (_number(table, number, column, row) for column in (compute, score))
        if x is None or y is None:
            skipped += 1
            continue
        if x < 0 or is_time_of_day(compute, x):
            expected = "compute >= 0" if x < 0 else "compute since the start"
            raise refused(table.path, expected, f"{x:g}" if x < 0 else CLOCK, f"row {number}", compute)
        found.append(_Point(x * scale, y, row, number))
    if not found:
        raise refused(table.path, f"rows with {score} and {compute}", "none")
    said, (low, high) = [], options.score_range or (0.0, 100.0 if _is_percent(score, found) else 1.0)
    if (low, high) != (0.0, 1.0):
        said.append(f"{low:g} to {high:g} mapped to 0 to 1" if options.score_range else "percent, divided by 100")
    found = [point._replace(pass_rate=_rounded((point.pass_rate - low) / (high - low))) for point in found]
    wrong = next((point for point in found if not 0.0 <= point.pass_rate <= 1.0), None)
    if wrong is not None:
        hint = f"; other columns: {', '.join(others[:2])} (--score)" if others else ""
        if is_reward(score) and options.score_range is None:
            hint += "; or map its range with --score-range=LO,HI"
        what = f"{wrong.pass_rate:g}{hint}"
        raise refused(table.path, "a pass rate in [0, 1]", what, f"row {wrong.number}", score)
    if skipped:
        said.append(f"skipped rows: {skipped} without a number")
    return found, said


def _rounded(pass_rate: float) -> float:
    """0 or 1 for what exceeds them by no more than the rounding of a mean in single precision."""
    nearest = min(max(pass_rate, 0.0), 1.0)
    return nearest if abs(pass_rate - nearest) < 1e-5 else pass_rate


def _is_percent(score: str, points: Sequence[_Point]) -> bool:
    """Whether values in [0, 100] are percent: a sign says so, or most are above 1 and the name is no reward's."""
    values = [point.pass_rate for point in points]
    if not 0 <= min(values) <= max(values) <= 100:
        return False
    if any(str(point.row.get(score)).endswith("%") for point in points):
        return True
    if re.search(r"%|percent|pct", score.lower()):
        return max(values) > 1
    if all(value % 1 == 0 for value in values) and any(_TOTAL.search(words(key)) for key in points[0].row):
        return False  # counts beside their total
    any_range = is_reward(score) and (max(values) <= 25 or "reward" in score.lower())
    return sum(value > 1 for value in values) > len(values) / 2 and not any_range


def _ordered(points: list[_Point], compute: str) -> tuple[list[_Point], list[str]]:
    """The points in the order of their compute, one of each, and what was corrected.

    Of a compute that a resumed run has again its last row counts. Where most have several rows one after another,
    or rows are single answers, their mean counts.
    """
    went_back = any(a.compute > b.compute for a, b in zip(points, points[1:]))
    latest = {point.compute: point for point in points}
    repeated = {point.compute for point in points if latest[point.compute] is not point}
    answers = len(points) > 2 * len(latest) and {point.pass_rate for point in points} <= {0.0, 1.0}
    if not answers and (not repeated or went_back or 2 * len(repeated) < len(latest)):
        notes = [f"rows were not sorted by {compute}; they were sorted"] if went_back else []
        if repeated:
            notes = [f"{len(points) - len(latest)} rows have a {compute} that a later row has again; the last counts"]
        lineage = sorted({point.compute for point in _lineage(points)})
        beyond = len(latest) - len(lineage)
        if beyond:
            notes.append(f"{beyond} rows of an attempt that a later one replaced were left out")
        return [latest[at] for at in lineage], notes
    rates: dict[float, list[float]] = {}
    for point in points:
        rates.setdefault(point.compute, []).append(point.pass_rate)
    means = [latest[at]._replace(pass_rate=float(np.mean(rates[at]))) for at in sorted(latest)]
    return means, [f"several rows of one {compute}: their mean was fitted"]


def _lineage(points: Sequence[_Point]) -> Sequence[_Point]:
    """The points without what the attempt before a resume had beyond, once the resumed run has gone on.

    All points, where they go back to a compute that was not there before: they are unsorted.
    """
    kept: list[_Point] = []
    for point, after in zip(points, [*points[1:], None]):
        if kept and point.compute < kept[-1].compute:
            if point.compute not in {before.compute for before in kept}:
                return points
            if after and after.compute > point.compute:
                kept = [before for before in kept if before.compute < point.compute]
        kept.append(point)
    return kept


def _named(table: TableFile, name: str, option: str) -> str:
    if name in table.columns:
        return name
    raise refused(table.path, f"column {name!r} ({option})", some_of(table.columns, (name,)), "row 1")


def _has_number(row: Row, column: str) -> bool:
    value = row.get(column)
    if isinstance(value, int | float):
        return -math.inf < value < math.inf
    return isinstance(value, str) and not _is_missing(value)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lstrip("+-").lower() in MISSING)


def _number(table: TableFile, number: int, column: str, row: Row) -> float | None:
    """The number in a cell; None for an empty one, NaN and inf. Raises ValueError for other text."""
    value = row.get(column)
    if _is_missing(value):
        return None
    try:
        parsed = number_in(value)
    except (TypeError, ValueError, OverflowError):
        expected, found = (
            ("compute since the start", CLOCK)
            if is_time_of_day(column, value)
            else ("a finite number", f"{value!r:.80}")
        )
        raise refused(table.path, expected, found, f"row {number}", column) from None
    return parsed if math.isfinite(parsed) else None


def _prompts(table: TableFile, points: list[_Point], key: str) -> int | None:
    """How many there are: one number, as pass rates over different prompts are different curves."""
    found = _column_values(table, points, key, SIZE)
    if found is None:
        return None
    _same(table, key, [(point.number, f"{value:.0f}") for point, value in zip(points, found)])
    return int(found[0])


def _same(table: TableFile, key: str, values: Sequence[tuple[int, object]]) -> None:
    """Raise ValueError at the first of the (row, value) whose value is not that of the first one."""
    first, expected = values[0]
    for number, value in values:
        if value != expected:
            raise refused(table.path, f"{expected} as in row {first}", value, f"row {number}", key)


def _column_values(
    table: TableFile, points: list[_Point], key: str, check: Check | None = None, *, missing: float | None = None
) -> Array | None:
    """[n] numbers of a column; None where none, or without `missing` one, is there. Raises ValueError for others."""
    numbers = [_number(table, point.number, key, point.row) for point in points if key in table.columns]
    if all(value is None for value in numbers) or (missing is None and None in numbers):
        return None
    for point, value in zip(points, numbers):
        if check and value is not None and not check[1](value):
            raise refused(table.path, check[0], f"{value:g}", f"row {point.number}", key)
    return np.array([missing if value is None else value for value in numbers], dtype=float)
