"""Archives of `torch.save` in a checkpoint that another party may have written, opened by torch's weights-only load.

The steps for each archive, which is a range of bytes of a file:

1. `_Window` shows the range as a file; `_load` refuses all but zip archives, since torch would try older formats.
2. torch's weights-only unpickler calls no function outside torch's own list and `_ARRAYS`.
3. The result is checked again, since torch's list holds more than a checkpoint needs: `read_value` accepts plain
   values, `read_object` a list of plain values, `read_tensor` one dense tensor.

`find_tensor` reads no values: it finds the tensor's bytes in the archive, to be mapped.
"""

import contextlib
import io
import itertools
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from megatron_scalerl.checkpoints.assembly import HF_NAMES
from megatron_scalerl.checkpoints.plain_files import MappedFile
from megatron_scalerl.checkpoints.safe_index import ByteRange
from megatron_scalerl.checkpoints.safe_pickles import printable

_MARK = b"PK\x03\x04"
_LOCAL = struct.Struct("<26xHH")
"""A zip entry's own header, up to the lengths of its name and its extra field."""
_DEPTH = 32
"""Depth to which the items of a value may be nested."""
_ITEMS = 1 << 20
"""Items that a value may have, parts that occur several times counted each time."""
_EXTRA_STATE = "_extra_state"
_PLAIN = (type(None), bool, int, float, str, bytes)
_KINDS = "?bBhHiIlLefd"
"""Types of numpy arrays; not "O", whose elements are objects."""
_reconstruct = np.empty(0).__reduce__()[0]
_ARRAYS: list[Any] = [
    *(np.ndarray, np.dtype, bytes),
    *{type(np.dtype(kind)) for kind in _KINDS},
    # The modules of numpy 2 and of numpy 1.
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
    (_reconstruct, "numpy.core.multiarray._reconstruct"),
]
"""Names that are allowed besides torch's own: numpy's random number generator keeps its state in an array."""


class Bytes(Protocol):
    """A file that is read by offset."""

    path: Path

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` from byte `start` on. Raises ValueError if the file is shorter."""


def read_value(file: Bytes, start: int, length: int) -> Any:
    """The plain value in the archive of `length` bytes from byte `start` on.

    Plain values are numbers, text, tensors, arrays, and lists and dictionaries of plain values. Raises ValueError,
    naming the file, for anything else.
    """
    refusal = f"{file.path}: the bytes from {start} on are not plain values"
    value = _load(file, start, length, refusal, _ARRAYS)
    level = [value]
    items = 0
    for _ in range(_DEPTH):
        items += len(level)
        for part in level:
            if not _is_plain(part):
                raise ValueError(f"{refusal}: a {type(part).__name__} is among them")
        # Level by level, and never more than the limit: an item that occurs in many lists counts each time.
        level = list(itertools.islice(itertools.chain.from_iterable(map(_parts, level)), _ITEMS + 1))
        if not level:
            return value
        if items + len(level) > _ITEMS:
            break
    raise ValueError(f"{refusal}: they are nested more than {_DEPTH} deep, or are more than {_ITEMS}")


def _is_plain(value: Any) -> bool:
    if type(value) in (dict, OrderedDict):
        return all(type(key) in (str, int) for key in value)
    if type(value) is np.ndarray:
        return value.dtype.char in _KINDS
    # Exact types: a subclass may have any behavior.
    return type(value) in (*_PLAIN, list, tuple) or _is_tensor(value)


def _is_tensor(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return ()


def read_object(file: Bytes, key: str, stored: ByteRange) -> list[Any]:
    """The object `key` of a checkpoint: Megatron stores a list with one item per save by a rank.

    Raises ValueError, naming the file, for anything but a list of plain values, and for a module's extra state that
    is not empty: Transformer Engine unpickles such states.
    """
    items = read_value(file, stored.start, stored.length)
    if type(items) is not list:
        raise ValueError(f"{file.path}: {key} is a {type(items).__name__}; Megatron stores a list")
    if _EXTRA_STATE in key and not all(item is None or (_is_tensor(item) and not item.numel()) for item in items):
        raise ValueError(
            f"{file.path}: {key} is not empty; extra states, as of fp8 training, are pickles, which are not read"
        )
    return items


def read_tensor(file: Bytes, start: int, length: int, what: str) -> torch.Tensor:
    """The one tensor of an archive, called `what`. Raises ValueError, naming the file, for anything else."""
    refusal = f"{file.path}: the bytes from {start} on are not {what}"
    tensor = _load(file, start, length, refusal, [])
    if not _is_tensor(tensor):
        raise ValueError(f"{refusal}: they hold a {type(tensor).__name__}, not a dense tensor of the CPU")
    return tensor


def find_tensor(file: MappedFile, start: int, length: int) -> tuple[str, tuple[int, ...], int]:
    """(type, shape, offset of the bits in the file) of the tensor in an archive, written by us or by torch.

    Raises ValueError for anything but a saved tensor, and for a tensor that is not contiguous.
    """
    # Type, shape and strides are in the pickle; the values stay unread.
    with torch.serialization.skip_data():
        tensor = read_tensor(file, start, length, "a saved tensor")
    shape = tuple(tensor.shape)
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != prod(shape) * tensor.itemsize:
        storage = f"strides {list(tensor.stride())} in {tensor.untyped_storage().nbytes()} bytes"
        raise ValueError(f"{file.path}: the tensor at byte {start} is not contiguous: it has {storage}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in HF_NAMES:
        raise ValueError(f"{file.path}: the tensor at byte {start} is of {dtype}, which is not a type of weights")
    return HF_NAMES[dtype], shape, start + _first_byte(file, start, length, tensor.untyped_storage().nbytes())


def _first_byte(file: MappedFile, start: int, length: int, nbytes: int) -> int:
    """Position of the first byte of an archive's one tensor, in the archive."""
    refusal = f"{file.path}: the bytes from {start} on are not a saved tensor"
    window = _Window(file, start, length)
    try:
        with zipfile.ZipFile(window) as archive:
            entries = {entry.filename.split("/", 1)[-1]: entry for entry in archive.infolist()}
            order = b"little"
            if "byteorder" in entries:  # older versions of torch wrote none
                order = archive.read(entries["byteorder"])
        entry = entries["data/0"]
        window.seek(entry.header_offset)
        name, extra = _LOCAL.unpack(window.read(_LOCAL.size))
    except (zipfile.BadZipFile, NotImplementedError, KeyError, EOFError, struct.error) as error:
        raise ValueError(f"{refusal}: {error!r}") from None
    # The entry's own header tells: its extra field pads to an alignment, and the zip's directory does not have it.
    begin = entry.header_offset + _LOCAL.size + name + extra
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != nbytes or begin + nbytes > length:
        raise ValueError(f"{refusal}: the archive does not hold its content as one uncompressed entry")
    if order != b"little":
        raise ValueError(f"{refusal}: their order is not little-endian")
    return begin


@contextlib.contextmanager
def _names_beside_torchs(names: list[Any]) -> Iterator[None]:
    """Context in which a load may use `names`, and no name that other programs added, as Megatron-Core does."""
    kept = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(names)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(kept)


def _load(file: Bytes, start: int, length: int, refusal: str, names: list[Any]) -> Any:
    """The content of an archive. Raises ValueError that begins with `refusal` for a damaged or a hostile one."""
    window: Any = _Window(file, start, length)
    if window.read(len(_MARK)) != _MARK:  # torch would try its format of before 2020
        raise ValueError(f"{refusal}: they are no archive of torch.save")
    window.seek(0)
    with _names_beside_torchs(names):
        try:
            return torch.load(window, map_location="cpu", weights_only=True)
        except Exception as error:  # damage makes torch raise errors of many types, none of them documented
            raise ValueError(f"{refusal}: {_reason(window, error)}") from None


def _reason(window: Any, error: Exception) -> str:
    """The reason why a load failed: the first name that is not allowed, if the archive has such a name."""
    with contextlib.suppress(Exception):
        window.seek(0)
        return f"the name {printable(torch.serialization.get_unsafe_globals_in_checkpoint(window)[0])} is not allowed"
    if isinstance(error, pickle.UnpicklingError):
        return "torch's weights-only load refuses them"
    return printable(repr(error))


class _Window(io.RawIOBase):
    """A range of bytes of a file as a file object."""

    def __init__(self, file: Bytes, start: int, length: int):
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

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

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")[: max(0, self._length - self._at)]
        self._file.read_into(self._start + self._at, view)
        self._at += len(view)
        return len(view)
