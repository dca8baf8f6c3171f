"""One tensor in `torch.save`'s format, without torch: a zip archive that holds its bits uncompressed.

The files of a distributed checkpoint are such archives, one after another. Each archive holds the CRC-32 of its bits,
where any zip tool finds it.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import IO

import numpy as np

from megatron_scalerl.checkpoints.assembly import BITS

_STORAGES = {"F32": "FloatStorage", "BF16": "BFloat16Storage", "F16": "HalfStorage"}
_ALIGNMENT = 64
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_PADDING = b"FB"
"""torch's tag of the header field that pads to the alignment."""
_VERSION = 20
_LIMIT = (1 << 32) - (1 << 20)
"""Bytes that fit in an archive without the 64-bit extension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    name: bytes
    header: int
    """Offset of its local header in the archive."""
    size: int
    checksum: int


def append_tensor(file: IO[bytes], dtype: str, shape: Sequence[int], bands: Iterable[np.ndarray]) -> int:
    """Append an archive with a tensor whose bits come in `bands`, and return its length in bytes.

    `file` must be a real file, positioned at its end.
    """
    size = prod(shape) * BITS[dtype].itemsize
    assert size < _LIMIT, f"{size} bytes in one part of a checkpoint"
    start = file.tell()
    entries = [_small(file, start, b"archive/data.pkl", _pickled(dtype, shape))]
    entries.append(_small(file, start, b"archive/byteorder", b"little"))
    entries.append(_data(file, start, size, bands))
    entries.append(_small(file, start, b"archive/version", b"3\n"))
    directory = file.tell() - start
    for entry in entries:
        times = (_VERSION, _VERSION, 0, 0, 0, 0, entry.checksum, entry.size, entry.size, len(entry.name))
        file.write(_CENTRAL.pack(0x02014B50, *times, 0, 0, 0, 0, 0, entry.header) + entry.name)
    length = file.tell() - start - directory
    file.write(_END.pack(0x06054B50, 0, 0, len(entries), len(entries), length, directory, 0))
    return file.tell() - start


def _small(file: IO[bytes], start: int, name: bytes, content: bytes) -> _Entry:
    entry = _Entry(name=name, header=file.tell() - start, size=len(content), checksum=zlib.crc32(content))
    file.write(_local_header(entry, b"") + content)
    return entry


def _data(file: IO[bytes], start: int, size: int, bands: Iterable[np.ndarray]) -> _Entry:
    entry = _Entry(name=b"archive/data/0", header=file.tell() - start, size=size, checksum=0)
    # Aligned in the file, so that a mapping can be viewed in the tensor's type.
    padding = -(file.tell() + _LOCAL.size + len(entry.name) + 4) % _ALIGNMENT
    extra = _PADDING + struct.pack("<H", padding) + b"Z" * padding
    file.write(_local_header(entry, extra))
    written, checksum = 0, 0
    for band in bands:
        view = band.reshape(-1).view(np.uint8).data
        checksum = zlib.crc32(view, checksum)
        file.write(view)
        written += len(view)
    assert written == size, (written, size)
    file.flush()
    entry = replace(entry, checksum=checksum)
    os.pwrite(file.fileno(), _local_header(entry, extra), start + entry.header)
    return entry


def _local_header(entry: _Entry, extra: bytes) -> bytes:
    sizes = (entry.checksum, entry.size, entry.size, len(entry.name), len(extra))
    return _LOCAL.pack(0x04034B50, _VERSION, 0, 0, 0, 0, *sizes) + entry.name + extra


def _pickled(dtype: str, shape: Sequence[int]) -> bytes:
    """The pickle of a contiguous tensor, opcode by opcode: it names torch's storage class, which is not loaded."""
    count = prod(shape)
    storage = b"(" + _text("storage") + f"ctorch\n{_STORAGES[dtype]}\n".encode() + _text("0") + _text("cpu")
    storage += _number(count) + b"tQ"
    numbers = _number(0) + _numbers(shape) + _numbers(_strides(shape))
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + numbers + b"\x89ccollections\nOrderedDict\n)RtR."
    )


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _number(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    packed = value.to_bytes(8, "little")
    return b"\x8a" + bytes([len(packed)]) + packed


def _numbers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
