"""Files of `torch.save`, opened without torch: a zip archive of one pickle and the bytes of its tensors."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megatron_scalerl.checkpoints.safe_pickles import Names, Refused, Stored, decode

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_LOCAL_MARK = 0x04034B50
_DAMAGED = zipfile.BadZipFile, NotImplementedError, struct.error, EOFError, OverflowError, UnicodeDecodeError
"""What zipfile raises for an invalid archive."""
_PICKLE_LIMIT = 64 << 20
"""Bytes of a pickle, without the bits of its tensors."""


class Bytes(Protocol):
    """A file that is read by offset."""

    path: Path

    def read_at(self, start: int, size: int) -> bytes:
        """`size` bytes from byte `start` on. Raises ValueError if the file is shorter."""

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` from byte `start` on. Raises ValueError if the file is shorter."""


class Archive:
    """One archive in a file that may hold many. Produced by `open_archive`."""

    def __init__(self, file: Bytes, start: int, length: int, entries: zipfile.ZipFile):
        self._file, self._start, self._end, self._entries = file, start, start + length, entries
        stored = sum(e.file_size for e in entries.infolist() if e.compress_type == zipfile.ZIP_STORED)
        if stored > length:
            raise Refused(f"entries of {stored} bytes in {length}")
        self._names = {name.split("/", 1)[-1]: name for name in entries.namelist()}

    def decode(self, names: Names, stored: Stored | None = None) -> Any:
        """The value of the archive's pickle, decoded by `pickles.decode`. Raises Refused."""
        start, size = self.place("data.pkl")
        if size > _PICKLE_LIMIT:
            raise Refused(f"a pickle of {size} bytes")
        if "byteorder" in self._names and self._bytes("byteorder", 16) != b"little":
            raise Refused("bytes that are not little-endian")
        return decode(self._file.read_at(start, size), names, stored)

    def place(self, name: str) -> tuple[int, int]:
        """(first byte in the file, number of bytes) of an entry. Raises Refused if it is missing or out of place."""
        if name not in self._names:
            raise Refused(f"an archive without {name}")
        entry = self._entries.getinfo(self._names[name])
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise Refused(f"{name} compressed or encrypted")
        at = self._start + entry.header_offset
        header = _LOCAL.unpack(self._file.read_at(max(at, 0), _LOCAL.size))
        begin = at + _LOCAL.size + header[-2] + header[-1]
        if at < self._start or begin + entry.file_size > self._end or header[0] != _LOCAL_MARK:
            raise Refused(f"no {name} where the archive's directory says")
        return begin, entry.file_size

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` from byte `start` of the file on."""
        self._file.read_into(start, target)

    def _bytes(self, name: str, limit: int) -> bytes:
        start, size = self.place(name)
        return self._file.read_at(start, min(size, limit))


@contextmanager
def open_archive(file: Bytes, start: int, length: int, expected: str) -> Iterator[Archive]:
    """The archive in `length` bytes from byte `start` on.

    Inside the block, Refused becomes a ValueError that names the file, `expected` and what was found.
    """
    try:
        with zipfile.ZipFile(_Window(file.read_at, start, length)) as entries:
            yield Archive(file, start, length, entries)
    except Refused as refused:
        raise ValueError(f"{file.path}: expected {expected} at byte {start}, found {refused}") from None
    except _DAMAGED as error:
        raise ValueError(f"{file.path}: expected {expected} at byte {start}, found {error!r}") from None


class _Window(io.RawIOBase):
    """Part of a file as a file object, for zipfile."""

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
