"""A tensor to be made: which rectangles of which other tensors it consists of, and its rows in order.

Both directions are told in these words. A tensor is seen as a matrix, [product of all but the last dimension,
last dimension], a vector as [n, 1]. Everything here can be pickled: it is what worker processes are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

import numpy as np

from megatron_scalerl.convert.arrays import bits_of, cast, copy_into

BAND_BYTES = 8 << 20
"""Tensors are read, cast, checked and written in bands of whole rows of about this size."""

Origin = Literal["hugging_face", "bytes", "megatron"]
"""A Hugging Face folder's tensor, such a tensor's bytes whatever its type, or a chunk of Megatron's checkpoint."""
Index = tuple[int | slice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A rectangle of the tensor that is made, and where its elements are taken from."""

    row: int
    column: int
    height: int
    width: int
    origin: Origin
    source: str
    """Name of the tensor that it is cut from."""
    index: Index
    """Selects the elements; an int drops that dimension."""
    transposed: bool = False
    """True where the source holds [column, row]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One tensor to be made. Its parts cover it exactly once and come in the order of their rows."""

    name: str
    dtype: str
    """Type to write: F32, BF16, F16, or RAW."""
    source_dtype: str
    """Type of all its parts."""
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Height as a matrix."""
        return matrix_shape(self.shape)[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as written."""
        return matrix_shape(self.shape)[1] * bits_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes as written."""
        return prod(self.shape) * bits_of(self.dtype).itemsize


class Sources(Protocol):
    """Where parts come from."""

    def array(self, origin: Origin, name: str) -> np.ndarray:
        """The bits of a whole tensor, mapped from its file where that is possible."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The tensor as a matrix."""
    if len(shape) == 1:
        return shape[0], 1
    return prod(shape[:-1]), shape[-1]


def check_covered(recipe: Recipe) -> None:
    """Asserts that the parts have the tensor's area and do not lie in one another."""
    height, width = matrix_shape(recipe.shape)
    assert sum(p.height * p.width for p in recipe.parts) == height * width, recipe.name
    spans = sorted((p.column, p.row, p.height) for p in recipe.parts)
    for before, after in zip(spans, spans[1:]):
        assert before[0] != after[0] or before[1] + before[2] <= after[1], recipe.name


def bands(recipe: Recipe, sources: Sources, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
    """Rows `start` to `stop` in order, as contiguous arrays in the type to write, about BAND_BYTES each.

    An array is valid until the next one is asked for. Rows that lie in one place of a file are given as they
    lie there, without a copy.
    """
    stop = recipe.rows if stop is None else stop
    step = max(1, BAND_BYTES // max(1, recipe.row_bytes))
    while start < stop:
        end = min(start + step, _end_of_run(recipe, start, stop))
        yield band(recipe, sources, start, end)
        start = end


def band(recipe: Recipe, sources: Sources, start: int, stop: int) -> np.ndarray:
    """Rows `start` to `stop`, [rows, columns], contiguous, in the type to write."""
    width = matrix_shape(recipe.shape)[1]
    parts = [p for p in recipe.parts if p.row < stop and start < p.row + p.height]
    if len(parts) == 1 and not parts[0].transposed and parts[0].width == width:
        rows = _rows_of(parts[0], sources, start, stop)
        if rows.flags.c_contiguous:
            return cast(rows, recipe.source_dtype, recipe.dtype)
    out = np.empty((stop - start, width), bits_of(recipe.source_dtype))
    for part in parts:
        low, high = max(part.row, start), min(part.row + part.height, stop)
        target = out[low - start : high - start, part.column : part.column + part.width]
        copy_into(target, _rows_of(part, sources, low, high))
    return cast(out, recipe.source_dtype, recipe.dtype)


def _rows_of(part: Part, sources: Sources, start: int, stop: int) -> np.ndarray:
    """The part's rows `start` to `stop` of the tensor that is made."""
    view = sources.array(part.origin, part.source)[part.index]
    view = view.reshape(view.shape[0], -1) if view.ndim == 1 else view.reshape(-1, view.shape[-1])
    if part.transposed:
        view = view.T
    return view[start - part.row : stop - part.row]


def _end_of_run(recipe: Recipe, start: int, stop: int) -> int:
    """Where the part that holds row `start` alone ends; `stop` where several parts share the row."""
    width = matrix_shape(recipe.shape)[1]
    for part in recipe.parts:
        if part.row <= start < part.row + part.height:
            whole = part.width == width and not part.transposed
            return min(stop, part.row + part.height) if whole else stop
    raise AssertionError(f"{recipe.name}: row {start} belongs to no part")
