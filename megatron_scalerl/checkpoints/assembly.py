"""Assembles a tensor from rectangles of source tensors, and yields the tensor's bits in blocks of rows ("bands").

An `Assembly` lists the parts: of a Megatron parameter, cut from Hugging Face tensors, or the reverse. A tensor is
treated as a matrix, [product of all but the last dimension, last dimension], a vector as [n, 1]. numpy has no
bfloat16: arrays hold a tensor's bits as unsigned integers, and safetensors' name of the type (F32, BF16, F16) is
passed with the array. Only `cast` imports torch.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Literal

import numpy as np

from megatron_scalerl.checkpoints.hf_folder import ITEM_BYTES
from megatron_scalerl.record import record

BAND_BYTES = 8 << 20
"""Approximate size (bytes) of a band, a block of whole rows. Tensors are read, cast, checked and written band by
band."""
BITS = {dtype: np.dtype(f"u{size}") for dtype, size in ITEM_BYTES.items()}
"""safetensors' name of a type -> numpy's unsigned integer type for the bits of a value."""
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""safetensors' name -> torch's name, for the types that a policy's weights may have."""
HF_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
"""torch's name -> safetensors' name, for the types in TORCH_NAMES."""
_INFINITY_SHIFTED = {"F32": 0xFF000000, "BF16": 0xFF00, "F16": 0xF800}
"""Bit pattern of infinity, shifted left by 1 to drop the sign bit. `has_nonfinite` shifts values in the same way
before comparing."""
_CHECK_ITEMS = 1 << 18
"""Number of elements that `has_nonfinite` shifts at a time: 1 MiB of F32, which stays in a core's cache."""
_TILE_ROWS = 128
_TILE_COLUMNS = 512
_GAP = 32
"""Padding (elements) at the end of each row of `copy_into`'s buffer, so that the row's length is no power of two."""

Origin = Literal["hugging_face", "megatron", "merged"]
"""Where elements come from: a tensor of a Hugging Face folder, a chunk of Megatron's checkpoint, or a weight with a
merged adapter (`to_peft`)."""
Index = tuple[int | slice, ...]
Sources = Callable[[Origin, str], np.ndarray]
"""A function from (origin, name) to the bits of a whole tensor or chunk, mapped from the file if possible."""


@record
class Part:
    """A rectangle of the assembled tensor, and the source of the rectangle's elements."""

    row: int
    """First row of the rectangle in the assembled tensor, seen as a matrix."""
    column: int
    """First column of the rectangle in the assembled tensor, seen as a matrix."""
    height: int
    width: int
    origin: Origin
    source: str
    """Name of the tensor or chunk that the rectangle is cut from."""
    index: Index
    """Index that cuts the rectangle out of the source; an int in the index drops that dimension."""
    transposed: bool = False
    """True if the source holds the rectangle as [column, row]."""


@record
class Assembly:
    """How a tensor is assembled from parts. The parts, ordered by row, cover each element of the tensor once."""

    name: str
    dtype: str
    """Type (F32, BF16, F16) in which the tensor is written; a type outside TORCH_NAMES must equal `source_dtype`."""
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
        """Bytes of one row in the written type `dtype`."""
        return matrix_shape(self.shape)[1] * BITS[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in the written type `dtype`."""
        return prod(self.shape) * BITS[self.dtype].itemsize


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a tensor of this shape when the tensor is seen as a matrix."""
    if len(shape) < 2:
        return prod(shape), 1
    return prod(shape[:-1]), shape[-1]


def check_covered(assembly: Assembly) -> None:
    """Raises ValueError unless the parts cover every element of the tensor exactly once."""
    height, width = matrix_shape(assembly.shape)
    covered = sum(part.height * part.width for part in assembly.parts) == height * width
    spans = sorted((part.column, part.row, part.row + part.height) for part in assembly.parts)
    for (column, _, end), (next_column, next_row, _) in pairwise(spans):
        covered = covered and (column != next_column or end <= next_row)
    if not covered:
        raise ValueError(f"{assembly.name}: cannot assemble this tensor, whose parts overlap or leave elements out")


def band_rows(assembly: Assembly) -> int:
    """Number of whole rows in a band of about BAND_BYTES, at least 1."""
    return max(1, BAND_BYTES // max(1, assembly.row_bytes))


def bands(assembly: Assembly, sources: Sources, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
    """Yield rows `start` to `stop` in bands of about BAND_BYTES: contiguous arrays of the type `assembly.dtype`.

    An array is valid until the request for the next array. Rows that are contiguous in a file are not copied.
    """
    if stop is None:
        stop = assembly.rows
    step = band_rows(assembly)
    for first in range(start, stop, step):
        yield band(assembly, sources, first, min(stop, first + step))


def band(assembly: Assembly, sources: Sources, start: int, stop: int) -> np.ndarray:
    """Assemble rows `start` to `stop` as a contiguous array [rows, columns] of the type `assembly.dtype`."""
    width = matrix_shape(assembly.shape)[1]
    parts = [part for part in assembly.parts if part.row < stop and start < part.row + part.height]
    # In the usual case the rows are whole rows of one source, and a view of the mapped file needs no copy.
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
    """The elements that a part contributes to rows `start` to `stop` of the assembled tensor."""
    view = sources(part.origin, part.source)[part.index]
    view = view.reshape(matrix_shape(view.shape))
    if part.transposed:
        view = view.T
    return view[start - part.row : stop - part.row]


def has_nonfinite(bits: np.ndarray, dtype: str) -> bool:
    """True if a contiguous array of `dtype` contains a NaN or an Inf, the values whose exponent bits are all set."""
    flat = bits.reshape(-1)
    limit = _INFINITY_SHIFTED[dtype]
    # NaN and Inf are the values whose bits without the sign, as an integer, are at least the bits of infinity.
    shifted = np.empty(min(flat.size, _CHECK_ITEMS), flat.dtype)
    for start in range(0, flat.size, _CHECK_ITEMS):
        items = flat[start : start + _CHECK_ITEMS]
        out = shifted[: items.size]
        np.left_shift(items, 1, out=out)
        if int(out.max()) >= limit:
            return True
    return False


def cast(bits: np.ndarray, source: str, target: str) -> np.ndarray:
    """Convert bits from the float type `source` to the float type `target`, rounding to nearest, ties to even."""
    if source == target:
        return bits
    import torch

    values = torch.from_numpy(bits.copy()).view(getattr(torch, TORCH_NAMES[source]))
    result = values.to(getattr(torch, TORCH_NAMES[target]))
    # Every NaN becomes torch.nan, because the bits of a converted NaN depend on the CPU.
    result[result.isnan()] = torch.nan
    # numpy accepts no bfloat16 tensor, so the bits are passed as integers.
    integers = {"F32": torch.int32}.get(target, torch.int16)
    return result.view(integers).numpy().view(BITS[target])


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """Copy the matrix `source` into `target`: target[:] = source. A transposed source is copied tile by tile.

    A tile is first copied untransposed, into a buffer whose row length is no power of two. In rows of a power of two,
    all elements of a column share a few cache sets, which makes a plain transposed copy ten times slower.
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
