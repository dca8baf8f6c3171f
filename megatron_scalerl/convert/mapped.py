"""Files mapped into memory: their bytes as arrays, read ahead and let go again."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from megatron_scalerl.safe_load.files import open_plain

_PAGE = mmap.PAGESIZE


class MappedFile:
    """A file for reading. Its pages belong to the page cache and are no memory of this process's own."""

    def __init__(self, path: Path, *, links: bool = True):
        """With `links` False the file must be a regular one, and no link to it. Raises ValueError otherwise."""
        self.path = path
        with path.open("rb") if links else os.fdopen(open_plain(path.parent, path.name), "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""

    def array(self, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        """`count` items from byte `offset` on."""
        if not count:
            return np.empty(0, dtype)
        return np.frombuffer(self.bytes, dtype, count, offset)

    def read_at(self, start: int, size: int) -> bytes:
        """`size` bytes from byte `start` on. Raises ValueError where the file is shorter."""
        if start + size > self.size:
            raise ValueError(f"{self.path}: expected {size} bytes at byte {start}, found fewer (truncated?)")
        return bytes(self.bytes[start : start + size])

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` from byte `start` on. Raises ValueError where the file is shorter."""
        target[:] = self.read_at(start, len(target))

    def read_ahead(self, offset: int, length: int) -> None:
        """Ask the kernel for these bytes; returns at once."""
        self._advise(mmap.MADV_WILLNEED, offset, length)

    def let_go(self, offset: int, length: int) -> None:
        """Unmap these bytes; they are read again if somebody asks."""
        self._advise(mmap.MADV_DONTNEED, offset, length)

    def _advise(self, advice: int, offset: int, length: int) -> None:
        if length and isinstance(self.bytes, mmap.mmap):
            start = offset // _PAGE * _PAGE
            self.bytes.madvise(advice, start, min(offset + length, self.size) - start)
