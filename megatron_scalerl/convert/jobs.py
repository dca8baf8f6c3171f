"""What worker processes do: write a file of Megatron's checkpoint, write part of a safetensors file, compare.

Jobs can be pickled and name everything that they need. Each reads its tensors once from the disk, computes the
checksum that the manifest keeps, looks for NaN and Inf, and holds no more than a few bands in memory of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_scalerl.convert.arrays import RAW, has_nonfinite
from megatron_scalerl.convert.blob import write_blob
from megatron_scalerl.convert.dist_reader import DistArrays, Held
from megatron_scalerl.convert.hf_folder import HfArrays, HfFolder
from megatron_scalerl.convert.layout import Address
from megatron_scalerl.convert.pieces import BAND_BYTES, Origin, Recipe, band, bands

Record = dict[str, Any]
"""What a finished job leaves behind, as JSON."""


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """Where tensors are read from; can be pickled."""

    hugging_face: HfFolder | None = None
    megatron: Path | None = None
    held: Mapping[str, Held] | None = None


class OpenSources:
    """Arrays of the source files, by origin."""

    def __init__(self, files: SourceFiles):
        self._hf = HfArrays(files.hugging_face) if files.hugging_face else None
        self._dist = DistArrays(files.megatron, files.held or {}) if files.megatron else None

    def array(self, origin: Origin, name: str) -> np.ndarray:
        """The bits of a whole tensor or chunk."""
        if origin == "megatron":
            assert self._dist is not None
            return self._dist.array(name)
        assert self._hf is not None
        return self._hf.raw(name) if origin == "bytes" else self._hf.array(name)

    def read_ahead(self, recipe: Recipe) -> None:
        """Ask for what a recipe needs soon."""
        for arrays, name in self._used(recipe):
            arrays.read_ahead(name)

    def let_go(self, recipe: Recipe) -> None:
        """Give back what a recipe has used."""
        for arrays, name in self._used(recipe):
            arrays.let_go(name)

    def _used(self, recipe: Recipe) -> Iterator[tuple[Any, str]]:
        for origin, name in dict.fromkeys((part.origin, part.source) for part in recipe.parts):
            yield (self._dist if origin == "megatron" else self._hf), name


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a job is run with."""

    sources: Sequence[OpenSources]
    folder: Path
    """The work folder."""
    allow_nonfinite: bool
    report: Callable[[int], None]
    """Told the bytes of every band that is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """Rows `start` to `stop` of a parameter, one chunk of the checkpoint."""

    recipe: Recipe
    address: Address
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without leading axes."""
        return (self.stop - self.start, *self.recipe.shape[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Hugging Face tensors and the parameters that are made of them and nothing else."""

    tensors: tuple[Recipe, ...]
    blobs: tuple[Blob, ...]
    copies: tuple[tuple[Recipe, str], ...] = ()
    """Tensors that must equal another one of the unit."""

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(recipe.nbytes for recipe in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointJob:
    """Write one file of Megatron's checkpoint."""

    file: str
    units: tuple[Unit, ...]

    @property
    def name(self) -> str:
        """Unique among the jobs of a conversion."""
        return self.file

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(unit.nbytes for unit in self.units)

    def run(self, context: Context) -> Record:
        """Returns the chunks with their places in the file, and the checksums of the Hugging Face tensors."""
        sources = context.sources[0]
        chunks: list[Record] = []
        checksums: dict[str, str] = {}
        _ahead(sources, self.units[0].tensors)
        with (context.folder / self.file).open("wb", buffering=1 << 16) as file:
            for number, unit in enumerate(self.units):
                _ahead(sources, *(u.tensors for u in self.units[number + 1 : number + 2]))
                checksums |= _checksums_of_unit(unit, context)
                for blob in unit.blobs:
                    chunks.append(_write_chunk(file, blob, context))
                for recipe in unit.tensors:
                    sources.let_go(recipe)
            _settle(file)
        return {"file": self.file, "chunks": chunks, "checksums": checksums}


def _checksums_of_unit(unit: Unit, context: Context) -> dict[str, str]:
    found = {recipe.name: _checksum(recipe, context) for recipe in unit.tensors}
    for copy, original in unit.copies:
        found[copy.name] = _checksum(copy, context)
        if found[copy.name] != found[original]:
            raise ValueError(f"{copy.name}: expected a copy of {original} (the config ties them), found other values")
    return found


def _checksum(recipe: Recipe, context: Context) -> str:
    state = xxhash.xxh3_64()
    for rows in bands(recipe, context.sources[0]):
        _check_finite(recipe, rows, context)
        state.update(rows.reshape(-1).data)
    return state.hexdigest()


def _check_finite(recipe: Recipe, rows: np.ndarray, context: Context) -> None:
    if recipe.dtype != RAW and not context.allow_nonfinite and has_nonfinite(rows, recipe.dtype):
        raise ValueError(f"{recipe.name}: expected finite weights, found NaN or Inf (--allow-nonfinite lets them by)")


def _write_chunk(file: Any, blob: Blob, context: Context) -> Record:
    def told() -> Iterator[np.ndarray]:
        for rows in bands(blob.recipe, context.sources[0], blob.start, blob.stop):
            yield rows
            context.report(rows.nbytes)

    start = file.tell()
    lead = blob.address.offset
    shape = (*(1 for _ in lead), *blob.shape)
    length = write_blob(file, blob.recipe.dtype, shape, told())
    size = [*blob.address.sizes, *blob.recipe.shape]
    offset = [*lead, blob.start, *(0 for _ in blob.shape[1:])]
    return dict(
        key=blob.address.key,
        size=size,
        dtype=blob.recipe.dtype,
        offset=offset,
        shape=list(shape),
        start=start,
        length=length,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsJob:
    """Write tensors into a safetensors file that is there already, in full size and with its header."""

    file: str
    tensors: tuple[tuple[Recipe, int], ...]
    """(tensor, its first byte in the file)"""
    expected: Mapping[str, str]
    """Checksums that tensors must have."""

    @property
    def name(self) -> str:
        """Unique among the jobs of a conversion."""
        return f"{Path(self.file).name}@{self.tensors[0][1]}"

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(recipe.nbytes for recipe, _ in self.tensors)

    def run(self, context: Context) -> Record:
        """Returns the tensors' checksums."""
        checksums: dict[str, str] = {}
        sources = context.sources[0]
        _ahead(sources, [self.tensors[0][0]])
        with (context.folder / self.file).open("r+b", buffering=0) as file:
            for number, (recipe, offset) in enumerate(self.tensors):
                _ahead(sources, *([r] for r, _ in self.tensors[number + 1 : number + 2]))
                checksums[recipe.name] = _write_tensor(file, recipe, offset, context)
                self._compare(recipe.name, checksums[recipe.name])
                sources.let_go(recipe)
            _settle(file)
        return {"file": self.file, "checksums": checksums}

    def _compare(self, name: str, found: str) -> None:
        expected = self.expected.get(name, found)
        if found != expected:
            raise ValueError(f"{name}: expected checksum {expected} as the manifest says, found {found} (damaged?)")


def _write_tensor(file: Any, recipe: Recipe, offset: int, context: Context) -> str:
    file.seek(offset)
    state = xxhash.xxh3_64()
    for rows in bands(recipe, context.sources[0]):
        _check_finite(recipe, rows, context)
        data = rows.reshape(-1).view(np.uint8).data
        state.update(data)
        while data:  # an unbuffered file may take less than it is given
            data = data[file.write(data) :]
        context.report(rows.nbytes)
    return state.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareJob:
    """Compare tensors of two sources bit for bit."""

    name: str
    pairs: tuple[tuple[Recipe, Recipe], ...]
    """The same tensor from the first and from the second source; shapes and types are equal."""

    @property
    def nbytes(self) -> int:
        """Bytes to compare."""
        return sum(recipe.nbytes for recipe, _ in self.pairs)

    def run(self, context: Context) -> Record:
        """Returns the names of tensors that differ."""
        return {"different": [first.name for first, second in self.pairs if not _equal(first, second, context)]}


def _equal(first: Recipe, second: Recipe, context: Context) -> bool:
    assert (first.shape, first.dtype) == (second.shape, second.dtype), first.name
    one, other = context.sources
    step = max(1, BAND_BYTES // max(1, first.row_bytes))
    equal = True
    for start in range(0, first.rows, step):
        stop = min(first.rows, start + step)
        rows = band(first, one, start, stop)
        equal = equal and np.array_equal(rows, band(second, other, start, stop))
        context.report(rows.nbytes)
    one.let_go(first)
    other.let_go(second)
    return equal


def _ahead(sources: OpenSources, *groups: Sequence[Recipe]) -> None:
    for recipe in (recipe for group in groups for recipe in group):
        sources.read_ahead(recipe)


def _settle(file: Any) -> None:
    """On the disk, and out of the page cache, so that a comparison reads the disk."""
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


Job = CheckpointJob | SafetensorsJob | CompareJob
