"""The assembly of a tensor from rectangles of other tensors, and the tensor's rows as bits, band by band.

Assemblies describe both directions of a conversion. A tensor is seen as a matrix, [product of all but the last
dimension, last dimension], a vector as [n, 1]. numpy has no bfloat16: arrays hold a tensor's bits as unsigned
integers, and safetensors' name of the type (F32, BF16, F16) is passed with the array. Only `cast` imports torch.
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
"""safetensors' name of a type -> integers that hold the bits of a value."""
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types that a policy's weights may have: safetensors' name -> torch's."""
HF_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
"""torch's name -> safetensors'."""
_INFINITY_SHIFTED = {"F32": 0xFF000000, "BF16": 0xFF00, "F16": 0xF800}
"""Bits of infinity without the sign: shifted left by 1, as values are before a comparison."""
_CHECK_ITEMS = 1 << 18
"""Elements that are shifted at a time: 1 MiB of F32, which stays in a core's cache."""
_TILE_ROWS = 128
_TILE_COLUMNS = 512
_GAP = 32
"""Elements that lengthen a row of the buffer to a length that is not a power of two."""

Origin = Literal["hugging_face", "megatron", "merged"]
"""Tensor of a Hugging Face folder, chunk of Megatron's checkpoint, or weight with a merged adapter (`to_peft`)."""
Index = tuple[int | slice, ...]
Sources = Callable[[Origin, str], np.ndarray]
"""The bits of a whole tensor or chunk by (origin, name), mapped from the file if possible."""


@record
class Part:
    """A rectangle of the assembled tensor, and the source of the elements."""

    row: int
    """First row of the rectangle in the assembled tensor, seen as a matrix."""
    column: int
    """First column of the rectangle."""
    height: int
    width: int
    origin: Origin
    source: str
    """Name of the tensor or chunk that the rectangle is cut from."""
    index: Index
    """Selects the elements; an int drops that dimension."""
    transposed: bool = False
    """True if the source holds [column, row]."""


@record
class Assembly:
    """A tensor to assemble. The parts cover the tensor exactly once, in the order of rows."""

    name: str
    dtype: str
    """Type to write. A tensor whose type is none of TORCH_NAMES is written in `source_dtype`."""
    source_dtype: str
    """Type of the elements of all parts."""
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Number of rows of the tensor, seen as a matrix."""
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
    """(rows, columns) of a tensor of this shape, seen as a matrix."""
    if len(shape) < 2:
        return prod(shape), 1
    return prod(shape[:-1]), shape[-1]


def check_covered(assembly: Assembly) -> None:
    """Raises ValueError unless the parts have the tensor's area and do not overlap."""
    height, width = matrix_shape(assembly.shape)
    covered = sum(part.height * part.width for part in assembly.parts) == height * width
    spans = sorted((part.column, part.row, part.row + part.height) for part in assembly.parts)
    for (column, _, end), (next_column, next_row, _) in zip(spans, spans[1:]):
        covered = covered and (column != next_column or end <= next_row)
    if not covered:
        raise ValueError(f"{assembly.name}: its parts overlap, or leave out some of its elements")


def band_rows(assembly: Assembly) -> int:
    """Rows of one band."""
    return max(1, BAND_BYTES // max(1, assembly.row_bytes))


def bands(assembly: Assembly, sources: Sources, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
    """Rows `start` to `stop` in order, as contiguous arrays in the type to write, about BAND_BYTES each.

    An array is valid until the next request. Rows that are contiguous in a file are not copied.
    """
    if stop is None:
        stop = assembly.rows
    step = band_rows(assembly)
    for first in range(start, stop, step):
        yield band(assembly, sources, first, min(stop, first + step))


def band(assembly: Assembly, sources: Sources, start: int, stop: int) -> np.ndarray:
    """[rows, columns] rows `start` to `stop`, contiguous, in the type to write."""
    width = matrix_shape(assembly.shape)[1]
    parts = [part for part in assembly.parts if part.row < stop and start < part.row + part.height]
    # The usual case, a tensor that is whole rows of one source: the bytes are written from the mapped file.
    if len(parts) == 1 and not parts[0].transposed and parts[0].width == width:
        rows = _rows_of(parts[0], sources, start, stop)
        if rows.flags.c_contiguous:
            return cast(rows, assembly.source_dtype, assembly.dtype)
    out = np.empty((stop - start, width), BITS[assembly.source_dtype])
    for part in parts:
        first = max(part.row, start)
        end = min(part.row + part.height, stop)
        target = out[first - start : end - start, part.column : part.column + part.width]
        copy_into(target, _rows_of(part, sources, first, end))
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
    flat = bits.reshape(-1)
    limit = _INFINITY_SHIFTED[dtype]
    # A value without the sign is not finite exactly if the bits are at least infinity's.
    shifted = np.empty(min(flat.size, _CHECK_ITEMS), flat.dtype)
    for start in range(0, flat.size, _CHECK_ITEMS):
        items = flat[start : start + _CHECK_ITEMS]
        out = shifted[: items.size]
        np.left_shift(items, 1, out=out)
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
    # numpy takes no bfloat16 tensor, so the bits pass as integers.
    integers = {"F32": torch.int32}.get(target, torch.int16)
    return result.view(integers).numpy().view(BITS[target])


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
            window = np.s_[row : row + _TILE_ROWS, column : column + _TILE_COLUMNS]
            untransposed = source[window].T
            tile = buffer[: untransposed.shape[0], : untransposed.shape[1]]
            tile[:] = untransposed
            target[window] = tile.T
