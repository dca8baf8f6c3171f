"""The index of a checkpoint, from its `.metadata`: its tensors and objects, and the byte ranges that hold them.

The steps of `read_index`, none of which trusts the one before:

1. metadata.json has to name the format `torch_dist`.
2. `safe_pickles.decode` opens `.metadata`, in which torch pickles its own classes. `_lookup` is the allowlist: each
   class maps to a `Record`, which keeps the pickled state and does nothing.
3. `_index` checks the fields of the records one by one, and turns them into `ByteRange`, `Chunk` and `StoredTensor`.

`CheckpointIndex.check_files` then compares the byte ranges with the files. Imports no torch.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_scalerl.checkpoints.commit import COMMIT, read_commit
from megatron_scalerl.checkpoints.plain_files import PlainFile, check_name
from megatron_scalerl.checkpoints.safe_pickles import Maker, PickledObject, RefusedPickle, decode, printable
from megatron_scalerl.record import record

METADATA = ".metadata"
FORMAT_FILE = "metadata.json"
COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
"""State that Megatron saves once for all ranks: a file up to Megatron-Core 0.16, an object of the index since."""
_METADATA_LIMIT = 1 << 30
"""Bytes of .metadata that are read."""
_FORMAT_LIMIT = 1 << 16
"""Bytes of metadata.json that are read."""
_SIZES = 1 << 62
"""Bound of a size or an offset, so that sums of two stay within 64 bits."""
_ENUMERATIONS = ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING", "WriteItemType")
"""torch's enumerations whose members a `.metadata` may name."""
_MODULES = frozenset(
    [
        *(f"torch.distributed.checkpoint.{module}" for module in ("metadata", "filesystem", "planner")),
        "torch.distributed._shard.sharded_tensor.metadata",  # before torch 2.3
        "megatron.core.dist_checkpointing.strategies.torch",
        # The path that the checkpoint was first written to.
        *("pathlib", "pathlib._local"),
    ]
)
"""Modules of the classes in a `.metadata`: classes of the index and of the plans by which it was written."""
Ranges = dict[tuple[str, tuple[int, ...] | None], "ByteRange"]
"""(key, offset of the chunk; None for an object) -> its bytes."""

DTYPES = frozenset(
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8"]
    + ["uint8", "uint16", "uint32", "uint64", "bool"]
)
"""torch's names of the types that tensors of a checkpoint may have."""


@record
class ByteRange:
    """`length` bytes from byte `start` on, of a file in the folder."""

    file: str
    start: int
    length: int


@record
class Chunk(ByteRange):
    """A rectangle of a tensor, and the bytes that hold it."""

    offset: tuple[int, ...]
    """Position in the tensor, in elements of each axis."""
    shape: tuple[int, ...]


@record
class StoredTensor:
    """A tensor of a checkpoint."""

    dtype: str
    """torch's name of the type."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@record
class CheckpointIndex:
    """All tensors and objects of a checkpoint, by key. Produced by `read_index`."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, ByteRange]
    """Values other than tensors, each an archive of `torch.save`."""

    def check_files(self, ranges: Iterable[ByteRange]) -> None:
        """Raises ValueError if a file is missing, is a link or is too short for its ranges, or if ranges overlap.

        Overlaps are refused because many objects in the same bytes would be decoded as many times.
        """
        spans = defaultdict(list)
        for item in ranges:
            spans[item.file].append((item.start, item.start + item.length))
        for name, in_file in spans.items():
            in_file.sort()
            end = max(end for _, end in in_file)
            with PlainFile(self.path, name) as file:
                if file.size < end:
                    raise ValueError(f"{file.path}: it has {file.size} bytes, and .metadata names {end}")
            for (_, before), (start, _) in zip(in_file, in_file[1:]):
                if start < before:
                    raise ValueError(f"{file.path}: two parts overlap at byte {start}")


def read_index(path: Path) -> CheckpointIndex:
    """The index of the `torch_dist` checkpoint at `path`, read from metadata.json and .metadata alone.

    Raises ValueError for a folder of another format, and for a .metadata that holds a name outside the allowlist or
    is not consistent.
    """
    if not (path / FORMAT_FILE).is_file() or not (path / METADATA).is_file():
        raise ValueError(f"{path}: this is not Megatron's checkpoint: it needs {FORMAT_FILE} and {METADATA}")
    _check_format(path)
    with PlainFile(path, METADATA) as file:
        data = file.read(_METADATA_LIMIT)
    try:
        return _index(path, decode(data, _lookup))
    except RefusedPickle as refused:
        raise ValueError(f"{path / METADATA}: it is not the metadata of a checkpoint: {refused}") from None


def check_checkpoint(path: Path) -> None:
    """Check that the files of the `torch_dist` checkpoint at `path` hold what its index says.

    A committed checkpoint needs the files that its COMMIT names, too. Raises ValueError naming a damaged file.
    """
    if (path / COMMIT).is_file() or not path.is_dir():
        read_commit(path)
    index = read_index(path)
    index.check_files([*index.objects.values(), *(c for t in index.tensors.values() for c in t.chunks)])
    if COMMON_OBJECT not in index.objects:
        with PlainFile(path, COMMON):
            pass


class _Format(msgspec.Struct):
    sharded_backend: str


def _check_format(path: Path) -> None:
    with PlainFile(path, FORMAT_FILE) as file:
        text = file.read(_FORMAT_LIMIT)
    try:
        backend = msgspec.json.decode(text, type=_Format).sharded_backend
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path / FORMAT_FILE}: it does not name a checkpoint's format as JSON: {error}") from None
    if backend != "torch_dist":
        raise ValueError(f"{path / FORMAT_FILE}: sharded_backend: expected torch_dist, found {printable(backend)}")


class Record(PickledObject):
    """An object in `.metadata`: a class of ours with the name of torch's class, and the pickled state."""

    __slots__ = ("state",)

    def __new__(cls, *_: Any) -> Record:
        """Make an empty record. Enumerations and paths are pickled with arguments, which are ignored."""
        record = super().__new__(cls)
        record.state = {}
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


@functools.cache
def _record(name: str) -> type[Record]:
    # A class for each name, by which `_field` tells what a record was.
    return type(name, (Record,), {"__slots__": ()})


def _member(owner: Any, _: Any) -> Record:
    """A member of an enumeration by its name: Python 3.11.2 pickles a call of getattr, 3.11.7 the member's value."""
    if getattr(owner, "__name__", None) not in _ENUMERATIONS:
        raise TypeError("getattr is called for something else than a member of an enumeration")
    return Record()


def _size(numbers: Any = ()) -> tuple[int, ...]:
    return _numbers("a torch.Size", numbers)


def _numbers(what: str, numbers: Any) -> tuple[int, ...]:
    if type(numbers) is not tuple or any(type(n) is not int or not 0 <= n < _SIZES for n in numbers):
        raise RefusedPickle(f"{what} is not a tuple of sizes")
    return numbers


_NAMES: dict[tuple[str, str], Any] = {
    **{("torch", name): name for name in DTYPES},
    ("torch", "Size"): Maker("torch.Size", _size),
    ("torch.serialization", "_get_layout"): Maker("_get_layout", lambda _: None),
    ("collections", "OrderedDict"): Maker("OrderedDict", dict),
    ("builtins", "getattr"): Maker("getattr", _member),
}
"""Every other name that a `.metadata` may use."""


def _lookup(module: str, name: str) -> Any:
    if module in _MODULES:
        return _record(printable(name))
    return _NAMES.get((module, name))


def _field(record: Any, kind: str, name: str, types: type | tuple[type, ...]) -> Any:
    """The field `name` of a record, a value of one of `types`; None if it is not set."""
    # Megatron-Core pickles subclasses of torch's records, whose names begin with MCore.
    if _kind(record) not in (kind, f"MCore{kind}") or type(record.state) is not dict:
        raise RefusedPickle(f"{_kind(record)} stands in place of {kind}")
    value = record.state.get(name)
    if value is not None and not isinstance(value, types):
        raise RefusedPickle(f"{kind}.{name} is of type {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return type(value).__name__


def _index(path: Path, metadata: Any) -> CheckpointIndex:
    described = _field(metadata, "Metadata", "state_dict_metadata", dict) or {}
    placed = _field(metadata, "Metadata", "storage_data", dict) or {}
    ranges = {}
    for index, info in placed.items():
        key = _field(index, "MetadataIndex", "fqn", str)
        offset = _field(index, "MetadataIndex", "offset", tuple)
        if offset is not None:
            _numbers("an offset", offset)  # before it is hashed, which takes forever for deeply nested pairs
        ranges[key, offset] = _byte_range(path, info)
    tensors = {}
    objects = {}
    for key, entry in described.items():
        _check_key(key)
        if _kind(entry) == "BytesStorageMetadata":
            objects[key] = _take(ranges, key, None)
        else:
            tensors[key] = _tensor(key, entry, ranges)
    return CheckpointIndex(path=path, tensors=tensors, objects=objects)


def _check_key(key: object) -> None:
    # Keys appear in messages, and control characters would reach the terminal.
    if type(key) is not str or not key.isprintable():
        raise RefusedPickle(f"the key {printable(str(key))!r} is not one line of text")


def _byte_range(path: Path, info: Any) -> ByteRange:
    file = _field(info, "_StorageInfo", "relative_path", str)
    check_name(path / METADATA, file)
    start, length = (_field(info, "_StorageInfo", name, int) for name in ("offset", "length"))
    _numbers("a byte range", (start, length))
    if _field(info, "_StorageInfo", "transform_descriptors", (list, tuple)):
        raise RefusedPickle(f"bytes of {file} were transformed when they were written, as by compression")
    return ByteRange(file=file, start=start, length=length)


def _take(ranges: Ranges, key: str, offset: tuple[int, ...] | None) -> ByteRange:
    """Take a byte range out of `ranges`, so that it has one user: a pickle can name the same part very often."""
    taken = ranges.pop((key, offset), None)
    if taken is None:
        raise RefusedPickle(f"{key} at {offset} has no byte range")
    return taken


def _tensor(key: str, entry: Any, ranges: Ranges) -> StoredTensor:
    kind = "TensorStorageMetadata"
    shape = _numbers("a shape", _field(entry, kind, "size", tuple))
    properties = _field(entry, kind, "properties", Record)
    state = getattr(properties, "state", None)
    if type(state) is not tuple or not state or state[0] not in DTYPES:
        raise RefusedPickle(f"{key} has no type")
    chunks = []
    for chunk in _field(entry, kind, "chunks", list) or ():
        offset, sizes = (_field(chunk, "ChunkStorageMetadata", name, tuple) for name in ("offsets", "sizes"))
        _check_inside(key, shape, _numbers("an offset", offset), _numbers("a shape", sizes))
        at = _take(ranges, key, offset)
        chunks.append(Chunk(offset=offset, shape=sizes, file=at.file, start=at.start, length=at.length))
    return StoredTensor(dtype=state[0], shape=shape, chunks=tuple(chunks))


def _check_inside(key: str, shape: tuple[int, ...], offset: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    fits = len(offset) == len(sizes) == len(shape) and all(o + n <= s for o, n, s in zip(offset, sizes, shape))
    if not fits:
        raise RefusedPickle(
            f"a part of shape {list(sizes)} at {list(offset)} is outside {key} of shape {list(shape)}"
        )
