"""The lines that were appended to a JSONL file since it was last read, its rows, and the newest row of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from megatron_scalerl.checkpoints.atomic_io import naming
from megatron_scalerl.fit.outlook import checked_row
from megatron_scalerl.processes.logs import printable

MOST_BYTES = 1 << 28
"""Read at a time."""
TAIL_BYTES = 1 << 20
"""Read at either end of a file for one row."""
Row = TypeVar("Row")


class GrowingFile:
    """A file of lines that one writer appends to, and that a restart of the run replaces or shortens.

    `generation` counts how often it began anew: what was read before no longer holds then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._inode = -1
        self._offset = 0

    def new_lines(self) -> list[tuple[bytes, str]]:
        """(line with its newline, its place for errors) of each complete line since the last call.

        All lines again, under another `generation`, if the file was replaced or became shorter; none without a file.
        At most `MOST_BYTES` of them, the rest at the next call. Raises OSError naming the file.
        """
        try:
            with naming(self.path), open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self.generation += self._inode >= 0
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                data = file.read(MOST_BYTES)
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        lines, at = [], self._offset
        for line in whole.splitlines(keepends=True):
            lines.append((line, f"{self.path} byte {at}"))
            at += len(line)
        self._offset = at
        return lines


class Rows(Generic[Row]):
    """The rows of a growing file. A damaged line hides nothing but itself."""

    def __init__(self, path: Path, row_of: Callable[[bytes], Row | None]) -> None:
        """row_of: a line as it is kept, if it is. Raises ValueError, without the place, for a damaged one."""
        self.path = path
        self.rows: list[Row] = []
        self._file = GrowingFile(path)
        self._row_of = row_of
        self._read_generation = 0
        self._damage = self._failure = ""

    @property
    def generation(self) -> int:
        """Changes when rows that were read before are dropped."""
        return self._file.generation

    @property
    def problem(self) -> str:
        """Why the file cannot be read, else its first damaged line, until it is written anew; empty without one."""
        return one_line((self._failure or self._damage).replace(f"{self.path.parent}/", ""))

    def update(self) -> bool:
        """Read what was appended; True if there is something."""
        try:
            lines, self._failure = self._file.new_lines(), ""
        except OSError as error:
            self._failure = str(error)
            return False
        if self._read_generation != self.generation:
            self._read_generation, self._damage = self.generation, ""
            self.rows.clear()
        for line, where in lines:
            try:
                row = self._row_of(line)
            except ValueError as error:
                self._damage = self._damage or f"{where}: {error}"
                continue
            if row is not None:
                self.rows.append(row)
        return bool(lines)


def one_line(text: str) -> str:
    """Any text as the page shows it, in one line of at most 500 characters."""
    return printable(" ".join(text.split()))[:500]


def newest_row(path: Path) -> dict[str, Any] | None:
    """The last complete line of a JSONL file; None without one. Reads `TAIL_BYTES` at most.

    Raises ValueError naming the file for a line that is no JSON object, OSError.
    """
    return _end_row(path, "last line", -1)


def first_row(path: Path) -> dict[str, Any] | None:
    """The first line of a JSONL file, if it is complete, as `newest_row`."""
    return _end_row(path, "first line", 0)


def _end_row(path: Path, where: str, index: int) -> dict[str, Any] | None:
    try:
        with naming(path), open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES) if index else 0)
            lines = [line for line in file.read(TAIL_BYTES).split(b"\n")[:-1] if line.strip()]
    except FileNotFoundError:
        return None
    try:
        return json_row(lines[index]) if lines else None
    except ValueError as error:
        raise ValueError(f"{path}: {where}: {error}") from None


def json_row(line: bytes, what: str = "a JSON object") -> dict[str, Any]:
    """The object in a line. Raises ValueError, without the place, for another line. what: was expected."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected {what}, found {error}") from None


def validation_row(line: bytes) -> dict[str, Any]:
    """A row of validation.jsonl as `checked_row` gives it. Raises ValueError, without the place."""
    return checked_row(json_row(line, "a validation (step, compute, pass_rate)"))
