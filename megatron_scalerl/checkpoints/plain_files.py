"""Reading files of a folder that another party may have written: regular files inside it, never links out of it."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path

import numpy as np

_LINK = "it is a link, which is not followed; cp -RL makes a folder without links"


def open_plain(folder: Path, name: str) -> int:
    """A read-only descriptor of the file `name` in `folder`.

    Raises ValueError for a name that leaves the folder, a missing file, a link, and anything that is not a regular
    file (reading a pipe would block forever).
    """
    check_name(folder, name)
    path = folder / name
    try:
        # O_NONBLOCK: opening a pipe without a writer would block; it changes nothing for a regular file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError(f"{path}: this file of the checkpoint is missing") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path}: {_LINK}") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: it is not a regular file")
    return descriptor


def check_name(folder: Path, name: object) -> None:
    """Raises ValueError unless `name` is the name of a file directly in the folder."""
    if type(name) is not str:
        raise ValueError(f"{folder}: a value of type {type(name).__name__} stands in place of a file's name")
    if not is_file_name(name):
        raise ValueError(f"{folder}: {name[:200]!a} is not the name of a file in the folder")


def is_file_name(name: str) -> bool:
    """True for a printable name without folders."""
    return name not in ("", ".", "..") and len(name) <= 255 and "/" not in name and name.isprintable()


def refuse_links(folder: Path) -> None:
    """Raises ValueError if `folder` or anything in it, at any depth, is a link."""
    # A copy of the folder would follow the link, and take a file of this machine into the result.
    for path in (folder, *sorted(folder.rglob("*"))):
        if path.is_symlink():
            raise ValueError(f"{path}: {_LINK}")


class PlainFile:
    """A regular file of a checkpoint, read by offset. Close it, or use it as a context manager."""

    def __init__(self, folder: Path, name: str):
        self.path = folder / name
        self._descriptor = open_plain(folder, name)
        self.size = os.fstat(self._descriptor).st_size

    def __enter__(self) -> PlainFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, limit: int) -> bytes:
        """The whole file. Raises ValueError if it has more than `limit` bytes."""
        if self.size > limit:
            raise ValueError(f"{self.path}: it has {self.size} bytes, and at most {limit} are read")
        data = bytearray(self.size)
        self.read_into(0, memoryview(data))
        return bytes(data)

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target`, a view of bytes, from byte `start` on. Raises ValueError if the file is shorter."""
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], start + done)
            if not count:
                break
            done += count
        _check_read(self.path, start, len(target), done)


def _check_read(path: Path, start: int, size: int, read: int) -> None:
    if read != size:
        raise ValueError(f"{path}: it has only {read} of {size} bytes from byte {start} on")


class MappedFile:
    """A memory-mapped file. Its pages belong to the page cache and do not count as memory of the process."""

    def __init__(self, path: Path, *, links: bool = True):
        """Map the file at `path`. Without `links` it has to be a regular file; raises ValueError for a link."""
        self.path = path
        if links:
            file = path.open("rb")
        else:
            file = os.fdopen(open_plain(path.parent, path.name), "rb")
        with file:
            self.size = os.fstat(file.fileno()).st_size
            self.bytes: mmap.mmap | bytes = b""
            if self.size:  # mmap refuses an empty file
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def array(self, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        """[count] read-only items from byte `offset` on."""
        if not count:  # numpy refuses an offset at the end of the file
            return np.empty(0, dtype)
        return np.frombuffer(self.bytes, dtype, count, offset)

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` from byte `start` on. Raises ValueError if the file is shorter."""
        content = self.bytes[start : start + len(target)]
        _check_read(self.path, start, len(target), len(content))
        target[:] = content
