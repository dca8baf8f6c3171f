"""Megatron's `torch_dist` checkpoints as the converter reads them, whatever layout they were saved under."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_scalerl.convert.arrays import BITS, TORCH_NAMES
from megatron_scalerl.convert.blob import find_blob
from megatron_scalerl.convert.layout import Address, place_of
from megatron_scalerl.convert.mapped import MappedFile
from megatron_scalerl.trainer.commit import COMMIT, read_commit

if TYPE_CHECKING:  # at run time this would import torch into every worker
    from megatron_scalerl.models.family import Family, Rule

METADATA = ".metadata"
FORMAT_FILE = "metadata.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A rectangle of a checkpoint's tensor and where its bytes are."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A parameter as the checkpoint holds it."""

    address: Address
    dtype: str
    shape: tuple[int, ...]
    """Without leading axes; rows that pad a vocabulary are left out."""
    chunks: tuple[Chunk, ...]
    """Those that touch it."""


def held_parameters(path: str | Path, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Held]:
    """Every exported parameter of the family in the checkpoint at `path`, by its name in the weight map.

    `shapes` are the parameters' full shapes. Raises ValueError for a folder that is no whole checkpoint, a
    parameter that is missing (all are listed) or has another shape.
    """
    path = Path(path)
    if (path / COMMIT).is_file():
        read_commit(path)
    if not (path / FORMAT_FILE).is_file() or not (path / METADATA).is_file():
        raise ValueError(f"{path}: expected a checkpoint with {FORMAT_FILE} and {METADATA}, found none")
    metadata = _metadata(path / METADATA)
    chunks = _chunks_by_key(metadata)
    found: dict[str, Held] = {}
    missing: list[str] = []
    for rule in family.rules:
        if not rule.exported:
            continue
        address = next((a for a in place_of(rule, family).readable if a.key in chunks), None)
        if address is None:
            missing.append(place_of(rule, family).written.key)
            continue
        entry = metadata.state_dict_metadata[address.key]
        found[rule.megatron] = _held(path, rule, address, entry, chunks[address.key], shapes[rule.megatron])
    if missing:
        names = list(dict.fromkeys(missing))
        raise ValueError(f"{path}: expected {', '.join(names[:20])} in the checkpoint, found none of that name")
    _check_files(path, found.values())
    return found


def _metadata(path: Path) -> Any:
    import torch.distributed.checkpoint.metadata  # noqa: F401  (the classes that the pickle names)

    try:
        with path.open("rb") as file:
            return pickle.load(file)
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise ValueError(f"{path}: expected the metadata of a checkpoint, found {error!r}") from None


def _chunks_by_key(metadata: Any) -> dict[str, list[Chunk]]:
    chunks: dict[str, list[Chunk]] = {}
    shapes = {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key, entry in metadata.state_dict_metadata.items()
        for chunk in getattr(entry, "chunks", ())
    }
    for index, info in metadata.storage_data.items():
        if index.offset is None or (index.fqn, tuple(index.offset)) not in shapes:
            continue
        offset = tuple(index.offset)
        chunk = Chunk(
            offset=offset,
            shape=shapes[index.fqn, offset],
            file=info.relative_path,
            start=info.offset,
            length=info.length,
        )
        chunks.setdefault(index.fqn, []).append(chunk)
    return chunks


def _held(
    path: Path, rule: Rule, address: Address, entry: Any, chunks: Sequence[Chunk], shape: tuple[int, ...]
) -> Held:
    dtypes = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    if dtype not in dtypes:
        raise ValueError(f"{path}: {address.key}: expected one of {', '.join(dtypes)}, found {dtype}")
    expected, found = (*address.sizes, *shape), tuple(entry.size)
    padded = rule.place != "layer" and rule.sharded and found[1:] == expected[1:] and found[0] >= expected[0]
    if found != expected and not padded:
        raise ValueError(f"{path}: {address.key}: expected shape {list(expected)}, found {list(found)}")
    lead = len(address.offset)
    mine = tuple(c for c in chunks if _touches(c, address.offset, shape[0], lead))
    held_elements = sum(_elements(c, shape, lead) for c in mine)
    if held_elements != prod(shape):
        raise ValueError(f"{path}: {address.key}: expected {prod(shape)} elements, found {held_elements}")
    return Held(address=address, dtype=dtypes[dtype], shape=shape, chunks=mine)


def _touches(chunk: Chunk, offset: tuple[int, ...], rows: int, lead: int) -> bool:
    inside = all(o <= at < o + n for at, o, n in zip(offset, chunk.offset, chunk.shape))
    return inside and chunk.offset[lead] < rows


def _elements(chunk: Chunk, shape: tuple[int, ...], lead: int) -> int:
    """How many of the parameter's elements a chunk holds; rows of padding do not count."""
    ends = zip(chunk.offset[lead:], chunk.shape[lead:], shape)
    return prod(min(o + n, size) - o for o, n, size in ends)


def _check_files(path: Path, found: Iterable[Held]) -> None:
    ends: dict[str, int] = {}
    for chunk in (c for held in found for c in held.chunks):
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
    for file, end in ends.items():
        if not (path / file).is_file():
            raise ValueError(f"{path / file}: expected a file of the checkpoint, found none")
        size = (path / file).stat().st_size
        if size < end:
            raise ValueError(f"{path / file}: expected at least {end} bytes, found {size} (truncated?)")


class DistArrays:
    """Chunks of a checkpoint as arrays of bits, mapped from their files. Named by `chunk_name`."""

    def __init__(self, path: Path, held: Mapping[str, Held]):
        self.path = path
        self.held = held
        self._files: dict[str, MappedFile] = {}
        self._found: dict[str, np.ndarray] = {}

    def array(self, name: str) -> np.ndarray:
        """One chunk, at its parameter's place on the leading axes."""
        if name not in self._found:
            self._found[name] = self._array(name)
        return self._found[name]

    def read_ahead(self, name: str) -> None:
        """Ask for a chunk that is needed soon."""
        _, chunk = self._chunk(name)
        self._file(chunk.file).read_ahead(chunk.start, chunk.length)

    def let_go(self, name: str) -> None:
        """Give back a chunk's pages."""
        _, chunk = self._chunk(name)
        self._found.pop(name, None)
        self._file(chunk.file).let_go(chunk.start, chunk.length)

    def _chunk(self, name: str) -> tuple[Held, Chunk]:
        parameter, number = name.rsplit("#", 1)
        held = self.held[parameter]
        return held, held.chunks[int(number)]

    def _array(self, name: str) -> np.ndarray:
        held, chunk = self._chunk(name)
        file = self._file(chunk.file)
        dtype, shape, start = find_blob(file, chunk.start, chunk.length)
        if (dtype, shape) != (held.dtype, chunk.shape):
            expected = f"{held.dtype} {list(chunk.shape)}"
            raise ValueError(f"{file.path}: {held.address.key}: expected {expected}, found {dtype} {list(shape)}")
        whole = file.array(start, prod(shape), BITS[dtype]).reshape(shape)
        return whole[tuple(at - first for at, first in zip(held.address.offset, chunk.offset))]

    def _file(self, file: str) -> MappedFile:
        if file not in self._files:
            self._files[file] = MappedFile(self.path / file)
        return self._files[file]


def chunk_name(parameter: str, number: int) -> str:
    """What `DistArrays` calls the `number`-th chunk of a parameter."""
    return f"{parameter}#{number}"
