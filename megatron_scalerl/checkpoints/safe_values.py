"""Opens archives of `torch.save`, which another party may have written, by torch's weights-only load.

An archive is a range of bytes of a file. torch's unpickler calls no function outside torch's list of names and the
caller's additions. The unpickler still lets a pickle set attributes of a tensor, such as a `numel` that hides the
method. So a tensor, also in an extra state, must be dense and have no attributes.
"""

import contextlib
import io
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_scalerl.checkpoints.assembly import HF_NAMES
from megatron_scalerl.checkpoints.plain_files import open_plain, printable
from megatron_scalerl.checkpoints.safe_index import ByteRange

_MARK = b"PK\x03\x04"
_EXTRA_STATE = "_extra_state"


def read_value(folder: Path, place: ByteRange, content: str, names: Sequence[Any] = ()) -> Any:
    """Read the value in an archive. The pickle inside may use `names` in addition to torch's own list of names.

    content: a noun phrase for the archive's content, for messages. Raises ValueError, naming the file, for a name
    that is in neither list, and for a damaged archive.
    """
    with _archive(folder, place, content, names) as window:
        return torch.load(window, map_location="cpu", weights_only=True)


def read_object(folder: Path, place: ByteRange, key: str, names: Sequence[Any] = ()) -> Any:
    """Read the object `key` of a checkpoint by `read_value`. Megatron stores a list with one item per rank.

    Also raises ValueError for a module's extra state that is not empty, since Transformer Engine unpickles such
    states.
    """
    items = read_value(folder, place, key, names)
    if _EXTRA_STATE in key and (type(items) is not list or not all(map(_is_empty, items))):
        raise ValueError(
            f"{folder / place.file}: the extra state {key} is not empty; extra states, such as those of fp8 "
            "training, are pickles, which are never loaded"
        )
    return items


def _is_empty(state: Any) -> bool:
    return state is None or (_is_dense(state) and not state.numel())


def read_tensor(folder: Path, place: ByteRange, content: str) -> torch.Tensor:
    """Read the only tensor of an archive. Arguments as for `read_value`.

    Raises ValueError, naming the file, unless the archive holds one dense tensor and nothing more.
    """
    with _archive(folder, place, content) as window:
        return _tensor(window)


def find_tensor(folder: Path, place: ByteRange) -> tuple[str, tuple[int, ...], int]:
    """(type, shape, offset of the bits in the file) of the tensor in an archive, which `torch_archive` or torch
    wrote.

    Raises ValueError unless the archive holds one contiguous tensor.
    """
    with _archive(folder, place, "a saved tensor") as window:
        # Type, shape and strides are in the pickle, so the values are not read.
        with torch.serialization.skip_data():
            tensor = _tensor(window)
        nbytes = tensor.untyped_storage().nbytes()
        if not tensor.is_contiguous() or nbytes != tensor.nbytes:
            raise ValueError(
                f"the tensor is not contiguous: strides {tensor.stride()} in a storage of {nbytes} bytes"
            )
        begin = _first_byte(window, nbytes)
        if begin + nbytes > place.length:
            raise ValueError(f"the tensor's values do not fit into the archive, whose size (bytes) is {place.length}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return HF_NAMES.get(dtype, dtype), tuple(tensor.shape), place.start + begin


def _tensor(window: Any) -> torch.Tensor:
    tensor = torch.load(window, map_location="cpu", weights_only=True)
    if not _is_dense(tensor):
        raise ValueError(f"found a {type(tensor).__name__}; only a dense CPU tensor without attributes is allowed")
    return tensor


def _is_dense(value: Any) -> bool:
    is_plain = type(value) is torch.Tensor and not vars(value)
    return is_plain and value.layout is torch.strided and value.device.type == "cpu"


def _first_byte(window: Any, nbytes: int) -> int:
    """Position, in an archive, of the first byte of the archive's only tensor."""
    with zipfile.ZipFile(window) as archive:
        entries = {entry.filename.split("/", 1)[-1]: entry for entry in archive.infolist()}
        order = b"little"
        # Older versions of torch wrote no entry `byteorder`.
        if "byteorder" in entries:
            order = archive.read(entries["byteorder"])
        entry = entries["data/0"]
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != nbytes or order != b"little":
            raise ValueError("the archive does not hold the values as one uncompressed, little-endian entry")
        # `open` reads the entry's header, so the window then stands at the first byte of the content.
        with archive.open(entry):
            return int(window.tell())


@contextlib.contextmanager
def _archive(folder: Path, place: ByteRange, content: str, names: Sequence[Any] = ()) -> Iterator[Any]:
    """Context manager that opens an archive as a file, in which torch may load `names` besides torch's own list of
    names.

    Names that programs such as Megatron-Core added to torch's list are not allowed in the `with` block. An error in
    the block is raised as a ValueError of one line.
    """
    original_names = torch.serialization.get_safe_globals()
    with open_plain(folder, place.file) as file:
        window = _Window(file, place)
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(names))
        try:
            size = os.fstat(file.fileno()).st_size
            end = place.start + place.length
            if size < end:
                raise ValueError(f"the file has {size} bytes, but .metadata places a value up to byte {end}")
            # A file without a zip archive's first bytes would make torch try the file format from before 2020.
            if window.read(len(_MARK)) != _MARK:
                raise ValueError("no archive of torch.save starts at this byte")
            window.seek(0)
            yield window
        except Exception as error:
            # torch raises errors of many undocumented types for a damaged archive.
            reason = str(error) or repr(error)
            name = re.search(r"GLOBAL (\S+)", reason)
            if name:
                reason = f"the pickled name {name[1]} is not allowed"
            head = f"{folder / place.file}: cannot read {content} from byte {place.start} on"
            raise ValueError(f"{head}: {printable(reason)}") from None
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(original_names)


class _Window(io.RawIOBase):
    """A range of a file's bytes, presented as a file object."""

    def __init__(self, file: Any, place: ByteRange):
        self._file = file
        self._place = place
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._place.length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, target: Any) -> int:
        self._file.seek(self._place.start + self._at)
        count: int = self._file.readinto(memoryview(target)[: max(0, self._place.length - self._at)])
        self._at += count
        return count
