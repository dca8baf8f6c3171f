"""The elements of a tensor that changed: found, coded in three bytes each, and read again. Lossless.

Positions are coded as gaps: one byte for the number of unchanged elements before each, with 255 for 255 more of them.
Values are the new bits, NaN payloads and signed zeros included. At a density of 1 % gaps take 1.08 bytes for an
element, in bf16 with its bits 3.1.

    optimizer's step    Found of each shard that it writes (`weights.written`), or of a comparison with a copy
    sender              Found of the rectangles of a bucket -> encode -> one frame
    receiver            frame, whose digest was checked -> decode -> Changes, written by `weights.live_changes`

All pieces of a bucket are coded, read and written together: on a GPU the operations, and the waits of its host, then
do not grow with the number of tensors.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megatron_scalerl.record import record
from megatron_scalerl.weights.plan import Ranges

MOST_CHANGED = 8
"""Where more than one in this many elements changed, all are sent: then coding and writing one by one cost more."""
SMALL = 1 << 14
"""Pieces of up to this many elements are coded at any density: a norm must not make its whole bucket be sent."""
_LONG = 255
_BITS = {2: torch.int16, 4: torch.int32}


@record
class Found:
    """Elements whose bits differ, in order."""

    positions: Tensor
    """[n] int64"""
    bits: Tensor
    """[n] int16 or int32, the new ones."""


@record
class Changes:
    """Changed elements of a rectangle of a tensor, as they arrive."""

    tensor: int
    """Its number in the plan."""
    ranges: Ranges
    """The rectangle, of the whole tensor."""
    positions: Tensor
    """[n] int64, rising, in the rectangle's elements in row-major order."""
    values: Tensor
    """[n] of the tensor's type."""


def bits_of(values: Tensor) -> Tensor:
    """The values as integers of their size."""
    return values.view(_BITS[values.element_size()])


def most_coded(elements: int) -> int:
    """Where more of a piece's elements changed, all are sent."""
    return max(elements // MOST_CHANGED, min(elements, SMALL))


def find(held: Tensor, values: Tensor) -> Found:
    """What changed. held: [n] contiguous bits (`bits_of`), overwritten by the new ones. values: of any shape with n
    elements."""
    new = bits_of(values.detach().reshape(-1))
    positions = (held != new).nonzero().flatten()
    bits = new[positions]
    held[positions] = bits
    return Found(positions=positions, bits=bits)


def encode(found: Sequence[tuple[int, Found]]) -> Tensor:
    """[bytes] uint8, a multiple of 8: the changes of several pieces, each with its number; none of them empty.

    int64 [1]           number of pieces
    int64 [pieces, 3]   number, changed elements, bytes of gaps; wide types first
    uint8 [...]         gaps of all pieces, padded to 8 bytes
    bits [...]          new bits of all pieces, padded to 8 bytes
    """
    found = sorted(found, key=lambda one: -one[1].bits.element_size())
    gaps, gap_bytes = _gaps([piece.positions for _, piece in found])
    head = [len(found)]
    for (number, piece), size in zip(found, gap_bytes):
        head += [number, len(piece.positions), size]
    bits = torch.cat([piece.bits.view(torch.uint8) for _, piece in found])
    return torch.cat([_host(head, gaps.device).view(torch.uint8), _padded(gaps), _padded(bits)])


def decode(frame: Tensor, pieces: Sequence[tuple[int, Ranges, torch.dtype]]) -> list[Changes]:
    """Inverse of `encode`. pieces: (tensor, rectangle, type) by number."""
    count = int(frame[:8].view(torch.int64))
    start = 8 + 24 * count
    rows = frame[8:start].view(torch.int64).view(count, 3).tolist()
    counts = [changed for _, changed, _ in rows]
    gap_bytes = [size for *_, size in rows]
    positions = _positions(frame[start : start + sum(gap_bytes)], gap_bytes, counts)
    start += -(-sum(gap_bytes) // 8) * 8
    sizes = [changed * pieces[number][2].itemsize for number, changed, _ in rows]
    planes = frame[start : start + sum(sizes)].split(sizes)
    changes = []
    for (number, *_), at, plane in zip(rows, positions, planes):
        tensor, ranges, dtype = pieces[number]
        changes.append(Changes(tensor=tensor, ranges=ranges, positions=at, values=plane.view(dtype)))
    return changes


def counted(counts: Sequence[int], device: torch.device) -> Tensor:
    """[sum of counts] the number of the piece that each element is of."""
    return torch.repeat_interleave(_host(counts, device), output_size=sum(counts))


def _host(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device)


def _padded(plane: Tensor) -> Tensor:
    return torch.nn.functional.pad(plane, (0, -plane.numel() % 8))


def _gaps(positions: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """([...] uint8 of each piece's rising positions, one piece after the other; bytes of each)."""
    every = torch.cat(list(positions))
    ends = list(accumulate(map(len, positions)))
    before = torch.diff(every, prepend=every.new_full((1,), -1)) - 1
    starts = _host([0, *ends[:-1]], every.device)
    before[starts] = every[starts]
    longs = before.div(_LONG, rounding_mode="floor")
    last = torch.cumsum(longs + 1, 0)
    sizes = last[_host(ends, every.device) - 1].tolist()
    gaps = torch.full((sizes[-1],), _LONG, dtype=torch.uint8, device=every.device)
    gaps[last - 1] = (before - longs * _LONG).to(torch.uint8)
    return gaps, [end - start for start, end in zip([0, *sizes], sizes)]


def _positions(gaps: Tensor, gap_bytes: Sequence[int], counts: Sequence[int]) -> Sequence[Tensor]:
    """[pieces][changed] int64, inverse of `_gaps`."""
    last = gaps != _LONG
    running = torch.cumsum(gaps.to(torch.int64) + last, 0)
    ends = _host(list(accumulate(gap_bytes)), gaps.device)
    before = torch.cat([ends.new_zeros(1), running[ends[:-1] - 1]])
    return (running[last] - 1 - before[counted(counts, gaps.device)]).split(list(counts))
