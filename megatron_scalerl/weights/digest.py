"""A 64-bit digest of bytes, equal on all devices and fast on each.

A bucket is read as 64-bit words w_i; its digest is the sum of k_i * w_i modulo 2^64, with k_i odd and made from
i by a mixing function. Odd factors are invertible, so a change of one word is always detected; several changes,
such as swapped pieces, cancel with a probability of about 2^-63. It detects faults, not an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

_CHUNK_WORDS = 1 << 20
_MASK = (1 << 64) - 1


def _mixed(x: int) -> int:
    """splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """[_CHUNK_WORDS] int64 odd factors, splitmix64 in wrapping tensor arithmetic."""

    def shifted(t: torch.Tensor, bits: int) -> torch.Tensor:
        return (t >> bits) & ((1 << (64 - bits)) - 1)

    x = torch.arange(_CHUNK_WORDS, dtype=torch.int64) + _signed(0x9E3779B97F4A7C15)
    x = (x ^ shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return ((x ^ shifted(x, 31)) | 1).to(device)


def digest(data: torch.Tensor) -> int:
    """64-bit digest of a contiguous uint8 tensor whose length is a multiple of 8."""
    assert data.dtype == torch.uint8 and data.numel() % 8 == 0, "whole 64-bit words"
    words, factors, total = data.view(torch.int64), _factors(data.device), 0
    for number, start in enumerate(range(0, words.numel(), _CHUNK_WORDS)):
        part = words[start : start + _CHUNK_WORDS]
        value = int((part * factors[: part.numel()]).sum())
        total += value * (_mixed(number) | 1)
    return total & _MASK


def combine(digests: Iterable[int]) -> str:
    """Digest of a whole update from the digests of its buckets, in order (hex)."""
    total = 0
    for value in digests:
        total = _mixed(total ^ value)
    return f"{total:016x}"
