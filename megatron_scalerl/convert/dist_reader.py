"""Megatron's `torch_dist` checkpoints as the converter reads them, whatever layout they were saved under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_scalerl.checkpoints.commit import COMMIT, read_commit
from megatron_scalerl.convert.arrays import BITS, TORCH_NAMES
from megatron_scalerl.convert.blob import find_blob
from megatron_scalerl.convert.layout import Address, place_of
from megatron_scalerl.convert.mapped import MappedFile
from megatron_scalerl.safe_load.index import Chunk, StoredTensor, read_index

if TYPE_CHECKING:  # at run time this would import torch into every worker
    from megatron_scalerl.models.family import Family, Rule


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
    index = read_index(path)
    found: dict[str, Held] = {}
    missing: list[str] = []
    for rule in family.rules:
        if not rule.exported:
            continue
        address = next((a for a in place_of(rule, family).readable if a.key in index.tensors), None)
        if address is None:
            missing.append(place_of(rule, family).written.key)
            continue
        found[rule.megatron] = _held(path, rule, address, index.tensors[address.key], shapes[rule.megatron])
    if missing:
        names = list(dict.fromkeys(missing))
        raise ValueError(f"{path}: expected {', '.join(names[:20])} in the checkpoint, found none of that name")
    index.check_files(chunk for held in found.values() for chunk in held.chunks)
    return found


def _held(path: Path, rule: Rule, address: Address, stored: StoredTensor, shape: tuple[int, ...]) -> Held:
    dtypes = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
    if stored.dtype not in dtypes:
        raise ValueError(f"{path}: {address.key}: expected one of {', '.join(dtypes)}, found {stored.dtype}")
    expected, found = (*address.sizes, *shape), stored.shape
    padded = rule.place != "layer" and rule.sharded and found[1:] == expected[1:] and found[0] >= expected[0]
    if found != expected and not padded:
        raise ValueError(f"{path}: {address.key}: expected shape {list(expected)}, found {list(found)}")
    lead = len(address.offset)
    mine = tuple(c for c in stored.chunks if _touches(c, address.offset, shape[0], lead))
    held_elements = sum(_elements(c, shape, lead) for c in mine)
    if held_elements != prod(shape):
        raise ValueError(f"{path}: {address.key}: expected {prod(shape)} elements, found {held_elements}")
    return Held(address=address, dtype=dtypes[stored.dtype], shape=shape, chunks=mine)


def _touches(chunk: Chunk, offset: tuple[int, ...], rows: int, lead: int) -> bool:
    inside = all(o <= at < o + n for at, o, n in zip(offset, chunk.offset, chunk.shape))
    return inside and chunk.offset[lead] < rows


def _elements(chunk: Chunk, shape: tuple[int, ...], lead: int) -> int:
    """How many of the parameter's elements a chunk holds; rows of padding do not count."""
    ends = zip(chunk.offset[lead:], chunk.shape[lead:], shape)
    return prod(min(o + n, size) - o for o, n, size in ends)


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
            self._files[file] = MappedFile(self.path / file, links=False)
        return self._files[file]


def chunk_name(parameter: str, number: int) -> str:
    """What `DistArrays` calls the `number`-th chunk of a parameter."""
    return f"{parameter}#{number}"
