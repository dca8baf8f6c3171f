"""Readers for the rows of a prompts file: JSON, JSON lines, CSV, Parquet, or a Hugging Face dataset folder."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

from megatron_scalerl.record import record

LISTED = 10
"""Number of skipped rows that a report lists in full."""
NO_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json")
"""Files of a dataset folder that hold no rows."""
SHARD_NAME = re.compile(r"^(?P<split>.+)-\d+-of-\d+(-[0-9a-f]{16})?$")
"""Matches the file names of shards on the Hugging Face hub, such as `train-00000-of-00002` of the split `train`."""
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev")
"""A file with a name in this list is the split of that name; a file with any other name is a part of `train`."""
MOST_TIMES = 200
"""Largest accepted ratio of a compressed file's content to the file's size."""
LEAST_BOUND = 1 << 28
"""Size of content (bytes) that every compressed file may have, whatever the ratio."""


@record
class Row:
    """A row of a prompts file."""

    where: str
    """The file, and the number of the line or row (from 1), for error messages."""
    values: dict[str, Any]
    """Value of each column."""
    problem: str = ""
    """The reason why the row cannot be read, empty for a readable row."""

    def readable(self) -> Row:
        """Return this row. Raises ValueError, with file and line, if the row could not be read."""
        if self.problem:
            raise ValueError(f"{self.where}: {self.problem}")
        return self


def read_rows(path: str | Path, split: str | None = None) -> Iterator[Row]:
    """The rows of a file whose ending is in `READERS`, or of a folder.

    A folder was written by `datasets.save_to_disk` or contains files with endings in `READERS`; `split` selects among
    several splits. An invalid line becomes a Row with `problem`. Raises ValueError, in one line, for a missing path,
    a file with an ending that is not in `READERS`, an invalid file, and several splits without `split`.
    """
    path = Path(path)
    if path.is_dir():
        yield from _read_folder(path, split)
    elif path.is_file():
        yield from _read_file(path)
    else:
        raise ValueError(f"{path}: there is no such file or folder of prompts")


def _check_size(path: Path, nbytes: int) -> None:
    """Raises ValueError if `nbytes`, the content so far, exceeds the bound for a compressed file of this size."""
    limit = max(LEAST_BOUND, MOST_TIMES * path.stat().st_size)
    if nbytes > limit:
        raise ValueError(f"{path}: the unpacked content exceeds {limit:,} bytes, too much for a file of this size")


def _opened(path: Path) -> io.BufferedReader | gzip.GzipFile:
    """Open a file, through gzip if the name ends in .gz. Raises ValueError if the unpacked content is too large."""
    if path.suffix != ".gz":
        return path.open("rb")
    with gzip.open(path) as file:
        # the size is checked before any line is read, since one line may be the whole file
        while file.read(1 << 20):
            _check_size(path, file.tell())
    return gzip.open(path)


def _read_file(path: Path) -> Iterator[Row]:
    if not (kind := _kind(path)):
        raise ValueError(
            f"{path}: this kind of file is not supported; file names have to end in {', '.join(READERS)}"
        )
    try:
        yield from READERS[kind](path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: the gzip file is damaged: {error}") from None


def _kind(path: Path) -> str:
    """The ending of a readable file's name, empty for any other file."""
    return next((kind for kind in READERS if path.name.endswith(kind)), "")


def _read_json(path: Path) -> Iterator[Row]:
    """The rows of a JSON array, of the array `data` of an object, or of JSON lines."""
    try:
        with _opened(path) as file:
            content = json.load(file)
    except (ValueError, RecursionError):
        content = None
    # an object over several lines is one row; a file of JSON lines has failed to load above, at the second line
    if isinstance(content, dict):
        content = content["data"] if isinstance(content.get("data"), list) else [content]
    if not isinstance(content, list):
        yield from read_json_lines(path)
        return
    for number, value in enumerate(content, start=1):
        yield _row(f"{path}: row {number}", value)


def _row(place: str, value: Any) -> Row:
    """A row from a JSON object, or from a JSON list of objects, which become the columns "0", "1" ..."""
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        value = dict(zip(map(str, range(len(value))), value))
    if not isinstance(value, dict):
        return Row(where=place, values={}, problem=f"the row is a {type(value).__name__}; it has to be a JSON object")
    return Row(where=place, values=value)


def _read_csv(path: Path) -> Iterator[Row]:
    """The rows of a CSV file. All values are texts: an answer 007 stays 007."""
    # csv limits a field to 128 KiB by default, and unit tests are longer
    csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for values in reader:
                surplus_values = values.pop(None, None)  # type: ignore[call-overload]
                problem = (
                    f"the line has {len(values) + len(surplus_values)} values for {len(values)} columns"
                    if surplus_values
                    else ""
                )
                place = f"{path}: line {reader.line_num}"
                yield Row(where=place, values=dict(values), problem=problem)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: this is not CSV in UTF-8: {error}") from None


def read_json_lines(path: Path) -> Iterator[Row]:
    """The rows of a .jsonl file, which gzip may have compressed; blank lines are skipped.

    Raises ValueError for a file in UTF-16 or UTF-32, whose lines cannot be told apart.
    """
    with _opened(path) as file:
        encoding = json.detect_encoding(file.peek(4)[:4])
        if not encoding.startswith("utf-8"):
            raise ValueError(
                f"{path}: the file is in {encoding.upper()}; convert to UTF-8: iconv -f {encoding} -t utf-8"
            )
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}: line {number}"
            try:
                yield _row(place, json.loads(line))
            except (ValueError, RecursionError) as error:
                # json also fails for numbers with thousands of digits, and for thousands of nested brackets
                problem = f"the line is not JSON: {str(error).partition(';')[0]}"
                yield Row(where=place, values={}, problem=problem)


def _read_parquet(path: Path) -> Iterator[Row]:
    number = nbytes = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                nbytes += batch.nbytes
                _check_size(path, nbytes)
                for values in batch.to_pylist():
                    number += 1
                    yield Row(where=f"{path}: row {number}", values=values)
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: row {number + 1}: the Parquet file cannot be read: {reason}") from None


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".jsonl.gz": read_json_lines,
    ".json.gz": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""Ending of a file's name -> function that reads the rows."""


def _read_folder(path: Path, split: str | None) -> Iterator[Row]:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        yield from _read_saved_dataset(path, split)
        return
    files: dict[str, list[Path]] = {}
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if not hidden and file.is_file() and _kind(file) and file.name not in NO_ROWS:
            files.setdefault(_split_of(file), []).append(file)
    if not files:
        raise ValueError(f"{path}: the folder has no file ending in {', '.join(READERS)}")
    chosen = files[_choose_split(path, list(files), split)]
    folders = sorted({str(file.parent.relative_to(path)) for file in chosen})
    if len(folders) > 1:
        raise ValueError(f"{path}: the folder has several datasets; name one of {', '.join(folders)}")
    for file in chosen:
        yield from _read_file(file)


def _split_of(file: Path) -> str:
    name = file.name.removesuffix(_kind(file))
    shard = SHARD_NAME.match(name)
    if shard is not None:
        return shard["split"]
    return name if name in SPLIT_NAMES else "train"


def _read_saved_dataset(path: Path, split: str | None) -> Iterator[Row]:
    import datasets  # the import is slow, and most prompts are plain files

    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: the saved dataset cannot be read: {str(error).splitlines()[0]}") from None
    if isinstance(saved, datasets.DatasetDict):
        saved = saved[_choose_split(path, list(saved), split)]
    for number, values in enumerate(saved.with_format(None), start=1):
        yield Row(where=f"{path}: row {number}", values=values)


def _choose_split(path: Path, splits: Sequence[str], split: str | None) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    names = ", ".join(splits)
    if split is None:
        raise ValueError(f"{path}: the splits are {names}; choose one with prompts.split")
    if split not in splits:
        raise ValueError(f"{path}: there is no split {split!r} (prompts.split); the splits are {names}")
    return split


def refuse_surrogates(place: str, column: str, text: str) -> None:
    """Raise ValueError for half of a surrogate pair, which JSON allows and no tokenizer can encode."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(
            f"{place}: {column!r} has half of a surrogate pair (U+D800 to U+DFFF), which is no character"
        )


def other_columns(row: Row, columns: Collection[str]) -> dict[str, Any]:
    """The columns besides `columns`, for a custom verifier.

    Raises ValueError for a value that JSON cannot represent, because the run's journals hold the columns as JSON.
    """
    extra_columns = {name: value for name, value in row.values.items() if name not in columns}
    for name, value in extra_columns.items():
        if hasattr(value, "isoformat"):  # Parquet has dates and times
            extra_columns[name] = value.isoformat()
        try:
            msgspec.json.encode({name: extra_columns[name]})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{row.where}: the value of {name!r} is not JSON data: {error}") from None
    return extra_columns


def listing(rows: Sequence[str]) -> list[str]:
    """Report lines for skipped rows: the first LISTED in full, and the number of further rows."""
    lines = [f"  {row}" for row in rows[:LISTED]]
    if len(rows) > LISTED:
        lines.append(f"  and {len(rows) - LISTED} more")
    return lines
