"""Opens files of a folder that somebody else may have written: regular files of its own, never links out of it."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path

from megatron_scalerl.safe_load.pickles import printable


def open_plain(folder: Path, name: str) -> int:
    """A descriptor of the file `name` of `folder`, for reading.

    Raises ValueError where the name is not that of a file in the folder itself, or where there is no file, a link,
    or what is no regular file (a pipe would never end).
    """
    check_name(folder, name)
    path = folder / name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError(f"{path}: expected a file of the checkpoint, found none") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path}: expected a file, found a link (cp -RL makes a folder without links)") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: expected a regular file, found something else")
    return descriptor


def check_name(folder: Path, name: object) -> None:
    """Raises ValueError for what is not the name of a file in the folder itself."""
    if type(name) is not str:
        raise ValueError(f"{folder}: expected names of files in the folder, found a {type(name).__name__}")
    if name in ("", ".", "..") or len(name) > 255 or "/" in name or not name.isprintable():
        raise ValueError(f"{folder}: expected names of files in the folder, found {printable(name[:255])!r}")


def refuse_links(folder: Path) -> None:
    """Raises ValueError for a link in `folder`, at any depth, or for a folder that is one."""
    for path in (folder, *sorted(folder.rglob("*"))):
        if path.is_symlink():
            raise ValueError(f"{path}: expected a file or a folder, found a link (cp -RL makes one without links)")


class PlainFile:
    """A regular file of a checkpoint. Close it, or use it as a context."""

    def __init__(self, folder: Path, name: str):
        self.path = folder / name
        self._descriptor = open_plain(folder, name)
        self.size = os.fstat(self._descriptor).st_size

    def __enter__(self) -> PlainFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, limit: int) -> bytes:
        """The whole file. Raises ValueError for one of more than `limit` bytes."""
        if self.size > limit:
            raise ValueError(f"{self.path}: expected at most {limit} bytes, found {self.size}")
        return self.read_at(0, self.size)

    def read_at(self, start: int, size: int) -> bytes:
        """`size` bytes from byte `start` on. Raises ValueError where the file is shorter."""
        data = bytearray(max(0, min(size, self.size - start)))
        self.read_into(start, memoryview(data))
        self._check(start, size, len(data))
        return bytes(data)

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target`, a view of bytes, from byte `start` on. Raises ValueError where the file is shorter."""
        done = 0
        while done < len(target):
            got = os.preadv(self._descriptor, [target[done:]], start + done)
            if not got:
                break
            done += got
        self._check(start, len(target), done)

    def _check(self, start: int, size: int, found: int) -> None:
        if found != size:
            raise ValueError(f"{self.path}: expected {size} bytes at byte {start}, found {found} (truncated?)")


class Window(io.RawIOBase):
    """Part of a file, as a file: what zipfile reads an archive from."""

    def __init__(self, read_at: Callable[[int, int], bytes], start: int, length: int):
        self._read_at, self._start, self._length, self._at = read_at, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = self._read_at(self._start + self._at, left if size < 0 else min(left, size))
        self._at += len(data)
        return data
