"""Append-only JSON Lines files that survive a crash at any byte: one writer, one recovery, one reader.

Every growing file of a run (journal, ledger, metrics, validations, attempts) is written by `JsonlWriter` and
read by `read_jsonl`. A row is one line, written by one system call if the system accepts the whole line. A crash can
leave a last line without newline: such a line is kept if complete (a JSON object), else cut off.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from megatron_scalerl.checkpoints.atomic_io import MODES, check_in_place, naming, sync, write_all, write_durably

_BLOCK = 1 << 16
"""Bytes that `recover` reads at a time, from the end of the file backwards, to find the start of the last line."""


class JsonlWriter:
    """Appends rows to one file. The constructor first applies `recover`."""

    def __init__(self, path: Path, *, private: bool = False):
        """Apply `recover` to the file `path`, then open or create the file. Raises OSError.

        private: mode 0600, for prompts and completions: only the owner may read the file.
        """
        self.path = path
        recover(self.path)
        created = not self.path.exists()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODES[private])
        # The name of a new file is on the disk only once the folder is synced.
        if created:
            sync(self.path.parent)
        self.size = os.fstat(self._fd).st_size
        """Number of bytes in the file."""
        self._encoder = msgspec.json.Encoder()

    def append(self, *rows: Any) -> None:
        """Append rows with one write. A row is a JSON object: a mapping, dataclass or struct. NaN and Inf become
        null.

        Raises OSError naming the file, and then leaves no part of the rows in the file.
        """
        data = b"".join(self._encoder.encode(row) + b"\n" for row in rows)
        try:
            with naming(self.path):
                write_all(self._fd, data)
        except OSError:
            # A full disk may take a part of the rows. The part is removed, so that the next row starts a line.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self.size += len(data)

    def sync(self) -> None:
        """Return once every row is on the disk under the file's name. Raises OSError naming the file."""
        with naming(self.path):
            os.fsync(self._fd)
        check_in_place(self.path, self._fd, self.size)

    def close(self) -> None:
        """Close the file.

        If the file was removed or replaced, the content is copied to `path`.kept. A second call does nothing.
        """
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                check_in_place(self.path, self._fd, self.size)
            os.close(self._fd)
            self._fd = -1


def append_row(path: Path, row: Any) -> None:
    """Append one row to a file and return once the row is on the disk. Raises OSError naming the file."""
    with contextlib.closing(JsonlWriter(path)) as writer:
        writer.append(row)
        writer.sync()


def recover(path: Path) -> None:
    """Make the file end with a complete line.

    A last line without a newline gets a newline if the line is a JSON object; else the line is cut off. A missing
    file is not created.
    """
    if not path.exists():
        return
    with naming(path), open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = size
        tail = b""
        while start > 0 and b"\n" not in tail:
            step = min(start, _BLOCK)
            start = file.seek(start - step)
            tail = file.read(step) + tail
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return
        # The row lacks only the newline, and the run may have acted on the row before the crash, so the row stays.
        if _is_object(last):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(size - len(last))
        file.flush()
        os.fsync(file.fileno())


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Every complete row of a JSONL file. A torn last line is skipped, and a missing file reads as empty.

    Raises ValueError, naming file and line, for a line, except a torn last line, that is not a JSON object. Raises
    ValueError for a path that is not a regular file: reading a pipe would block.
    """
    path = Path(path)
    if not path.exists():
        return []
    if not path.is_file():
        raise ValueError(f"{path}: this path is not a regular file")
    rows: list[dict[str, Any]] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return rows
                raise ValueError(f"{path} line {number}: the line is not a JSON object: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path} line {number}: the line has to be a JSON object, not a {type(row).__name__}"
                )
            rows.append(row)
    return rows


def rewrite(path: Path, rows: Iterable[Any]) -> None:
    """Replace all rows of the file, atomically."""
    write_durably(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
