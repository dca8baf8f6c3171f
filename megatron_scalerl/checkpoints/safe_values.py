"""Plain values in `torch.save`'s format: numbers, text, lists, dictionaries, arrays and tensors.

A run's own checkpoint holds nothing else beside its weights: settings of the optimizer, states of random number
generators. Tensors are described, not built, so that checking a value needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from megatron_scalerl.checkpoints.safe_archive import Archive, Bytes, open_archive
from megatron_scalerl.checkpoints.safe_index import ByteRange
from megatron_scalerl.checkpoints.safe_pickles import EMPTY, Built, Maker, Names, Refused

COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
"""State that Megatron saves once for all ranks: a file up to Megatron-Core 0.16, an object of the index since."""
_DEPTH = 32
_ITEMS = 1 << 20
"""Items that a value may have, parts that occur several times counted each time."""
_TENSOR_ITEMS = 16
"""Items that a tensor counts as: torch's object takes as much memory."""
_SIZES = 1 << 62
_EXTRA_STATE = "_extra_state"
_FP8 = "content in {key} (of fp8 training? such states are pickles and are not opened)"
_PLAIN = (bool, int, float, str, bytes, list, tuple, dict, np.ndarray)
STORAGES = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
}
"""torch's storage class -> torch's name of the type, bytes of one element."""
_ARRAYS = frozenset(["b1", "i1", "u1", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8"])
"""Types of numpy arrays; not "O", whose elements are pickled objects."""


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    itemsize: int
    entry: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBits:
    """A tensor of an archive; `archive.place(entry)` locates its bits."""

    dtype: str
    """torch's name of the type."""
    itemsize: int
    """Bytes of an element."""
    entry: str
    """The archive's entry that holds `count` elements."""
    count: int
    offset: int
    """First element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""

    def place_in(self, archive: Archive) -> int:
        """First byte of the entry in the file. Raises Refused if the entry has the wrong size."""
        start, size = archive.place(self.entry)
        if size != self.count * self.itemsize:
            raise Refused(f"{self.entry} of {size} bytes, not {self.count * self.itemsize}")
        return start


def _stored(pid: Any) -> _Storage:
    """torch's persistent id: ("storage", class, entry, device, count)."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or type(pid[1]) is not str:
        raise TypeError("a persistent id that is not a storage")
    kind, entry, count = STORAGES[pid[1]], pid[2], pid[4]
    if type(entry) is not str or len(entry) > 20 or not entry.isdigit() or type(count) is not int:
        raise TypeError("a storage without a number")
    if not 0 <= count < _SIZES:
        raise TypeError("a storage without a number")
    return _Storage(*kind, f"data/{entry}", count)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> TensorBits:
    """Stands for torch._utils._rebuild_tensor_v2; gradients and hooks are ignored."""
    if type(storage) is not _Storage or type(shape) is not tuple or type(strides) is not tuple:
        raise TypeError("invalid sizes")
    sizes = (offset, *shape, *strides)
    if len(sizes) > 2 * _DEPTH + 1 or any(type(n) is not int or not 0 <= n < _SIZES for n in sizes):
        raise TypeError("invalid sizes")
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if prod(shape) and not (last < storage.count and prod(shape) <= storage.count):
        raise ValueError(f"shape {list(shape)}, strides {list(strides)} in {storage.count} elements")
    return TensorBits(
        dtype=storage.dtype,
        itemsize=storage.itemsize,
        entry=storage.entry,
        count=storage.count,
        offset=offset,
        shape=shape,
        strides=strides,
    )


class _ArrayType(Built):
    """Stands for numpy.dtype: a type code, then a state whose second item is the byte order."""

    __slots__ = ("code",)

    def __init__(self, code: Any, *_: Any):
        if type(code) is not str or code not in _ARRAYS:
            raise TypeError(f"arrays of {str(code)[:20]!r}")
        self.code = code

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", "|") or any(state[2:5]):
            raise TypeError("another byte order, or fields")


class _Array(Built):
    """Stands for numpy.ndarray: created empty, then set to (version, shape, type, Fortran order?, bits)."""

    __slots__ = ("array",)

    def __init__(self, *_: Any):
        self.array: np.ndarray = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, bits = state
        if type(shape) is not tuple or type(kind) is not _ArrayType or type(bits) is not bytes:
            raise TypeError("an invalid array")
        flat = np.frombuffer(bits, np.dtype(kind.code).newbyteorder("<")).copy()
        self.array = flat.reshape(shape, order="F" if fortran is True else "C")


def _text_bytes(text: Any, encoding: Any) -> bytes:
    """Stands for _codecs.encode, which is how pickles of protocol 2 spell bytes."""
    if type(text) is not str or type(encoding) is not str or encoding != "latin1":
        raise TypeError("invalid bytes")
    return text.encode("latin1")


TENSOR_NAMES: Names = {
    ("torch._utils", "_rebuild_tensor_v2"): Maker("_rebuild_tensor_v2", _tensor),
    **{("torch", name): name for name in STORAGES},
    # The tensor's hooks, always empty.
    ("collections", "OrderedDict"): EMPTY,
}
"""Every name that the archive of a tensor may use."""
VALUE_NAMES: Names = {
    **TENSOR_NAMES,
    # numpy's random number generator keeps its state in an array. Module names of numpy 2 and of numpy 1.
    ("numpy._core.multiarray", "_reconstruct"): Maker("_reconstruct", _Array),
    ("numpy.core.multiarray", "_reconstruct"): Maker("_reconstruct", _Array),
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): Maker("numpy.dtype", _ArrayType),
    ("_codecs", "encode"): Maker("_codecs.encode", _text_bytes),
    ("__builtin__", "bytes"): Maker("bytes", lambda: b""),
}
"""Every name that the archive of another value may use."""


Make = Callable[[TensorBits, Archive], Any]
"""Builds a tensor from its description and the archive that holds its bits."""


def read_value(file: Bytes, start: int, length: int, make: Make) -> Any:
    """The plain value in the archive of `length` bytes from byte `start` on; `make` builds its tensors.

    Raises ValueError, naming the file, for anything else.
    """
    with open_archive(file, start, length, "plain values") as archive:
        return _PlainCopy(archive, make).value(archive.decode(VALUE_NAMES, _stored), 0)


def read_object(file: Bytes, key: str, stored: ByteRange, make: Make) -> list[Any]:
    """The object `key` of a checkpoint: Megatron stores a list with one item per save by a rank.

    Raises ValueError, naming the file, for anything but a list of plain values, and for a module's extra state that
    is not empty: Transformer Engine unpickles those.
    """
    extra = _EXTRA_STATE in key

    def checked(bits: TensorBits, archive: Archive) -> Any:
        if extra and 0 not in bits.shape:
            raise Refused(_FP8.format(key=key))
        return make(bits, archive)

    items = read_value(file, stored.start, stored.length, checked)
    if type(items) is not list:
        raise ValueError(f"{file.path}: {key}: expected a list, found a {type(items).__name__}")
    if extra and any(isinstance(item, _PLAIN) for item in items):
        raise ValueError(f"{file.path}: expected plain values at byte {stored.start}, found {_FP8.format(key=key)}")
    return items


def describe(bits: TensorBits, archive: Archive) -> TensorBits:
    """Builds no tensor; raises Refused if its bits are missing or have the wrong size."""
    bits.place_in(archive)
    return bits


def read_tensor(archive: Archive) -> TensorBits:
    """The one tensor of an archive. Raises Refused for anything else."""
    found = archive.decode(TENSOR_NAMES, _stored)
    if type(found) is not TensorBits:
        raise Refused(f"a {type(found).__name__} that is not a tensor")
    return found


class _PlainCopy:
    """Copies a decoded value, so that it holds plain values only, and no list or dictionary occurs twice."""

    def __init__(self, archive: Archive, make: Make):
        self._archive, self._make, self._left = archive, make, _ITEMS

    def value(self, found: Any, depth: int) -> Any:
        """A copy of `found`. Raises Refused if it is nested too deeply or contains too many items."""
        self._left -= _TENSOR_ITEMS if type(found) is TensorBits else 1
        if depth > _DEPTH or self._left < 0:
            raise Refused(f"values nested more than {_DEPTH} deep, or more than {_ITEMS} of them")
        if found is None or type(found) in (bool, int, float, str, bytes):
            return found
        if type(found) in (list, tuple):
            return type(found)(self.value(item, depth + 1) for item in found)
        if type(found) is dict:
            return {self._key(key): self.value(item, depth + 1) for key, item in found.items()}
        if type(found) is TensorBits:
            return self._make(found, self._archive)
        if type(found) is _Array:
            return found.array
        raise Refused(f"a {type(found).__name__} among plain values")

    def _key(self, key: Any) -> Any:
        if type(key) not in (str, int):
            raise Refused(f"a {type(key).__name__} as a dictionary's key")
        return key
