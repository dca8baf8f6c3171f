"""What worker processes do: write a file of Megatron's checkpoint, write part of a safetensors file, or compare.

A job can be pickled and names everything that it needs. It reads each of its tensors once from the disk, computes the
checksum for the conversion record, looks for NaN and Inf, and holds only a few bands in memory of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from megatron_scalerl.checkpoints.assembly import BAND_BYTES, RAW, Assembly, Origin, band, bands, has_nonfinite
from megatron_scalerl.checkpoints.dist_reader import Address, DistReader, StoredParameter
from megatron_scalerl.checkpoints.hf_folder import HfFolder, HfReader
from megatron_scalerl.checkpoints.torch_archive import append_tensor

T = TypeVar("T")

JobResult = dict[str, Any]
"""What a finished job reports, as JSON data."""


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """The files that tensors are read from; can be pickled."""

    hugging_face: HfFolder | None = None
    megatron: Path | None = None
    parameters: Mapping[str, StoredParameter] | None = None
    """The parameters to read from the Megatron checkpoint."""


class OpenSources:
    """Arrays of the source files, by origin."""

    def __init__(self, files: SourceFiles):
        self._hf = HfReader(files.hugging_face) if files.hugging_face else None
        self._dist = DistReader(files.megatron, files.parameters or {}) if files.megatron else None

    def array(self, origin: Origin, name: str) -> np.ndarray:
        """The bits of a whole tensor or chunk."""
        if origin == "megatron":
            assert self._dist is not None
            return self._dist.bits(name)
        assert self._hf is not None
        return self._hf.raw(name) if origin == "bytes" else self._hf.bits(name)

    def prefetch(self, *groups: Iterable[Assembly]) -> None:
        """Start reading what assemblies need soon."""
        for reader, name in self._used(assembly for group in groups for assembly in group):
            reader.prefetch(name)

    def release(self, *assemblies: Assembly) -> None:
        """Unmap what assemblies have used."""
        for reader, name in self._used(assemblies):
            reader.release(name)

    def _used(self, assemblies: Iterable[Assembly]) -> Iterator[tuple[Any, str]]:
        for assembly in assemblies:
            for origin, name in dict.fromkeys((part.origin, part.source) for part in assembly.parts):
                yield (self._dist if origin == "megatron" else self._hf), name


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all jobs of a conversion share; can be pickled."""

    sources: Sequence[SourceFiles]
    """One source, or two to compare."""
    folder: Path
    """The folder that jobs write in."""
    allow_nonfinite: bool


class Context:
    """What a job runs with: the setting, opened in this process."""

    def __init__(self, setting: Setting, report: Callable[[int], None]):
        """report: called with the bytes of every band that is done."""
        self.sources = [OpenSources(files) for files in setting.sources]
        self.folder, self.allow_nonfinite = setting.folder, setting.allow_nonfinite
        self.report = report


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputChunk:
    """Rows `start` to `stop` of a parameter, one chunk of the checkpoint."""

    assembly: Assembly
    address: Address
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without leading axes."""
        return (self.stop - self.start, *self.assembly.shape[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Hugging Face tensors, and the parameters that are assembled from these tensors alone."""

    tensors: tuple[Assembly, ...]
    chunks: tuple[OutputChunk, ...]
    copies: tuple[tuple[Assembly, str], ...] = ()
    """Tensors that must equal another one of the unit."""

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(assembly.nbytes for assembly in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointJob:
    """Write one file of Megatron's checkpoint."""

    name: str
    """Of the file."""
    units: tuple[Unit, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(unit.nbytes for unit in self.units)

    def run(self, context: Context) -> JobResult:
        """Returns the chunks with their places in the file, and the checksums of the Hugging Face tensors."""
        sources = context.sources[0]
        chunks: list[JobResult] = []
        checksums: dict[str, str] = {}
        sources.prefetch(self.units[0].tensors)
        with (context.folder / self.name).open("wb", buffering=1 << 16) as file:
            for number, unit in enumerate(self.units):
                sources.prefetch(*(u.tensors for u in self.units[number + 1 : number + 2]))
                checksums |= _checksums_of_unit(unit, context)
                for chunk in unit.chunks:
                    chunks.append(_write_chunk(file, chunk, context))
                sources.release(*unit.tensors)
            _flush_to_disk(file)
        return {"file": self.name, "chunks": chunks, "checksums": checksums}


def _checksums_of_unit(unit: Unit, context: Context) -> dict[str, str]:
    found = {assembly.name: _checksum(assembly, context) for assembly in unit.tensors}
    for copy, original in unit.copies:
        found[copy.name] = _checksum(copy, context)
        if found[copy.name] != found[original]:
            raise ValueError(f"{copy.name}: expected a copy of {original} (the config ties them), found other values")
    return found


def _checksum(assembly: Assembly, context: Context) -> str:
    state = xxhash.xxh3_64()
    for rows in _checked_bands(assembly, context):
        state.update(rows.reshape(-1).data)
    return state.hexdigest()


def _checked_bands(assembly: Assembly, context: Context) -> Iterator[np.ndarray]:
    check = assembly.dtype != RAW and not context.allow_nonfinite
    for rows in bands(assembly, context.sources[0]):
        if check and has_nonfinite(rows, assembly.dtype):
            raise ValueError(
                f"{assembly.name}: expected finite weights, found NaN or Inf (--allow-nonfinite accepts them)"
            )
        yield rows


def _write_chunk(file: Any, chunk: OutputChunk, context: Context) -> JobResult:
    def reported() -> Iterator[np.ndarray]:
        for rows in bands(chunk.assembly, context.sources[0], chunk.start, chunk.stop):
            yield rows
            context.report(rows.nbytes)

    start = file.tell()
    dtype, lead = chunk.assembly.dtype, chunk.address.offset
    shape = (*(1 for _ in lead), *chunk.shape)
    return dict(
        key=chunk.address.key,
        size=[*chunk.address.sizes, *chunk.assembly.shape],
        dtype=dtype,
        offset=[*lead, chunk.start, *(0 for _ in chunk.shape[1:])],
        shape=list(shape),
        start=start,
        length=append_tensor(file, dtype, shape, reported()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsJob:
    """Write tensors into a safetensors file that exists in its full size, with its header."""

    file: str
    tensors: tuple[tuple[Assembly, int], ...]
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
        return sum(assembly.nbytes for assembly, _ in self.tensors)

    def run(self, context: Context) -> JobResult:
        """Returns the tensors' checksums."""
        checksums: dict[str, str] = {}
        sources = context.sources[0]
        sources.prefetch([self.tensors[0][0]])
        with (context.folder / self.file).open("r+b", buffering=0) as file:
            for number, (assembly, offset) in enumerate(self.tensors):
                sources.prefetch(following for following, _ in self.tensors[number + 1 : number + 2])
                checksums[assembly.name] = _write_tensor(file, assembly, offset, context)
                self._compare(assembly.name, checksums[assembly.name])
                sources.release(assembly)
            _flush_to_disk(file)
        return {"file": self.file, "checksums": checksums}

    def _compare(self, name: str, found: str) -> None:
        expected = self.expected.get(name, found)
        if found != expected:
            raise ValueError(f"{name}: expected checksum {expected} as recorded, found {found} (damaged?)")


def _write_tensor(file: Any, assembly: Assembly, offset: int, context: Context) -> str:
    file.seek(offset)
    state = xxhash.xxh3_64()
    for rows in _checked_bands(assembly, context):
        data = rows.reshape(-1).view(np.uint8).data
        state.update(data)
        while data:  # an unbuffered file may write fewer bytes than given
            data = data[file.write(data) :]
        context.report(rows.nbytes)
    return state.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareJob:
    """Compare tensors of two sources bit for bit."""

    name: str
    pairs: tuple[tuple[Assembly, Assembly], ...]
    """The same tensor from the first and from the second source; shapes and types are equal."""

    @property
    def nbytes(self) -> int:
        """Bytes to compare."""
        return sum(assembly.nbytes for assembly, _ in self.pairs)

    def run(self, context: Context) -> JobResult:
        """Returns the names of tensors that differ."""
        return {"different": [first.name for first, second in self.pairs if not _equal(first, second, context)]}


def _equal(first: Assembly, second: Assembly, context: Context) -> bool:
    assert (first.shape, first.dtype) == (second.shape, second.dtype), first.name
    one, other = context.sources
    step = max(1, BAND_BYTES // max(1, first.row_bytes))
    equal = True
    for start in range(0, first.rows, step):
        stop = min(first.rows, start + step)
        rows = band(first, one, start, stop)
        equal = equal and np.array_equal(rows, band(second, other, start, stop))
        context.report(rows.nbytes)
    one.release(first)
    other.release(second)
    return equal


def _flush_to_disk(file: Any) -> None:
    """Sync the file and drop it from the page cache, so that a comparison reads the disk."""
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


Job = CheckpointJob | SafetensorsJob | CompareJob


def grouped(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[tuple[T, ...]]:
    """The items in order, in groups of at most `limit` bytes; a larger item is alone."""
    group: list[T] = []
    total = 0
    for item in items:
        nbytes = size(item)
        if group and total + nbytes > limit:
            yield tuple(group)
            group, total = [], 0
        group.append(item)
        total += nbytes
    if group:
        yield tuple(group)
