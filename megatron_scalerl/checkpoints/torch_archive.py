"""Writes a tensor in `torch.save`'s format, in blocks of rows: a zip archive with uncompressed bits.

The files of a distributed checkpoint are such archives, one after another. As in any zip archive, each entry has a
CRC-32, which zip tools can check.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Iterable, Sequence
from math import prod
from typing import IO

import numpy as np
import torch

from megatron_scalerl.checkpoints.assembly import BITS, TORCH_NAMES

_STORAGES = {"F32": torch.FloatStorage, "BF16": torch.BFloat16Storage, "F16": torch.HalfStorage}
_ALIGNMENT = 64
_LOCAL_HEADER = 30
"""Size (bytes) of the zip header before an entry's content, without the name and the extra field."""
_PADDING = b"FB"
"""Tag of the zip extra field with which torch moves an entry's content to a multiple of _ALIGNMENT bytes."""
_LIMIT = (1 << 32) - (1 << 20)
"""Largest archive without zip's 64-bit extension (bytes)."""


class _Appended:
    """The end of a file, presented to zipfile as a file whose offsets start at 0."""

    def __init__(self, file: IO[bytes]):
        self.write = file.write
        self.flush = file.flush
        self._file = file
        self._start = file.tell()

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int) -> int:
        return self._file.seek(self._start + offset)


def append_tensor(file: IO[bytes], dtype: str, shape: Sequence[int], bands: Iterable[np.ndarray]) -> int:
    """Append an archive with a tensor whose bits come in `bands`, and return the archive's length in bytes.

    `file` must be a real file, positioned at the end.
    """
    size = prod(shape) * BITS[dtype].itemsize
    assert size < _LIMIT, f"a chunk has {size} bytes; an archive holds less than {_LIMIT}"
    start = file.tell()
    with zipfile.ZipFile(_Appended(file), "w") as archive:  # type: ignore[call-overload]
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), _pickled(dtype, shape))
        archive.writestr(zipfile.ZipInfo("archive/byteorder"), "little")
        entry = zipfile.ZipInfo("archive/data/0")
        entry.file_size = size
        # The content starts at a multiple of _ALIGNMENT, so that a mapped file can be viewed in the tensor's type.
        padding = -(file.tell() + _LOCAL_HEADER + len(entry.filename) + 4) % _ALIGNMENT
        entry.extra = _PADDING + struct.pack("<H", padding) + b"Z" * padding
        with archive.open(entry, "w") as data:
            for band in bands:
                data.write(band.reshape(-1).view(np.uint8).data)
        assert entry.file_size == size, (entry.file_size, size)
        archive.writestr(zipfile.ZipInfo("archive/version"), "3\n")
    return file.tell() - start


def _pickled(dtype: str, shape: Sequence[int]) -> bytes:
    stream = io.BytesIO()
    # torch.load accepts only torch.save's form: pickle protocol 2, and storages as persistent ids.
    pickler = pickle.Pickler(stream, protocol=2)
    ids = {torch.TypedStorage: ("storage", _STORAGES[dtype], "0", "cpu", prod(shape))}
    pickler.persistent_id = lambda value: ids.get(type(value))  # type: ignore[method-assign]
    # The empty tensor is never written or read, so the system provides no memory pages.
    pickler.dump(torch.empty(tuple(shape), dtype=getattr(torch, TORCH_NAMES[dtype])))
    return stream.getvalue()
