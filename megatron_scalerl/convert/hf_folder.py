"""Hugging Face folders as the converter reads them: every header checked against file, index and each other."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from megatron_scalerl.convert.arrays import BITS, RAW_BYTES
from megatron_scalerl.convert.mapped import MappedFile
from megatron_scalerl.safe_load.files import check_name

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 << 20
"""safetensors' own limit."""
_SIDE_FILES = re.compile(r"\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|distcp)$|\.index\.json$|^\.")
_SIDE_FOLDERS = ("additional_chat_templates",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One tensor of a safetensors file."""

    name: str
    file: str
    dtype: str
    """safetensors' name of the type: BF16, F32 ..."""
    shape: tuple[int, ...]
    offset: int
    """First byte in the file."""
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One safetensors file."""

    file: str
    metadata: Mapping[str, str] | None
    """The header's __metadata__."""
    tensors: tuple[str, ...]
    """In the order of their bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HfFolder:
    """A folder's tensors, and how they are spread over files. Produced by `open_folder`."""

    path: Path
    tensors: Mapping[str, Stored]
    shards: tuple[Shard, ...]
    index_metadata: Mapping[str, Any] | None
    """The index file's metadata, None where the folder has no index."""


def open_folder(path: str | Path) -> HfFolder:
    """Reads all headers of a folder.

    Raises ValueError where there are no safetensors, a file is missing or has another size than its header
    says, a header cannot be read, the index names a tensor that its file lacks, or a tensor comes twice.
    """
    path = Path(path)
    index = path / INDEX
    index_metadata, placed = _read_index(index) if index.is_file() else (None, None)
    files = sorted(set(placed.values()) if placed is not None else (f.name for f in path.glob("*.safetensors")))
    if not files:
        raise ValueError(f"{path}: expected *.safetensors, found none")
    tensors: dict[str, Stored] = {}
    shards = []
    for file in files:
        if not (path / file).is_file():
            raise ValueError(f"{path / file}: expected the shard that the index names, found no file")
        metadata, found = read_header(path / file)
        for stored in found:
            if stored.name in tensors:
                other = tensors[stored.name].file
                raise ValueError(f"{path / file}: {stored.name}: expected once, found in {other} too")
            tensors[stored.name] = stored
        shards.append(Shard(file=file, metadata=metadata, tensors=tuple(s.name for s in found)))
    for name, file in (placed or {}).items():
        if name not in tensors or tensors[name].file != file:
            raise ValueError(f"{index}: expected only tensors that exist, found {name}, which {file} does not hold")
    return HfFolder(path=path, tensors=tensors, shards=tuple(shards), index_metadata=index_metadata)


def _read_index(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        content = json.loads(path.read_text(encoding="utf8"))
        entries: dict[str, str] = content["weight_map"]
        if not isinstance(entries, dict):
            raise TypeError("a weight_map that is no dictionary")
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected JSON with a weight_map, found {error!r}") from None
    for file in entries.values():
        check_name(path, file)
    return content.get("metadata") or {}, entries


def read_header(path: Path) -> tuple[Mapping[str, str] | None, list[Stored]]:
    """(metadata, tensors in the order of their bytes) of a safetensors file, checked against its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little") if size >= 8 else _MAX_HEADER + 1
        text = file.read(length) if length <= _MAX_HEADER else b""
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError:
        raise ValueError(f"{path}: expected a safetensors file, found no readable header in {size} bytes") from None
    try:
        metadata = header.pop("__metadata__", None)
        found = [_stored(path, name, entry, 8 + length) for name, entry in header.items()]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a safetensors file, found a header with {error!r}") from None
    found.sort(key=lambda stored: (stored.offset, stored.nbytes))
    end = max((s.offset + s.nbytes for s in found), default=8 + length)
    if size != end:
        raise ValueError(f"{path}: expected {end} bytes as its header says, found {size} (truncated?)")
    return metadata, found


def _stored(path: Path, name: str, entry: dict[str, Any], start: int) -> Stored:
    dtype, shape, (low, high) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in RAW_BYTES:
        raise ValueError(f"{path}: {name}: expected one of {', '.join(sorted(RAW_BYTES))}, found {dtype}")
    if high - low != prod(shape) * RAW_BYTES[dtype]:
        raise ValueError(f"{path}: {name}: expected {prod(shape) * RAW_BYTES[dtype]} bytes, found {high - low}")
    return Stored(name=name, file=path.name, dtype=dtype, shape=shape, offset=start + low, nbytes=high - low)


def side_files(path: Path) -> list[Path]:
    """What travels along, relative to the folder: config, tokenizer, chat template, generation config ..."""
    found = [f.relative_to(path) for f in sorted(path.iterdir()) if f.is_file() and not _SIDE_FILES.search(f.name)]
    for folder in _SIDE_FOLDERS:
        found += [f.relative_to(path) for f in sorted((path / folder).rglob("*")) if f.is_file()]
    return found


class HfArrays:
    """The tensors of a folder as arrays of bits, mapped from their files."""

    def __init__(self, folder: HfFolder):
        self.folder = folder
        self._files: dict[str, MappedFile] = {}

    def array(self, name: str) -> np.ndarray:
        """The whole tensor; flat bytes where a policy's weights cannot have its type."""
        stored = self.folder.tensors[name]
        file = self._file(stored.file)
        if stored.dtype not in BITS:
            return self.raw(name)
        bits = BITS[stored.dtype]
        return file.array(stored.offset, stored.nbytes // bits.itemsize, bits).reshape(stored.shape)

    def raw(self, name: str) -> np.ndarray:
        """The whole tensor as flat bytes."""
        stored = self.folder.tensors[name]
        return self._file(stored.file).array(stored.offset, stored.nbytes, np.dtype(np.uint8))

    def read_ahead(self, name: str) -> None:
        """Ask for a tensor that is needed soon."""
        stored = self.folder.tensors[name]
        self._file(stored.file).read_ahead(stored.offset, stored.nbytes)

    def let_go(self, name: str) -> None:
        """Give back the pages of a tensor that is done with."""
        stored = self.folder.tensors[name]
        self._file(stored.file).let_go(stored.offset, stored.nbytes)

    def _file(self, file: str) -> MappedFile:
        if file not in self._files:
            self._files[file] = MappedFile(self.folder.path / file)
        return self._files[file]
