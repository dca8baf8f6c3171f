"""Reads files of a folder that another party may have written: only regular files inside, never links to the
outside."""

import errno
import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

import numpy as np

_LINK = "this path is a symbolic link, which is not followed; cp -RL makes a copy without links"


def open_plain(folder: Path, name: str) -> BinaryIO:
    """Open the file `name` in `folder` for reading.

    Raises ValueError if `name` contains a folder, and if the file is missing, is a symbolic link, or is not a regular
    file (reading a pipe would block forever).
    """
    check_name(folder, name)
    path = folder / name
    try:
        # With O_NONBLOCK, open does not wait for a pipe's writer; for a regular file nothing changes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError(f"{path}: this file of the checkpoint is missing") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path}: {_LINK}") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: this path is not a regular file")
    return os.fdopen(descriptor, "rb")


def check_name(folder: Path, name: object) -> None:
    """Raises ValueError unless `name` is the name of a file directly in the folder."""
    if type(name) is not str:
        raise ValueError(f"{folder}: expected the name of a file, found a value of type {type(name).__name__}")
    if not is_file_name(name):
        raise ValueError(
            f"{folder}: {name[:200]!a} is not a plain file name (without folders, at most 255 characters)"
        )


def is_file_name(name: str) -> bool:
    """Whether `name` can be a file's name: printable, without folders, at most 255 characters."""
    return name not in ("", ".", "..") and len(name) <= 255 and "/" not in name and name.isprintable()


def printable(text: str) -> str:
    """Text from an untrusted file, made safe for a message: one line of at most 200 characters, without control
    characters."""
    return text[:200] if text.isprintable() else ascii(text)[1:-1][:200]


def refuse_links(folder: Path) -> None:
    """Raises ValueError if `folder` or any path inside, at any depth, is a link."""
    # A conversion copies the folder's files: through a link, a file of this machine would get into the result.
    for path in (folder, *sorted(folder.rglob("*"))):
        if path.is_symlink():
            raise ValueError(f"{path}: {_LINK}")


class MappedFile:
    """A memory-mapped file. The pages belong to the page cache and do not count as memory of the process."""

    def __init__(self, path: Path, opened: BinaryIO | None = None):
        """opened: an open file of `path`, which the constructor closes; None: the constructor opens `path`."""
        self.path = path
        with opened or path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            self.bytes: mmap.mmap | bytes = b""
            if self.size:  # mmap refuses an empty file
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def array(self, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        """`count` read-only items of the type `dtype`, from byte `offset` on."""
        if not count:  # numpy refuses an offset at the end of the file, even for no items
            return np.empty(0, dtype)
        return np.frombuffer(self.bytes, dtype, count, offset)
