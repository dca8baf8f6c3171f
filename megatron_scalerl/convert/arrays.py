"""Weights as numpy sees them: bits of a type, casts between the float types, a search for NaN and Inf.

bfloat16 is not known to numpy, so arrays hold the bits as unsigned integers and the type's name goes beside
them. Names are those of safetensors: F32, BF16, F16.
"""

from __future__ import annotations

import numpy as np

BITS: dict[str, np.dtype] = {"F32": np.dtype(np.uint32), "BF16": np.dtype(np.uint16), "F16": np.dtype(np.uint16)}
"""Types that a policy's weights may have -> integers that hold their bits."""
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""safetensors' name -> torch's."""
RAW_BYTES = {
    **dict.fromkeys(("I64", "U64", "F64"), 8),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I16", "U16", "BF16", "F16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
"""Bytes of an element of every type that is only carried along."""
RAW = "RAW"
"""Stands for any type: bytes that are copied as they are."""
_INFINITY_SHIFTED = {"F32": 0xFF000000, "BF16": 0xFF00, "F16": 0xF800}
_CHECK_ITEMS = 1 << 18
_TILE_ROWS, _TILE_COLUMNS, _GAP = 128, 512, 32


def bits_of(dtype: str) -> np.dtype:
    """Integers that hold the bits of `dtype`; bytes for RAW."""
    return np.dtype(np.uint8) if dtype == RAW else BITS[dtype]


def has_nonfinite(bits: np.ndarray, dtype: str) -> bool:
    """True where a contiguous array of `dtype` has a NaN or an Inf: all bits of an exponent are set."""
    flat, limit = bits.reshape(-1), _INFINITY_SHIFTED[dtype]
    # Without its sign a value is not finite exactly where its bits reach those of infinity.
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
    values = _to_float32(bits, source)
    if target == "F32":
        return values.view(np.uint32)
    if target == "BF16":
        return _to_bfloat16(values)
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint16)


def _to_float32(bits: np.ndarray, source: str) -> np.ndarray:
    if source == "F32":
        return bits.view(np.float32)
    if source == "F16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """target[:] = source for matrices; a transposed source goes tile by tile.

    A tile is first copied as it lies, into rows whose length is no power of two: where it is one, a column's
    elements all fall on the same few places of the cache, and the plain transposed copy is ten times slower.
    """
    if source.strides[0] >= source.strides[1] or min(source.shape) == 1:
        target[:] = source
        return
    room = np.empty((_TILE_COLUMNS, _TILE_ROWS + _GAP), source.dtype)
    for row in range(0, source.shape[0], _TILE_ROWS):
        for column in range(0, source.shape[1], _TILE_COLUMNS):
            place = np.s_[row : row + _TILE_ROWS, column : column + _TILE_COLUMNS]
            as_it_lies = source[place].T
            tile = room[: as_it_lies.shape[0], : as_it_lies.shape[1]]
            tile[:] = as_it_lies
            target[place] = tile.T
