"""A 64-bit digest of the values of tensors, whatever the layout that they are held in.

The digest of a set of elements is the sum modulo 2^64 of

    f_n * w_0(i_0) * w_1(i_1) * ... * bits

over its elements: n is the tensor's number, (i_0, i_1, ...) the element's index in the whole tensor, `bits` its bits
as an unsigned integer, and all factors are odd and made by a mixing function. Hence the digests of disjoint parts
add up to that of the whole, in any layout: sharded, fused, transposed. A change of one element is always detected;
several, such as swapped parts, cancel with a probability of about 2^-63. It detects faults, not an adversary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from megatron_scalerl.weights.digest import mixed, splitmix64, weighted_sum

Along = range | torch.Tensor
"""The whole tensor's index at each place of a dimension: a range of step 1, or [n] int64 in any order."""
_MASK = (1 << 64) - 1
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def value_digest(values: torch.Tensor, tensor: int, axes: Sequence[int], along: Sequence[Along]) -> int:
    """Digest of a part of a tensor. values: of any strides; dimension d has the indices `along[d]` of the whole
    tensor's dimension `axes[d]`. Other dimensions count as index 0: see `at`.
    """
    factors = [_of_indices(axis, index) for axis, index in zip(axes, along)]
    return weighed(tensor, _weighted(values, factors))


def digest_at(tensor: int, coordinates: Sequence[torch.Tensor], shape: Sequence[int], values: torch.Tensor) -> int:
    """Digest of single elements of a tensor of at least this shape.

    coordinates: [dimensions][n] int64. values: [n] int64, bits or differences of bits.
    """
    for axis, (index, size) in enumerate(zip(coordinates, shape)):
        values = values * _table_on(axis, max(size - 1, 1).bit_length(), values.device)[index]
    return weighed(tensor, int(values.sum()))


def weighed(tensor: int, found: int) -> int:
    """Digest of elements of a tensor from their sum without its factor."""
    return found * (mixed(tensor) | 1) & _MASK


def at(axis: int, index: int) -> int:
    """The factor of one index, where a part has no dimension along `axis`."""
    return int(factors_of(axis, index + 1)[index])


def total(digests: Sequence[int]) -> int:
    """Digest of parts from the digests of each."""
    return sum(digests) & _MASK


def _of_indices(axis: int, along: Along) -> np.ndarray:
    if isinstance(along, range):
        return factors_of(axis, along.stop)[along.start : along.stop]
    index = along.cpu().numpy()
    return factors_of(axis, int(index.max(initial=0)) + 1)[index]


def factors_of(axis: int, size: int) -> np.ndarray:
    """[at least `size`] uint64 factors of the indices of a dimension of a tensor."""
    return _table(axis, max(size - 1, 1).bit_length())


@cache
def _table_on(axis: int, bits: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_table(axis, bits).view(np.int64)).to(device)


@cache
def _table(axis: int, bits: int) -> np.ndarray:
    """[2^bits] factors; one table serves all sizes up to its own."""
    return splitmix64(np.arange(1 << bits, dtype=np.uint64) + np.uint64((axis + 1) << 40)) | np.uint64(1)


def _weighted(values: torch.Tensor, factors: Sequence[np.ndarray]) -> int:
    strides = values.stride()
    inner = next((d for d, stride in enumerate(strides) if stride == 1 and values.shape[d] > 1), None)
    if inner is None:
        values, inner = values.contiguous(), values.dim() - 1
        strides = values.stride()
    if inner < 0:  # a scalar
        values, factors, strides, inner = values.view(1), [np.ones(1, np.uint64)], (1,), 0
    starts, rows = np.zeros(1, np.int64), np.ones(1, np.uint64)
    for d, (size, stride) in enumerate(zip(values.shape, strides)):
        if d != inner:
            starts = (starts[:, None] + np.arange(size) * stride).ravel()
            rows = (rows[:, None] * factors[d]).ravel()
    if values.numel() == 0:
        return 0
    flat = values.detach().as_strided((int(starts.max()) + values.shape[inner],), (1,))
    along = torch.from_numpy(np.ascontiguousarray(factors[inner]).view(np.int64)).to(values.device)
    return weighted_sum(flat.view(_SIGNED[values.element_size()]), starts, rows, along)
