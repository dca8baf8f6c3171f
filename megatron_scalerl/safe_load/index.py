"""What a checkpoint's `.metadata` says: which tensors and objects it holds, and where their bytes are.

torch pickles its own classes there. Each name stands for a record here, whose fields are then checked one by one.
Imports no torch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.plain_files import PlainFile, check_name
from megatron_scalerl.safe_load.pickles import Built, Maker, Refused, decode, empty, printable

METADATA = ".metadata"
FORMAT_FILE = "metadata.json"
_METADATA_LIMIT = 1 << 30
_FORMAT_LIMIT = 1 << 16
_AXES = 64
_SIZES = 1 << 62
_KEY_LIMIT = 4096

DTYPES = frozenset(
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8"]
    + ["uint8", "uint16", "uint32", "uint64", "bool"]
)
"""torch's names of the types that a checkpoint's tensors may have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where bytes are: `length` of them from byte `start` of a file of the folder."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk(Place):
    """A rectangle of a checkpoint's tensor and where its bytes are."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    dtype: str
    """torch's name of the type."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """All tensors and objects of a checkpoint, by key. Produced by `read_index`."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Place]
    """Values that are no tensors, each an archive of torch.save."""

    def check_files(self, places: Iterable[Place]) -> None:
        """Raises ValueError where a file is missing, is a link, or is too short for `places`, or where these overlap.

        Many objects in the same bytes would be decoded as many times.
        """
        spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for place in places:
            spans[place.file].append((place.start, place.start + place.length))
        for name, held in spans.items():
            end = max(end for _, end in held)
            held.sort()
            with PlainFile(self.path, name) as file:
                if file.size < end:
                    raise ValueError(f"{file.path}: expected at least {end} bytes, found {file.size} (truncated?)")
            for (_, before), (start, _) in zip(held, held[1:]):
                if start < before:
                    raise ValueError(f"{file.path}: expected parts that do not overlap, found two at byte {start}")


def read_index(path: str | Path) -> CheckpointIndex:
    """The index of the `torch_dist` checkpoint at `path`; of its files only metadata.json and .metadata are read.

    Raises ValueError for a folder of another format, and for a .metadata that holds a name which torch does not
    write there, or what does not fit together.
    """
    path = Path(path)
    if not (path / FORMAT_FILE).is_file() or not (path / METADATA).is_file():
        raise ValueError(f"{path}: expected a checkpoint with {FORMAT_FILE} and {METADATA}, found none")
    _check_format(path)
    with PlainFile(path, METADATA) as file:
        data = file.read(_METADATA_LIMIT)
    try:
        return _index(path, decode(data, _NAMES))
    except Refused as refused:
        raise ValueError(f"{path / METADATA}: expected the metadata of a checkpoint, found {refused}") from None


def _check_format(path: Path) -> None:
    with PlainFile(path, FORMAT_FILE) as file:
        text = file.read(_FORMAT_LIMIT)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{path / FORMAT_FILE}: expected JSON, found none that can be read") from None
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    if backend != "torch_dist":
        said = printable(repr(backend)) if type(backend) in (str, type(None)) else f"a {type(backend).__name__}"
        raise ValueError(f"{path / FORMAT_FILE}: sharded_backend: expected torch_dist, found {said}")


class Record(Built):
    """An object of torch's in `.metadata`: the name of its class and the state that it was given."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str):
        self.kind = kind
        self.state: Any = {}

    def set_state(self, state: Any) -> int:
        self.state = state
        return 0


@dataclass(frozen=True, slots=True)
class _Dtype:
    name: str


def _record(kind: str) -> Callable[..., Record]:
    def make(*arguments: Any) -> Record:
        """Enumerations and paths are made of arguments; none of these is asked for."""
        return Record(kind)

    return make


def _size(numbers: Any = ()) -> tuple[int, ...]:
    return _numbers("a torch.Size", numbers)


def _numbers(what: str, found: Any) -> tuple[int, ...]:
    if type(found) is not tuple or len(found) > _AXES:
        raise Refused(f"{what} that is no tuple of sizes")
    if any(type(n) is not int or not 0 <= n < _SIZES for n in found):
        raise Refused(f"{what} that is no tuple of sizes")
    return found


_DCP = "torch.distributed.checkpoint"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_RECORDS = [
    # The index itself.
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    # Where torch had them before 2.3.
    (_OLD, "TensorProperties"),
    (_OLD, "MEM_FORMAT_ENCODING"),
    # Megatron-Core's own index, and the plans of the ranks that wrote it, which it keeps for its next save.
    (_MCORE, "MCoreMetadata"),
    (_MCORE, "MCoreSavePlan"),
    (f"{_DCP}.planner", "SavePlan"),
    (f"{_DCP}.planner", "WriteItem"),
    (f"{_DCP}.planner", "WriteItemType"),
    (f"{_DCP}.planner", "TensorWriteData"),
    (f"{_DCP}.planner", "BytesIOWriteData"),
    (f"{_DCP}.filesystem", "_StoragePrefix"),
    # Where the checkpoint was first written.
    (f"{_DCP}.metadata", "StorageMeta"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
]
_NAMES: dict[tuple[str, str], Any] = {
    **{(module, name): Maker(name, _record(name)) for module, name in _RECORDS},
    **{("torch", name): _Dtype(name) for name in DTYPES},
    ("torch", "Size"): Maker("torch.Size", _size),
    ("torch.serialization", "_get_layout"): Maker("_get_layout", _record("layout")),
    ("collections", "OrderedDict"): Maker("OrderedDict", empty),
}
"""Every name that may stand in a `.metadata`."""


def _field(record: Any, kind: str, name: str, types: type | tuple[type, ...]) -> Any:
    """A field of a record, of one of the types; None where it is not set."""
    if type(record) is not Record or record.kind not in (kind, f"MCore{kind}") or type(record.state) is not dict:
        raise Refused(f"{_named(record)} in place of a {kind}")
    value = record.state.get(name)
    if value is not None and not isinstance(value, types):
        raise Refused(f"{kind}.{name} that is {_named(value)}")
    return value


def _named(value: Any) -> str:
    name = value.kind if type(value) is Record else type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _index(path: Path, metadata: Any) -> CheckpointIndex:
    described = _field(metadata, "Metadata", "state_dict_metadata", dict) or {}
    placed = _field(metadata, "Metadata", "storage_data", dict) or {}
    places: dict[tuple[str, str], Place] = {}
    hashes: set[tuple[str, int]] = set()
    for index, info in placed.items():
        key, offset = _field(index, "MetadataIndex", "fqn", str), _field(index, "MetadataIndex", "offset", tuple)
        _check_key(key)
        at = None if offset is None else _numbers("an offset", offset)
        places[key, str(at)] = _place(path, info)
        hashes.add((key, hash(at)))
    if len(hashes) < len(places):
        raise Refused("offsets that were made to have one hash")
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Place] = {}
    for key, entry in described.items():
        _check_key(key)
        if type(entry) is Record and entry.kind == "BytesStorageMetadata":
            objects[key] = _taken(places, key, None)
        else:
            tensors[key] = _tensor(key, entry, places)
    return CheckpointIndex(path=path, tensors=tensors, objects=objects)


def _check_key(key: object) -> None:
    if type(key) is not str:
        raise Refused(f"a key that is no text: {_named(key)}")
    if len(key) > _KEY_LIMIT or not key.isprintable():
        raise Refused(f"a key that is no text of one line: {printable(key)!r}")


def _place(path: Path, info: Any) -> Place:
    file = _field(info, "_StorageInfo", "relative_path", str)
    check_name(path / METADATA, file)
    start, length = (_field(info, "_StorageInfo", name, int) for name in ("offset", "length"))
    _numbers("a place", (start, length))
    if _field(info, "_StorageInfo", "transform_descriptors", (list, tuple)):
        raise Refused("bytes that were transformed (compressed?) as they were written")
    return Place(file=file, start=start, length=length)


def _taken(places: dict[tuple[str, str], Place], key: str, offset: tuple[int, ...] | None) -> Place:
    """A place, which nothing else has then: a pickle can name one part of a tensor, or one tensor, very often.

    Offsets are looked up as text, whose hash nobody can foresee; `_index` compares those that they have as numbers,
    which torch uses.
    """
    place = places.pop((key, str(offset)), None)
    if place is None:
        raise Refused(f"{key} at {offset} without a place in a file")
    return place


def _tensor(key: str, entry: Any, places: dict[tuple[str, str], Place]) -> StoredTensor:
    kind = "TensorStorageMetadata"
    shape = _numbers("a shape", _field(entry, kind, "size", tuple))
    properties = _field(entry, kind, "properties", Record)
    state = None if properties is None else properties.state
    if type(state) is not tuple or not state or type(state[0]) is not _Dtype:
        raise Refused(f"{key} without a type")
    chunks = []
    for chunk in _field(entry, kind, "chunks", list) or ():
        offset, sizes = (_field(chunk, "ChunkStorageMetadata", name, tuple) for name in ("offsets", "sizes"))
        _check_inside(key, shape, _numbers("an offset", offset), _numbers("a shape", sizes))
        place = _taken(places, key, offset)
        chunks.append(Chunk(offset=offset, shape=sizes, file=place.file, start=place.start, length=place.length))
    return StoredTensor(dtype=state[0].name, shape=shape, chunks=tuple(chunks))


def _check_inside(key: str, shape: tuple[int, ...], offset: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    fits = len(offset) == len(sizes) == len(shape) and all(o + n <= s for o, n, s in zip(offset, sizes, shape))
    if not fits:
        raise Refused(f"{key} of shape {list(shape)} with a part of shape {list(sizes)} at {list(offset)}")
