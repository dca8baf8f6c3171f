"""Reads a JSONL file that is still being written: every new row (`Rows`), or the last row alone (`last_row`).

`Rows.update` reads the complete lines that were appended, and leaves an incomplete last line for the next call. If
the file was replaced or became shorter, `update` drops all rows, raises `generation` and reads from the start.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from megatron_scalerl.checkpoints.atomic_io import naming
from megatron_scalerl.fit.outlook import checked_row
from megatron_scalerl.processes.logs import printable

MOST_BYTES = 1 << 28
"""Most bytes that one update reads."""
TAIL_BYTES = 1 << 20
"""Bytes that are read at the end of a file to find the last row."""
MOST_TEXT = 200
"""Most characters of the reason that `ending` returns."""
Row = TypeVar("Row")


class Rows(Generic[Row]):
    """The rows of a file of lines that one writer appends to, and that a restart of the run replaces or shortens.

    A damaged line hides no other line. `generation` counts how often the file began anew; rows of an earlier
    generation are dropped.
    """

    def __init__(self, path: Path, row_of: Callable[[bytes], Row | None]):
        """row_of: maps a line to its row, or to None for a line to skip; for a damaged line, raises ValueError
        without file and place."""
        self.path = path
        self.rows: list[Row] = []
        self.generation = 0
        self._row_of = row_of
        self._inode = -1
        self._offset = 0
        self._damage = ""
        """The first damaged line, with file and place."""
        self._failure = ""
        """The reason why the last call of `update` could not read the file; empty if the file was read."""

    @property
    def problem(self) -> str:
        """The reason why the file cannot be read; else the first damaged line since the file began anew; empty
        without either."""
        return one_line((self._failure or self._damage).replace(f"{self.path.parent}/", ""))

    def update(self) -> bool:
        """Read the appended complete lines, `MOST_BYTES` at most; True if the file has a new line."""
        self._failure = ""
        try:
            data = self._new_bytes()
        except OSError as error:
            self._failure = str(error)
            return False
        # a line without an end is being written, and is left for the next update
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        for line in lines:
            try:
                row = self._row_of(line)
                if row is not None:
                    self.rows.append(row)
            except ValueError as error:
                self._damage = self._damage or f"{self.path} byte {self._offset}: {error}"
            self._offset += len(line)
        return bool(lines)

    def _new_bytes(self) -> bytes:
        """The bytes appended since the last read; all bytes if the file was replaced or became shorter; none without
        a file."""
        try:
            with naming(self.path), open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                # a new inode: a rename has replaced the file; a smaller size: the file was truncated
                if status.st_ino != self._inode or status.st_size < self._offset:
                    if self._inode >= 0:  # not at the first read, which drops no rows
                        self.generation += 1
                    self._inode = status.st_ino
                    self._offset = 0
                    self._damage = ""
                    self.rows.clear()
                file.seek(self._offset)
                return file.read(MOST_BYTES)
        except FileNotFoundError:
            return b""


def one_line(text: str) -> str:
    """The text as one line of at most 500 characters, with control characters escaped."""
    return printable(" ".join(text.split()))[:500]


def ending(ends: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]]) -> str | None:
    """The reason of a run's end, by the rows of end.json and attempts.jsonl; None if the newest attempt has not
    ended."""
    if not ends:
        return None
    newest = attempts[-1].get("incarnation") if attempts else None
    # end.json is of an earlier attempt; a row without an attempt, as in old runs, is taken as of the newest
    if newest is not None and ends[-1].get("incarnation", newest) != newest:
        return None
    return printable(str(ends[-1].get("reason", "")))[:MOST_TEXT]


_OBJECT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(dict[str, Any])


def json_row(line: bytes, kind: str = "a JSON object", decoder: msgspec.json.Decoder[Any] = _OBJECT) -> Any:
    """Decode one line of a JSONL file. Raises ValueError, without the file's name, for a damaged line. kind: the
    expected content."""
    try:
        return decoder.decode(line)
    # UnicodeDecodeError: bytes that are not UTF-8; RecursionError: deep nesting
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected {kind}, found {error}") from None


def validation_row(line: bytes) -> dict[str, Any]:
    """Decode and check one line of validation.jsonl. Raises ValueError, without the file's name, for a damaged
    line."""
    return checked_row(json_row(line, "a validation (step, compute, pass_rate)"))


def last_row(path: Path, row_of: Callable[[bytes], Any] = json_row) -> dict[str, Any] | None:
    """The last complete row of a JSONL file; None for a file without a row.

    Reads `TAIL_BYTES` at most. row_of: as for `Rows`. Raises ValueError with the name of the file for a damaged line,
    OSError for an unreadable file.
    """
    try:
        with naming(path), open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            # the part after the last line break is empty, or a line that is still being written
            lines = [line for line in file.read().split(b"\n")[:-1] if line.strip()]
    except FileNotFoundError:
        return None
    if not lines:
        return None
    try:
        return row_of(lines[-1])
    except ValueError as error:
        raise ValueError(f"{path}: last line: {error}") from None
