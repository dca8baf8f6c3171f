"""Read the records of training runs, written by one of many tools, into tables with named columns.

`read_tables` knows a layout by the content of a file, not by the suffix: CSV (also with tabs or semicolons), the
CSV of a W&B chart, JSON, JSON lines, trainer_state.json, TensorBoard's event files and exports, Parquet, and console
logs. Any file may be compressed with gzip. Rows keep the number that a spreadsheet shows (the header is row 1), so
that an error can name the row.

`computes` and `scores` rank columns by the names in verl, TRL, OpenRLHF, SkyRL, tinker-cookbook, prime-rl, W&B and
TensorBoard.

JSONL is read here and not by `checkpoints.jsonl`: the forecast depends neither on msgspec nor on other packages of
the project, and the exports of other tools may contain a byte-order mark and blank lines.
"""

import ast
import csv
import gzip
import io
import json
import re
import warnings
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from megatron_scalerl.record import record

FOLDER = ("trainer_state.json", "checkpoint-*/trainer_state.json", "metrics.jsonl")
"""Patterns of the files that are looked for in a folder, in this order; of several checkpoints, the last is read."""
WRAPPERS = ("data", "metrics", "logs", "log", "values", "scalars")
"""Keys of objects that are no part of a metric's name: verl's file logger writes {"step": 1, "data": {...}}."""
FEW_ROWS = 3
"""Number of rows below which neither a run nor a column can be fitted."""
TABLE_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv")
"""Suffixes of files that are never read as the output of a console."""
_ANSI = r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)"
_RAY = r"\s*\([\w.:/ -]*\bpid=[^()]*\)\s?"
_STEP_LINE = re.compile(
    r"(?:\bEvaluated (\S+) \()?\b[Ss]tep[: ]\s*(\d{1,15})\)?\s+[-|]\s(.*?)(?=\b[Ss]tep[: ]\s*\d+\)?\s+[-|]\s|$)"
)
"""Pattern of a printed line with the metrics of one step.

verl: `step:5 - critic/score/mean:0.1 - actor/lr:1e-06`; prime-rl: `Step 5 | 9.1s | Reward 0.1` of training,
`Evaluated math (Step 5) | Reward 0.1` of a validation."""
_CONTINUED = r"\s*(?:- )?(?=.*(?:\S:[-.\dn]| - ))\S+(?: - \S+)*(?: -)?\s*"
"""Pattern of a line that can continue a step line which a terminal has wrapped."""
_NUMBER = r"((?:[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)|None)%?)"
_PAIR = rf"(?:^|\s[-|](?=\s))\s*((?!\s)(?:(?!\s[-|](?:\s|$)).)+?)(?:\s*:\s*|\s+){_NUMBER}(?![\w.:/@,])"
"""Pattern of the name and number of a metric in a step line; `9.1s` is no number."""
_NUMPY = r"\b(?:np|numpy|torch)?\.?(?:float|int|tensor|array)\d*\(([^(),\n]*)[^()\n]*\)"
_LITERAL = r"(?:(?:\b|_)(?:[Ss]tep|rollout|iteration|eval|passrate) (\d{1,15})(?:, eval_metrics)?: )?(\{['\"].*\})"
"""Pattern of a printed dict.

transformers: `{'loss': 0.1, 'reward': 0.5, 'epoch': 0.01}`. slime: `rollout 5: {'rollout/raw_reward': 0.1}`."""
_HEADING = r"\b[Ss]tep (\d{1,15})(?:/\d+)?(?: done\.)?\W*$"
_QUOTE = r"\s*['\"]?"
_POINT = rf"(?:[•*│{{,]{_QUOTE}|^\s*['\"])([^'\"│:•{{}},]*\w)['\"]?\s*[:│]{_QUOTE}{_NUMBER}['\"]?(?=\s*(?:[,}}│]|$))"
"""Pattern of a name and a number below a heading. NeMo-RL: `• Avg Reward: 0.1` below `===== Step 5/100 =====`; SkyRL:
`'reward/avg_raw_reward': '0.1',` below `Step 5:`; AReaL and tinker-cookbook: cells of a table."""
STAGES = (
    r"val|valid|validation|eval|evaluation|test|dev|heldout|held out",
    r"",
    r"train|training|trainer|critic|actor|rollouts?|policy",
)
"""Patterns of the words in a column's name that say to which stage the column belongs: validation, not stated,
training; in order of preference.

`words` separates the words of a name by one space: `val-core/math/acc/mean@16` is "val core math acc mean@16"."""
SCORES = (
    r"pass ?rate",
    r"acc|accuracy|accuracies|correct|correctness|exact match|em",
    r"(?:mean|avg|acc|pass)@\d+",
    r"success|success rate|solve rate|solved|win rate",
    r"scores?",
    r"(?:pass|maj|best|cons)@\d+",
    r"rewards?|returns?",
    r"^value$",
)
"""Patterns of words in the name of a score, in order of preference within a stage of `STAGES`."""
_BEST_OF = r"\b(?:best|maj|cons|pass)@(?!1\b)"
_NO_SCORE = (
    r"\b(?:std|stderr|var|variance|min|max|loss|len|length|tokens?|time|seconds?|runtime|count|num|n|entropy|kl|lr|grad"
    r"|norm|clip|format|pars\w+|json|xml|tool|advantages?|best(?!@)|worst|truncat\w+|weight|index|size|penalty|zero"
    r"|threshold|target|id|gap|diff|delta|ratio|bonus|err|errors?|wer|cer|fail\w*|incorrect\w*|wrong\w*|lose|lost"
    r"|lengths|losses|hack\w*|hallucinat\w*|invalid|timeouts?|baseline|ppl|perplexity|mfu|timings?|perf|throughput"
    r"|mem|memory|gb|mb|seqlen|latency|gradients?|ms|filtering|dropped|repetition|solved (?:all|none|some))\b|\bs$"
)
_FIRST = r"\b(?:core|raw rewards?)\b"
_WHOLE_WORDS = r"\b(?:all|total|overall|average)\b"
_AT = r"(?:(?:train|training|trainer|eval|val|progress)[/_])?"
COMPUTES: tuple[tuple[str, str | None], ...] = (
    (r"(?:.*[^a-z])?gpu[-_ ]?(?:hours?|h)(?:[^a-z].*)?", "gpu_hours"),
    (r"device[-_ ]?hours?", "device_hours"),
    (r"compute|hours|flops", None),
    (_AT + r"(?:global|opt\w*|grad\w*|grpo|ppo|rl|policy|train|training|update|env|time)[-_ ]?steps?", "steps"),
    (_AT + r"steps?", "steps"),
    (r"_step", "steps"),
    (r"(?:checkpoint|ckpt)(?:_step)?", "steps"),
    (_AT + r"(?:batch|iteration|iter|update|round|episode)s?", None),
    (_AT + r"(?:(?:total|cumulative|num|input)_)*(?:tokens|samples)(?:_seen)?", None),
    (_AT + r"epochs?", None),
    (r"_?runtime|relative time.*|elapsed(?![-_ ]?(?:m|h|d)).*|(?:train_|wall_(?:time_)?)?seconds", "seconds"),
    (r".*[-_ ]hours?", None),
)
"""Patterns of a compute column's name (whole, in lower case) with the unit, in order of preference.

The unit None stands for the name of the column."""
_DAYTIME = r"(?i:wall[-_ ]?time|_?timestamp|(?:date)?time|date|created[-_ ]?at)"
_THOUSANDS = r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?"
_STEP_NAME = re.compile(r"(?:.*[-_/ ])?(?:checkpoint|ckpt|step|iter|iteration|epoch)[-_ ]?(\d+)/?", re.IGNORECASE)
"""The name of a checkpoint: checkpoint-100, runs/a/global_step_100, step_000100."""

Row = dict[str, Any]


@record
class TableFile:
    """A table with the rows of one or several runs; values are text (CSV) or JSON values."""

    path: Path
    """Path of the file."""
    layout: str
    """Kind of file, in words."""
    columns: tuple[str, ...]
    """Names of the columns, in the file's order."""
    rows: tuple[tuple[int, Row], ...]
    """(row number in the file, column -> value) of every row that is not blank. A row may lack a column."""
    run: str | None = None
    """Name of the run, if the file or folder states a name; else None."""
    x: str | None = None
    """The column of the horizontal axis, if the layout states an axis; else None."""


def table_error(path: Path, problem: str, *place: str) -> ValueError:
    """An error whose message names, in one line, the file, the place in the file and the problem."""
    return ValueError(": ".join([str(path), *place, problem]))


def read_tables(path: Path) -> list[TableFile]:
    """The tables of a file or folder, one for each run. Raises ValueError, one line, if there is no table."""
    if not path.exists():
        raise table_error(path, "does not exist; give a run folder or a CSV, JSONL or JSON file")
    for pattern in FOLDER:
        files = sorted(path.glob(pattern), key=lambda file: [int(n) for n in re.findall(r"\d+", file.parent.name)])
        if files:
            return [replace(table, run=path.resolve().name) for table in read_tables(files[-1])]
    if path.is_dir() or "tfevents" in path.name:
        return _from_tensorboard(path)
    data = path.read_bytes()
    # the content decides, not the suffix: pandas may compress a .csv, and tee may write a log to a .txt
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise table_error(path, f"the gzip file is damaged: {error}") from None
    if data[:4] == b"PAR1":
        from pyarrow import BufferReader, parquet

        return [table_of(path, "Parquet", enumerate(parquet.read_table(BufferReader(data)).to_pylist(), 1))]
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    if suffix not in TABLE_SUFFIXES:
        # damaged characters are replaced: a worker that is killed may leave half a character in a console's output
        logged = _from_console(path, data.decode(encoding, errors="replace"))
        if logged.rows:
            return [logged]
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise table_error(path, f"byte {error.object[error.start]:#04x} is not UTF-8; convert the file") from None
    start = text.lstrip()[:1]
    if not start:
        raise table_error(path, "the file is empty; it has to have a header and rows")
    if suffix in (".log", ".out", ".err"):
        raise table_error(path, "no line has metrics, such as step:5 - reward:0.1 or {'reward': 0.1, 'epoch': 1}")
    if suffix in (".jsonl", ".ndjson"):
        return [_from_jsonl(path, text)]
    if start in "[{" or suffix == ".json":
        return [_from_json(path, text)]
    return _from_csv(path, text)


def table_of(path: Path, layout: str, rows: Iterable[tuple[int, Any]], **fields: Any) -> TableFile:
    """A table of (row number in the file, row). fields: further fields of `TableFile`.

    Raises ValueError for a row that is not an object.
    """
    numbered = []
    for number, row in rows:
        if not isinstance(row, dict):
            raise table_error(
                path, f"the row is of type {type(row).__name__}; it has to be an object", f"row {number}"
            )
        numbered.append((number, _flat(row)))
    columns = tuple(dict.fromkeys(name for _, row in numbered for name in row))
    return TableFile(path=path, layout=layout, columns=columns, rows=tuple(numbered), **fields)


def _from_csv(path: Path, text: str) -> list[TableFile]:
    text = re.sub(r"(?m)^#.*$", "", text)
    first = text.lstrip().partition("\n")[0]
    # only the header shows the delimiter, because cells may have decimal commas
    delimiter = max(",\t; ", key=lambda mark: (mark != " " and mark in first, first.count(mark)))
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=delimiter == " ")
    try:
        numbered_rows = [(lines.line_num, [cell.strip() for cell in cells]) for cells in lines if any(cells)]
    except csv.Error as error:
        raise table_error(path, f"the row cannot be split into cells: {error}", f"row {lines.line_num}") from None
    (_, header), *rows = numbered_rows or [(1, [""])]
    duplicates = [name for name in header if name and header.count(name) > 1]
    problem = ""
    if len(header) < 2:
        problem = f"the header has the one column {header[0][:80]!r}; a table has at least two"
    elif duplicates:
        problem = f"column {duplicates[0]!r} occurs {header.count(duplicates[0])} times; names have to differ"
    elif not rows:
        problem = "there are no rows below the header"
    if problem:
        raise table_error(path, problem, "row 1")
    for number, cells in rows:
        if len(cells) != len(header):
            raise table_error(
                path, f"the row has {len(cells)} cells, and the header has {len(header)}", f"row {number}"
            )
    if delimiter != "," and not any(re.fullmatch(r"-?\d+\.\d+%?", cell) for _, cells in rows for cell in cells):
        rows = [(n, [re.sub(r"^(-?\d*),(\d+%?)$", r"\1.\2", cell) for cell in cells]) for n, cells in rows]
    table = table_of(path, "table", ((number, dict(zip(header, cells))) for number, cells in rows))
    if all(" - " in name for name in header[1:]):
        return _chart_runs(table)
    return [table]


def _chart_runs(table: TableFile) -> list[TableFile]:
    """Split the table of a W&B chart into one table for each run.

    The chart has the column of the horizontal axis, and for each run the columns `RUN - METRIC`, `RUN - METRIC__MIN`
    and `RUN - METRIC__MAX`. RUN may contain " - ".
    """
    x = table.columns[0]
    runs: dict[str, dict[str, str]] = {}
    for column in table.columns[1:]:
        run, _, metric = column.rpartition(" - ")
        if not metric.endswith(("__MIN", "__MAX")):
            runs.setdefault(run, {x: x})[column] = metric
    tables = []
    for run, metrics in runs.items():
        rows = tuple((n, {metric: row[column] for column, metric in metrics.items()}) for n, row in table.rows)
        tables.append(replace(table, layout="W&B chart", columns=tuple(rows[0][1]), rows=rows, run=run, x=x))
    return tables


def _problem(error: ValueError | RecursionError) -> str:
    """The message of an error in JSON; for numbers with thousands of digits, Python's advice to programmers is left
    out."""
    return getattr(error, "msg", str(error).partition(";")[0])


def _from_jsonl(path: Path, text: str) -> TableFile:
    rows = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows[number] = json.loads(line)
        except (ValueError, RecursionError) as error:
            if rows and text.endswith(line):
                # an incomplete last line is left out: the line is still being written, or a crash truncated the file
                break
            raise table_error(path, f"the line is no JSON object: {_problem(error)}", f"row {number}") from None
    return table_of(path, "JSON lines", rows.items())


def _from_json(path: Path, text: str) -> TableFile:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _from_jsonl(path, text)
    layout, rows = _rows_of(value)
    if not rows:
        problem = f"the JSON has no list of rows; it is of type {type(value).__name__}"
        if value and isinstance(value, dict):
            problem += f" with {', '.join(list(value)[:8])}"
        raise table_error(path, problem)
    if all(isinstance(row, list) and len(row) == 3 for row in rows):
        layout = "TensorBoard's JSON"
        rows = [dict(zip(("Wall time", "Step", "Value"), row)) for row in rows]
    return table_of(path, layout, enumerate(rows, start=1))


def _rows_of(value: Any) -> tuple[str, list[Any]]:
    """(layout, rows) of a JSON value: a list of rows, an object with a list of rows for one or each run, or an object
    of columns (name -> list of values). The rows are empty for any further value."""
    if not isinstance(value, dict):
        return "JSON", value if isinstance(value, list) else []
    if "log_history" in value:  # the one list with metrics
        return "trainer_state.json", value["log_history"]
    columns = {key: [*cells.values()] if isinstance(cells, dict) else cells for key, cells in value.items()}
    columns = {key: cells for key, cells in columns.items() if isinstance(cells, list) and cells}
    lists = {key: rows for key, rows in columns.items() if all(isinstance(row, dict) for row in rows)}
    names = {key: {"run": key} if len(lists) > 1 else {} for key in lists}
    if lists:
        return f"JSON, {', '.join(lists)}", [names[key] | row for key, rows in lists.items() for row in rows]
    if len({*map(len, columns.values())}) != 1:
        return "JSON", []
    return "JSON columns", [dict(zip(columns, cells)) for cells in zip(*columns.values())]


def _flat(row: Row) -> Row:
    """The row with the keys of nested objects joined by "/"."""
    flat = {}
    for key, value in row.items():
        if not isinstance(value, dict):
            flat[key] = value
        elif key in WRAPPERS:
            flat |= _flat(value)
        else:
            flat |= {f"{key}/{name}": cell for name, cell in _flat(value).items()}
    return flat


def _from_console(path: Path, text: str) -> TableFile:
    """The table of the metrics in a console's output; the table has no rows if there are no metrics.

    Metrics may be printed as step lines, as dicts, or one by one below headings. Only the first of the kinds with at
    least `FEW_ROWS` rows is read, because a log with step lines may print its configuration as a dict.
    """
    lined = []
    literals = []
    headed: list[tuple[int, Row]] = [(0, {})]
    for number, line in _console_lines(text):
        for validation, step, metrics in _STEP_LINE.findall(line):
            stem = validation and f"eval/{validation}/"
            pairs = {stem + name: cell for name, cell in re.findall(_PAIR, metrics)}
            lined.append((number, {"step": int(step)} | pairs))
        # a printed dict: SkyRL, OpenRLHF and slime print an evaluation as a separate dict, which becomes a row
        for step, literal in re.findall(_LITERAL, line):
            row = _numbers_of(literal)
            if step:
                row["step"] = int(step)
            if computes(row):
                literals.append((number, row))
        headed += [(number, {"step": int(step)}) for step in re.findall(_HEADING, line)]
        # NeMo-RL prints a validation, with bullets, before the first heading; a line there without bullets is skipped
        if len(headed) > 1 or "•" in line:
            headed[-1][1].update(re.findall(_POINT, line))
    if len(headed) > 1:
        headed[0][1]["step"] = max(0, headed[1][1]["step"] - 1)
    kinds = [[(number, row) for number, row in rows if len(row) > 1] for rows in (lined, literals, headed)]
    # a kind with fewer rows than `FEW_ROWS` may be a printed configuration, so a later kind with more rows is taken
    rows = next((kind for kind in kinds if len(kind) >= FEW_ROWS), max(kinds, key=len))
    axis = "step" if all("step" in row for _, row in rows) else None
    return table_of(path, "console log", rows, x=axis)


def _console_lines(text: str) -> list[tuple[int, str]]:
    """(number, text) of the lines, without color codes and Ray's prefixes; parts of a wrapped step line are
    joined."""
    lines = [(0, "")]
    for number, line in enumerate(re.sub(_NUMPY, r"\1", re.sub(_ANSI, "", text)).split("\n"), start=1):
        for part in line.rstrip("\r").split("\r"):
            # prefixes are removed first, since Ray prefixes every part of a line that a terminal has wrapped
            part = re.sub(_RAY, "", part, count=1)
            start, beginning = lines[-1]
            is_wrapped = _STEP_LINE.search(beginning) and not _STEP_LINE.search(part)
            if is_wrapped and re.fullmatch(_CONTINUED, part):
                separator = " " if beginning.endswith(" -") or part.startswith("- ") else ""
                lines[-1] = start, beginning + separator + part
            else:
                lines.append((number, part))
    return lines


def _numbers_of(literal: str) -> Row:
    """The numbers of an object in Python's or JSON's notation; empty for text that is no object."""
    try:
        # Python's warnings about invalid escapes in printed strings are silenced
        with warnings.catch_warnings(action="ignore"):
            value = ast.literal_eval(re.sub(r"-?\b(?:nan|NaN|inf|null)\b", "None", literal))
        row = _flat(value)
    except (ValueError, SyntaxError, TypeError, AttributeError, MemoryError, RecursionError):
        return {}
    return {str(key): cell for key, cell in row.items() if isinstance(plain_value(cell), float)}


def _from_tensorboard(path: Path) -> list[TableFile]:
    """One table for each folder in `path`, or `path` itself, that has TensorBoard's event files."""
    files = sorted(path.rglob("*tfevents*")) if path.is_dir() else [path]
    if not files:
        raise table_error(path, f"the folder has neither validation.jsonl nor {', '.join(FOLDER)} nor event files")
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ModuleNotFoundError:
        raise table_error(path, "event files need the package tensorboard; pip install tensorboard") from None
    folders: dict[Path, list[Row]] = {}
    latest: dict[tuple[Path, int], Row] = {}
    for file in files:
        rows = folders.setdefault(file.parent, [])
        for event in EventFileLoader(str(file)).Load():  # the loader converts a scalar to a tensor
            for value in event.summary.value:
                number = None
                array = make_ndarray(value.tensor)
                if array.size == 1 and array.dtype.kind in "fi":
                    number = float(array.item())
                row = latest.get((file.parent, event.step), {value.tag: None})
                if value.tag in row:  # logged again after a resume: a new row
                    row = latest[file.parent, event.step] = {"step": event.step}
                    rows.append(row)
                row[value.tag] = number
    tables = []
    for folder, rows in folders.items():
        run = str(folder.relative_to(path)) if path.is_dir() and folder != path else folder.resolve().name
        tables.append(table_of(path, "event files", enumerate(rows, start=1), run=run))
    return tables


def words(name: str) -> str:
    """The words of a column's name in lower case, set apart by one space; pass_at_1 and pass1 are pass@1."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    text = re.sub(r"[^a-z0-9@]+", " ", spaced.lower()).strip()
    return re.sub(r"\b(?:(pass|avg|mean|maj|best|acc) at |(pass) ?)(\d+)\b", r"\1\2@\3", text)


def stage(name: str) -> int:
    """Rank of a column's stage by the name: 0 for a validation, 2 for training, 1 for a name that says neither."""
    text = words(name)
    return next((n for n in (0, 2) if re.search(rf"\b(?:{STAGES[n]})\b", text)), 1)


def may_be_score(name: str) -> bool:
    """Whether a name may be a score: False for names of losses, lengths, spreads and similar metrics."""
    return not re.search(_NO_SCORE, words(name))


def score_rank(name: str) -> tuple[int, ...]:
    """Sort key of a score's name, lowest for the best score; empty for a name that is not a score.

    The parts of the key: `stage`; 0 for verl's core metrics and slime's raw reward (slime also logs a normalized
    reward); index of the measure in `SCORES`; 0 for a name with a word such as total or overall; number of spaces in
    `words`.
    """
    text = words(name)
    measures = [n for n, pattern in enumerate(SCORES) if re.search(rf"\b(?:{pattern})\b", text)]
    if not measures or not may_be_score(name):
        return ()
    # a rate over the best of k answers is above the pass rate, so such a name ranks with pass@k
    if re.search(_BEST_OF, text):
        measures = [5]
    return stage(name), not re.search(_FIRST, text), measures[0], not re.search(_WHOLE_WORDS, text), text.count(" ")


def scores(names: Iterable[str]) -> list[str]:
    """The names of score columns, in order of preference; names of equal rank in the given order.

    The name of a validation that names no measure of `SCORES`, such as slime's eval/aime, comes after names of
    validations that do, and before names of training.
    """
    ranks = {name: score_rank(name) for name in names}
    for name, rank in ranks.items():
        if not rank and stage(name) == 0 and may_be_score(name) and "rate" not in words(name).split():
            ranks[name] = 0, 2
    return sorted(filter(ranks.get, ranks), key=ranks.__getitem__)


def unit_of(column: str) -> str:
    """Unit of a compute column: "steps", "seconds", "gpu_hours", "device_hours", else the column's own name."""
    return next((unit for pattern, unit in COMPUTES if re.fullmatch(pattern, column.lower())), None) or column


def computes(names: Collection[str]) -> list[str]:
    """The names of compute columns (`COMPUTES`), in order of preference."""
    return [name for pattern, _ in COMPUTES for name in names if re.fullmatch(pattern, name.lower())]


def plain_value(cell: Any) -> Any:
    """The number in a cell, such as 12, "0.3", "12%", "1,200" and "checkpoint-100"; else the cell."""
    if isinstance(cell, bool):
        return cell
    digits = cell
    if isinstance(cell, str):
        digits = cell.strip().removesuffix("%")
        if re.fullmatch(_THOUSANDS, digits):
            digits = digits.replace(",", "")
        elif step := _STEP_NAME.fullmatch(digits):
            digits = step[1]
    try:
        return float(digits)
    except (TypeError, ValueError, OverflowError):
        return cell


def is_step_name(cell: Any) -> bool:
    """Whether a cell is the name of a checkpoint with the step, such as checkpoint-100."""
    return bool(_STEP_NAME.fullmatch(str(cell).strip()))


def is_time_of_day(name: str, value: float) -> bool:
    """Whether a number of seconds is a date (seconds since 1970), not the time since a run's start."""
    return value > 1e9 and bool(re.fullmatch(_DAYTIME, name))


def some_of(names: Sequence[str], targets: Sequence[str]) -> str:
    """Text that lists up to six columns; of more columns, the three with names nearest to the targets."""
    names = [*filter(None, names)]
    if len(names) <= 6:
        return f"the columns are {', '.join(names) or 'none'}"

    def nearness(name: str) -> float:
        return max(SequenceMatcher(None, words(name), target).ratio() for target in targets)

    return f"the columns with the nearest names: {', '.join(sorted(names, key=nearness)[:-4:-1])}"
