"""How one tensor is assembled from rectangles of other tensors, and its rows as bits, band by band.

Both directions of a conversion are described this way. A tensor is seen as a matrix, [product of all but the last
dimension, last dimension], a vector as [n, 1]. numpy has no bfloat16: arrays hold a tensor's bits as unsigned
integers, and its type is passed beside them under safetensors' name (F32, BF16, F16). Only `cast` imports torch.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Literal

import numpy as np

from megatron_scalerl.checkpoints.hf_folder import ITEM_BYTES
from megatron_scalerl.record import record

BAND_BYTES = 8 << 20
"""Tensors are read, cast, checked and written in bands of whole rows of about this size."""
BITS = {dtype: np.dtype(f"u{size}") for dtype, size in ITEM_BYTES.items()}
"""safetensors' name of a type -> integers that hold its bits."""
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types that a policy's weights may have: safetensors' name -> torch's."""
HF_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
"""torch's name -> safetensors'."""
_INFINITY_SHIFTED = {"F32": 0xFF000000, "BF16": 0xFF00, "F16": 0xF800}
_CHECK_ITEMS = 1 << 18
_TILE_ROWS, _TILE_COLUMNS, _GAP = 128, 512, 32

Origin = Literal["hugging_face", "megatron"]
"""A tensor of a Hugging Face folder, or a chunk of Megatron's checkpoint."""
Index = tuple[int | slice, ...]
Sources = Callable[[Origin, str], np.ndarray]
"""The bits of a whole tensor or chunk by its name, mapped from its file if possible."""


@record
class Part:
    """A rectangle of the assembled tensor, and the source of its elements."""

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
    """True if the source holds [column, row]."""


@record
class Assembly:
    """One tensor to assemble. Its parts cover it exactly once and are in the order of their rows."""

    name: str
    dtype: str
    """Type to write. A type that a policy's weights do not have is the source's."""
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
        return matrix_shape(self.shape)[1] * BITS[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes as written."""
        return prod(self.shape) * BITS[self.dtype].itemsize


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The tensor as a matrix."""
    return (prod(shape), 1) if len(shape) < 2 else (prod(shape[:-1]), shape[-1])


def check_covered(assembly: Assembly) -> None:
    """Asserts that the parts have the tensor's area and do not overlap."""
    height, width = matrix_shape(assembly.shape)
    assert sum(p.height * p.width for p in assembly.parts) == height * width, assembly.name
    spans = sorted((p.column, p.row, p.height) for p in assembly.parts)
    for before, after in zip(spans, spans[1:]):
        assert before[0] != after[0] or before[1] + before[2] <= after[1], assembly.name


def band_rows(assembly: Assembly) -> int:
    """Rows of one band."""
    return max(1, BAND_BYTES // max(1, assembly.row_bytes))


def bands(assembly: Assembly, sources: Sources, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
    """Rows `start` to `stop` in order, as contiguous arrays in the type to write, about BAND_BYTES each.

    An array is valid until the next one is requested. Rows that are contiguous in a file are not copied.
    """
    stop = assembly.rows if stop is None else stop
    step = band_rows(assembly)
    for first in range(start, stop, step):
        yield band(assembly, sources, first, min(stop, first + step))


def band(assembly: Assembly, sources: Sources, start: int, stop: int) -> np.ndarray:
    """[rows, columns] rows `start` to `stop`, contiguous, in the type to write."""
    width = matrix_shape(assembly.shape)[1]
    parts = [p for p in assembly.parts if p.row < stop and start < p.row + p.height]
    if len(parts) == 1 and not parts[0].transposed and parts[0].width == width:
        rows = _rows_of(parts[0], sources, start, stop)
        if rows.flags.c_contiguous:
            return cast(rows, assembly.source_dtype, assembly.dtype)
    out = np.empty((stop - start, width), BITS[assembly.source_dtype])
    for part in parts:
        low, high = max(part.row, start), min(part.row + part.height, stop)
        target = out[low - start : high - start, part.column : part.column + part.width]
        copy_into(target, _rows_of(part, sources, low, high))
    return cast(out, assembly.source_dtype, assembly.dtype)


def _rows_of(part: Part, sources: Sources, start: int, stop: int) -> np.ndarray:
    """The part's share of rows `start` to `stop` of the assembled tensor."""
    view = sources(part.origin, part.source)[part.index]
    view = view.reshape(matrix_shape(view.shape))
    if part.transposed:
        view = view.T
    return view[start - part.row : stop - part.row]


def has_nonfinite(bits: np.ndarray, dtype: str) -> bool:
    """True if a contiguous array of `dtype` has a NaN or an Inf: all bits of an exponent are set."""
    flat, limit = bits.reshape(-1), _INFINITY_SHIFTED[dtype]
    # Without its sign a value is not finite exactly if its bits are at least those of infinity.
    shifted = np.empty(min(flat.size, _CHECK_ITEMS), flat.dtype)
    for start in range(0, flat.size, _CHECK_ITEMS):
        part = flat[start : start + _CHECK_ITEMS]
        out = shifted[: part.size]
        np.left_shift(part, 1, out=out)
        if int(out.max()) >= limit:
            return True
    return False


def cast(bits: np.ndarray, source: str, target: str) -> np.ndarray:
    """The values of `bits` in another float type, rounded to nearest, ties to even, as torch does."""
    if source == target:
        return bits
    import torch

    values = torch.from_numpy(bits.copy()).view(getattr(torch, TORCH_NAMES[source]))
    result = values.to(getattr(torch, TORCH_NAMES[target]))
    result[result.isnan()] = torch.nan  # one NaN, whatever instructions the machine has
    return result.view(torch.int32 if target == "F32" else torch.int16).numpy().view(BITS[target])


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """target[:] = source for matrices; a transposed source is copied tile by tile.

    A tile is first copied untransposed, into rows whose length is not a power of two: with such a length all elements
    of a column share a few cache sets, and the plain transposed copy is ten times slower.
    """
    if source.strides[0] >= source.strides[1] or min(source.shape) == 1:
        target[:] = source
        return
    buffer = np.empty((_TILE_COLUMNS, _TILE_ROWS + _GAP), source.dtype)
    for row in range(0, source.shape[0], _TILE_ROWS):
        for column in range(0, source.shape[1], _TILE_COLUMNS):
            place = np.s_[row : row + _TILE_ROWS, column : column + _TILE_COLUMNS]
            untransposed = source[place].T
            tile = buffer[: untransposed.shape[0], : untransposed.shape[1]]
            tile[:] = untransposed
            target[place] = tile.T
