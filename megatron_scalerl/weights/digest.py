"""64-bit digests of bytes and of tensors' values, equal and fast on all devices.

`digest` reads bytes, such as a bucket, as 64-bit words w_i; the digest is the sum of k_i * w_i modulo 2^64, with k_i
odd and made from i by a mixing function. Odd factors are invertible, so a change of one word is always detected.
Several changes, such as swapped words, cancel with a probability of about 2^-63.

`value_digest` is a digest of values in any layout. The digest of a set of elements is the sum modulo 2^64 of

    f_n * w_0(i_0) * w_1(i_1) * ... * bits

over the elements: n is the tensor's number, (i_0, i_1, ...) the element's index in the whole tensor, `bits` the
element's bits as an unsigned integer, and all factors are odd and made by a mixing function. Hence the digests of
disjoint parts add up to the digest of the whole tensor, in any layout: sharded, fused, transposed. A change of one
element is always detected; several changes cancel with a probability of about 2^-63.

Both digests detect faults, not an adversary.
"""

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

Along = range | Tensor
"""The whole tensor's index at each position of a dimension: a range of step 1, or an int64 tensor [n] in any
order."""
_CHUNK_WORDS = 1 << 20
_MASK = (1 << 64) - 1
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Size of an element (bytes) -> integer type that has the element's bits."""


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 numbers by the function SplitMix64 (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def mixed(x: int) -> int:
    """`splitmix64` of one number."""
    return int(splitmix64(np.array(x, np.uint64)))


@cache
def _factors(device: torch.device) -> Tensor:
    """[_CHUNK_WORDS] int64 odd factors, one for each word of a chunk."""
    words = splitmix64(np.arange(_CHUNK_WORDS, dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(words.view(np.int64)).to(device)


def digest(data: Tensor) -> int:
    """64-bit digest of a contiguous uint8 tensor whose length is a multiple of 8."""
    assert data.dtype == torch.uint8 and data.numel() % 8 == 0, "whole 64-bit words"
    words = data.view(torch.int64)
    factors = _factors(data.device)
    starts = np.arange(0, words.numel(), _CHUNK_WORDS)
    chunk_factors = splitmix64(np.arange(len(starts), dtype=np.uint64)) | np.uint64(1)
    chunk_count, last_length = divmod(words.numel(), _CHUNK_WORDS)
    whole_chunks = weighted_sum(words, starts[:chunk_count], chunk_factors[:chunk_count], factors)
    last_chunk = weighted_sum(words, starts[chunk_count:], chunk_factors[chunk_count:], factors[:last_length])
    return (whole_chunks + last_chunk) & _MASK


def weighted_sum(bits: Tensor, starts: np.ndarray, rows: np.ndarray, inner: Tensor) -> int:
    """sum_r rows[r] * sum_j inner[j] * bits[starts[r] + j] modulo 2^64, computed on the device of the bits.

    bits: [n] integers, as unsigned numbers. starts: [r] int64. rows: [r] uint64. inner: [j] int64, on bits' device.
    """
    if bits.device.type != "cpu":
        return _on_device(bits, starts, rows, inner)
    unsigned = bits.numpy().view(f"u{bits.element_size()}")
    return int(_compiled_sum()(unsigned, starts, rows, inner.numpy().view(np.uint64)))


def _on_device(bits: Tensor, starts: np.ndarray, rows: np.ndarray, inner: Tensor) -> int:
    # The import is here because `sum_kernel` imports Triton, which a machine without a GPU may lack.
    from megatron_scalerl.weights import sum_kernel

    device_starts = torch.from_numpy(starts).to(bits.device)
    device_rows = torch.from_numpy(rows.view(np.int64)).to(bits.device)
    return sum_kernel.weighted_sum(bits, device_starts, device_rows, inner)


@cache
def _compiled_sum():  # type: ignore[no-untyped-def]
    """A version of `weighted_sum` for CPUs, compiled by numba, which vLLM depends on."""
    import numba

    @numba.njit(nogil=True)
    def kernel(bits, starts, rows, inner):  # type: ignore[no-untyped-def]
        total = numba.uint64(0)
        for r in range(len(starts)):
            row = bits[starts[r] : starts[r] + len(inner)]
            row_sum = numba.uint64(0)
            for j in range(len(inner)):
                row_sum += inner[j] * numba.uint64(row[j])
            total += row_sum * rows[r]
        return total

    return kernel


def combine(digests: Iterable[int]) -> str:
    """Digest (hex) of a whole update from the digests of the buckets, in order."""
    total = 0
    for value in digests:
        total = mixed(total ^ value)
    return f"{total:016x}"


def value_digest(values: Tensor, tensor: int, axes: Sequence[int], along: Sequence[Along]) -> int:
    """Digest of a part of a tensor.

    values: of any strides; dimension d of the values has the indices `along[d]` of the whole tensor's dimension
    `axes[d]`. A dimension of the tensor that is not in `axes` gets no factor: the caller multiplies the digest by
    `at`.
    """
    factors = [_factors_of_indices(axis, index) for axis, index in zip(axes, along)]
    return _weighted_digest(values, factors) * (mixed(tensor) | 1) & _MASK


def at(axis: int, index: int) -> int:
    """The factor of index `index` along `axis`, for a part that has no dimension along this axis."""
    return int(factors_of(axis, index + 1)[index])


def total(digests: Sequence[int]) -> int:
    """Digest of several disjoint parts from the parts' digests."""
    return sum(digests) & _MASK


def _factors_of_indices(axis: int, along: Along) -> np.ndarray:
    # The indices of a range select a slice of the table, which is not copied.
    if isinstance(along, range):
        return factors_of(axis, along.stop)[along.start : along.stop]
    index = along.cpu().numpy()
    return factors_of(axis, int(index.max(initial=0)) + 1)[index]


def factors_of(axis: int, size: int) -> np.ndarray:
    """The factors of the indices 0, 1, ... along dimension `axis` of a tensor: [at least `size`] uint64."""
    return _table(axis, max(size - 1, 1).bit_length())


@cache
def _table(axis: int, bits: int) -> np.ndarray:
    """The factors of the first 2^bits indices along dimension `axis`. One table serves all sizes up to 2^bits."""
    return splitmix64(np.arange(1 << bits, dtype=np.uint64) + np.uint64((axis + 1) << 40)) | np.uint64(1)


def _weighted_digest(values: Tensor, factors: Sequence[np.ndarray]) -> int:
    strides = values.stride()
    contiguous = (d for d, stride in enumerate(strides) if stride == 1 and values.shape[d] > 1)
    inner = next(contiguous, None)
    if values.dim() == 0:
        return _weighted_digest(values.view(1), [np.ones(1, np.uint64)])
    # A row is a sum along the innermost dimension in memory; indices of all further dimensions number the rows.
    if inner is None:
        values = values.contiguous()
        strides = values.stride()
        inner = values.dim() - 1
    starts = np.zeros(1, np.int64)
    rows = np.ones(1, np.uint64)
    for d, (size, stride) in enumerate(zip(values.shape, strides)):
        if d != inner:
            starts = (starts[:, None] + np.arange(size) * stride).ravel()
            rows = (rows[:, None] * factors[d]).ravel()
    if values.numel() == 0:
        return 0
    flat = values.detach().as_strided((int(starts.max()) + values.shape[inner],), (1,))
    inner_factors = np.ascontiguousarray(factors[inner]).view(np.int64)
    on_device = torch.from_numpy(inner_factors).to(values.device)
    return weighted_sum(flat.view(_SIGNED[values.element_size()]), starts, rows, on_device)
