"""Reads the index of a `torch_dist` checkpoint, `.metadata`: all tensors and objects, each with the byte ranges in
files.

torch's weights-only load cannot read `.metadata`, which pickles internal classes of torch in a newer protocol. So
`read_index` takes three steps:

1. metadata.json has to name the format `torch_dist`.
2. `_Unpickler` opens `.metadata` and imports nothing: `Record`, which only keeps the pickled attributes, replaces
   each class on an allowlist, and any other name is refused.
3. msgspec converts the records to the declared types, and `_index` joins the results to `Chunk` and `StoredTensor`.

A hostile pickle runs no code, but can use up memory and time until the process is killed. Imports no torch.
"""

import pickle
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_scalerl.checkpoints.plain_files import open_plain, printable
from megatron_scalerl.record import record

METADATA = ".metadata"
FORMAT_FILE = "metadata.json"
COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
"""Key of the state that Megatron saves once for all ranks. Megatron-Core 0.16 and earlier write the state to a file,
later versions to an object of the index."""
_FORMAT_LIMIT = 1 << 16
"""Largest number of bytes that are read from metadata.json."""
_DTYPE = r"\A(b?float16|float32|float64|float8_e4m3fn|float8_e5m2|u?int(8|16|32|64)|bool)\Z"
"""torch's names of the types that tensors of a checkpoint may have."""
Size = Annotated[int, Meta(ge=0, lt=1 << 43)]
"""A size or an offset, below 2**43: no file system that is in use has a larger file."""
Shape = tuple[Size, ...]


class ByteRange(msgspec.Struct, frozen=True, rename={"file": "relative_path", "start": "offset"}):
    """`length` bytes of a file in the folder, from byte `start` on. `rename` maps the fields to the names in torch's
    _StorageInfo."""

    file: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_]{1,80}\.distcp\Z")]
    start: Size
    length: Size


@record
class Chunk:
    """A rectangle of a tensor, and where the bytes of the rectangle's elements are."""

    offset: Shape
    """Position of the rectangle in the tensor, in elements along each axis."""
    shape: Shape
    place: ByteRange


@record
class StoredTensor:
    """A tensor of a checkpoint."""

    dtype: str
    """torch's name of the tensor's type."""
    shape: Shape
    chunks: tuple[Chunk, ...]


@record
class CheckpointIndex:
    """All tensors and objects of a checkpoint, by key. Produced by `read_index`."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, ByteRange]
    """Values that are not tensors, each stored as an archive of `torch.save`."""


class _Format(msgspec.Struct):
    sharded_backend: Literal["torch_dist"]


def read_index(path: Path) -> CheckpointIndex:
    """The index of the `torch_dist` checkpoint at `path`, read from metadata.json and .metadata alone.

    Raises ValueError for a folder that is no `torch_dist` checkpoint, and for a .metadata that names a class outside
    the allowlist or contradicts itself.
    """
    if not (path / FORMAT_FILE).is_file() or not (path / METADATA).is_file():
        raise ValueError(f"{path}: this is not a Megatron checkpoint: the folder lacks {FORMAT_FILE} or {METADATA}")
    with open_plain(path, FORMAT_FILE) as file:
        text = file.read(_FORMAT_LIMIT)
    try:
        msgspec.json.decode(text, type=_Format)
    except (ValueError, RecursionError) as error:
        reason = f"only checkpoints with sharded_backend torch_dist can be read: {printable(str(error))}"
        raise ValueError(f"{path / FORMAT_FILE}: {reason}") from None
    with open_plain(path, METADATA) as file:
        try:
            return _index(path, msgspec.convert(_Unpickler(file).load(), _Metadata, from_attributes=True))
        except Exception as error:
            # The unpickler raises errors of many types for a damaged file.
            reason = printable(str(error) or repr(error))
            raise ValueError(f"{path / METADATA}: this file is not valid checkpoint metadata: {reason}") from None


class Record:
    """Stands for an object in `.metadata`: keeps the pickled attributes, and ignores the constructor's arguments.

    A Record also replaces the functions that a pickle calls. `__setstate__` is defined because Python's unpickler
    would otherwise let a pickle set attributes of the class `Record` itself.
    """

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        # torch pickles TensorProperties with a tuple as state, whose first item is the type.
        if type(state) is tuple:
            state = {"dtype": state[0]}
        self.__dict__.update(state)


_MODULES = frozenset(
    [
        *(f"torch.distributed.checkpoint.{module}" for module in ("metadata", "filesystem", "planner")),
        "megatron.core.dist_checkpointing.strategies.torch",
        # `.metadata` contains the path to which the checkpoint was written, an object of pathlib.
        *("pathlib", "pathlib._local"),
    ]
)
"""Modules whose classes a `.metadata` may name: classes of the index, of the ranks' save plan, and of paths."""
_NAMES = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): Record,
    ("collections", "OrderedDict"): dict,
    ("builtins", "getattr"): Record,  # Python 3.11.2 pickles a member of an enumeration as a call of getattr
}
"""Further names that a `.metadata` may use, besides the classes of _MODULES and torch's types."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _MODULES:
            return Record
        if module == "torch" and re.match(_DTYPE, name):
            return name
        if (module, name) not in _NAMES:
            raise ValueError(f"the pickled name {module}.{name} is not allowed")
        return _NAMES[module, name]


class _Item(msgspec.Struct, frozen=True):
    """The fields of torch's MetadataIndex: an object's key, or a tensor's key with the offset of a chunk."""

    fqn: str
    offset: Shape | None = None


class _Part(msgspec.Struct):
    """The fields of torch's ChunkStorageMetadata: where in the tensor a chunk is."""

    offsets: Shape
    sizes: Shape


class _Properties(msgspec.Struct):
    dtype: Annotated[str, Meta(pattern=_DTYPE)]


class _Entry(msgspec.Struct):
    """The fields of torch's TensorStorageMetadata (a tensor) or, all with default values, of BytesStorageMetadata (an
    object)."""

    size: Shape | None = None
    properties: _Properties | None = None
    chunks: list[_Part] = []


class _Metadata(msgspec.Struct):
    # Keys appear in messages, so control characters, which would reach the terminal, are refused.
    state_dict_metadata: dict[Annotated[str, Meta(pattern=r"\A[ -~]+\Z")], _Entry]
    storage_data: dict[_Item, ByteRange]


def _index(path: Path, metadata: _Metadata) -> CheckpointIndex:
    ranges = metadata.storage_data
    tensors = {}
    objects = {}
    for key, entry in metadata.state_dict_metadata.items():
        if entry.size is None or entry.properties is None:
            objects[key] = _take(ranges, key, None)
            continue
        chunks = []
        for part in entry.chunks:
            fits = len(part.offsets) == len(part.sizes) == len(entry.size)
            if not fits or any(o + n > size for o, n, size in zip(part.offsets, part.sizes, entry.size)):
                raise ValueError(
                    f"a chunk of shape {part.sizes} at offset {part.offsets} exceeds {key} of shape {entry.size}"
                )
            place = _take(ranges, key, part.offsets)
            chunks.append(Chunk(offset=part.offsets, shape=part.sizes, place=place))
        elements = sum(prod(chunk.shape) for chunk in chunks)
        if elements != prod(entry.size):
            raise ValueError(f"the chunks of {key} have {elements} elements, but the tensor has {prod(entry.size)}")
        tensors[key] = StoredTensor(dtype=entry.properties.dtype, shape=entry.size, chunks=tuple(chunks))
    return CheckpointIndex(path=path, tensors=tensors, objects=objects)


def _take(ranges: dict[_Item, ByteRange], key: str, offset: Shape | None) -> ByteRange:
    """Remove the byte range of an object, or of a tensor's chunk at `offset`, from `ranges`, so that no range is used
    twice. Returns the range. Raises ValueError for a missing range."""
    place = ranges.pop(_Item(key, offset), None)
    if place is None:
        raise ValueError(f"no byte range is listed for {key} (offset of the chunk: {offset})")
    return place
