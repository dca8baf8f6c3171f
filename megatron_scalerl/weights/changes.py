"""The elements of a tensor that changed: found, coded in two to three bytes each, and read again. Lossless.

Positions are coded as gaps: one byte for the number of unchanged elements before each, with 255 for 255 more of them.
Values are coded in one of two ways, both exact to the bit, NaN payloads and signed zeros included:

    absolute    the new bits
    ulp         one signed byte: the distance in units in the last place, in the order of the numbers; -128 for a
                larger one, whose new bits follow apart. Only for types of two bytes, and only on the old values

At a density of 1 %, gaps take 1.08 bytes for an element; in bf16 `absolute` takes 3.1 and `ulp` 2.1 or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_scalerl.weights import change_loops
from megatron_scalerl.weights.change_loops import MOST_DIMENSIONS, loops
from megatron_scalerl.weights.digest import digest_at, factors_of, weighed
from megatron_scalerl.weights.plan import Ranges, volume

Codec = Literal["absolute", "ulp"]
MOST_CHANGED = 8
"""Where more than one in this many elements changed, all are sent: then coding and writing one by one cost more."""
SMALL = 1 << 14
"""Pieces of up to this many elements are coded at any density: a norm must not make its whole bucket be sent."""
_LONG, _FAR = change_loops.LONG_GAP, change_loops.FAR
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Elements whose bits differ, in order."""

    positions: Tensor
    """[n] int64"""
    old: Tensor
    """[n] int16 or int32, the bits before."""
    new: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Changed elements of a rectangle of a tensor, as they arrive."""

    tensor: int
    """Its number in the plan."""
    ranges: Ranges
    """The rectangle, of the whole tensor."""
    positions: Tensor
    """[n] int64, rising, in the rectangle's elements in row-major order."""
    steps: Tensor | None
    """[n] int8 for `ulp`."""
    values: Tensor
    """New bits: [n], with `steps` those of far elements only."""

    def bits(self, old: Tensor) -> Tensor:
        """[n] the new bits. old: [n] of the same type, the bits held now."""
        if self.steps is None:
            return self.values
        found = _ordered(_ordered(old) + self.steps)
        found[self.steps == _FAR] = self.values
        return found

    def coordinates(self) -> list[Tensor]:
        """[dimensions][n] int64 indices of the whole tensor."""
        found, rest = [], self.positions
        for first, end in reversed(self.ranges[1:]):
            up = rest.div(end - first, rounding_mode="floor")
            found.append(rest - up * (end - first) + first)
            rest = up
        if self.ranges:
            found.append(rest + self.ranges[0][0])
        return found[::-1]

    def digest(self, old: Tensor, new: Tensor, coordinates: Sequence[Tensor] | None = None) -> int:
        """What to add to a `value_digest` that had the old bits. coordinates: where they are known already."""
        if coordinates is None and (found := self._digest_on_cpu(old, new)) is not None:
            return found
        mask = (1 << (8 * old.element_size())) - 1
        change = (new.to(torch.int64) & mask) - (old.to(torch.int64) & mask)
        shape = [end for _, end in self.ranges]
        return digest_at(self.tensor, self.coordinates() if coordinates is None else coordinates, shape, change)

    def _digest_on_cpu(self, old: Tensor, new: Tensor) -> int | None:
        compiled, place = loops(), self.in_three()
        if compiled is None or place is None or old.device.type != "cpu":
            return None
        found = compiled.weigh(self.positions.numpy(), *place, unsigned(old), unsigned(new))
        return weighed(self.tensor, found)

    def in_three(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[np.ndarray, ...]] | None:
        """(sizes, first indices, factors of indices) of the rectangle in MOST_DIMENSIONS; None where it has more."""
        missing = MOST_DIMENSIONS - len(self.ranges)
        if missing < 0:
            return None
        sizes = (*(1,) * missing, *(end - first for first, end in self.ranges))
        firsts = (*(0,) * missing, *(first for first, _ in self.ranges))
        factors = (factors_of(axis, max(end, 1)) for axis, (_, end) in enumerate(self.ranges))
        return sizes, firsts, (*(np.ones(1, np.uint64),) * missing, *factors)


def can_code(dtype: torch.dtype) -> bool:
    """Whether changes of tensors of this type can be coded."""
    return dtype.itemsize in _BITS


def bits_of(values: Tensor) -> Tensor:
    """The values as integers of their size."""
    return values.view(_BITS[values.element_size()])


def unsigned(bits: Tensor) -> np.ndarray:
    """The memory of bits on a CPU as unsigned integers."""
    return bits.numpy().view(f"u{bits.element_size()}")


def most_coded(elements: int) -> int:
    """Where more of a piece's elements changed, all are sent."""
    return max(elements // MOST_CHANGED, min(elements, SMALL))


def find(held: Tensor, values: Tensor, *, any_number: bool = False) -> Found | None:
    """What changed, None where it is more than one in MOST_CHANGED of a piece that is not SMALL; `held` then has some
    of the new bits.

    held: [n] contiguous bits (`bits_of`), overwritten by the new ones. values: of any shape with n elements.
    any_number: never None.
    """
    new = bits_of(values.detach().contiguous().view(-1) if values.dim() else values.detach().reshape(1))
    most = held.numel() if any_number else most_coded(held.numel())
    if held.device.type == "cpu" and (compiled := loops()) is not None:
        flat, other = unsigned(held), unsigned(new)
        positions, old = np.empty(most, np.int64), np.empty(most, flat.dtype)
        aligned = held.data_ptr() % 8 == new.data_ptr() % 8 == 0
        whole = aligned * len(flat) // (8 // flat.itemsize) * (8 // flat.itemsize)
        words = flat[:whole].view(np.uint64), other[:whole].view(np.uint64)
        count = compiled.find(flat, other, *words, positions, old)
        if count < 0:
            return None
        at = torch.from_numpy(positions[:count].copy())
        before = torch.from_numpy(old[:count].copy().view(f"i{flat.itemsize}"))
        return Found(positions=at, old=before, new=new[at])
    at = (held != new).nonzero().flatten()
    if at.numel() > most:
        return None
    found = Found(positions=at, old=held[at], new=new[at])
    held[at] = found.new
    return found


def warm_up() -> None:
    """Compile what `find`, `encode`, `decode` and digests need on CPUs, outside an update."""
    for values in (torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)):
        found = find(bits_of(values.clone()), torch.ones_like(values))
        assert found is not None
        [piece] = decode(encode([(0, found)], "absolute"), [(0, ((0, 64),), values.dtype)])
        piece.digest(found.old, found.new)


def encode(found: Sequence[tuple[int, Found]], codec: Codec) -> Tensor:
    """[bytes] uint8, a multiple of 8: the changes of several pieces, each with its number; none of them empty.

    int64 [1]           number of pieces
    int64 [pieces, 4]   number, changed elements, bytes of gaps, far elements (-1: absolute)
    for each piece, every line padded to 8 bytes:
        uint8 [...]     gaps
        int8 [n]        ulp: steps
        bits [...]      absolute: all values; ulp: those of far elements
    """
    rows, planes = [], []
    for number, piece in found:
        gaps = _gaps(piece.positions)
        step = _steps(piece) if codec == "ulp" and piece.old.element_size() == 2 else None
        far = -1 if step is None else int((step == _FAR).sum())
        rows.append([number, piece.positions.numel(), gaps.numel(), far])
        planes += [gaps] if step is None else [gaps, step.view(torch.uint8)]
        planes.append((piece.new if step is None else piece.new[step == _FAR]).view(torch.uint8))
    head = torch.tensor([len(rows), *(field for row in rows for field in row)], dtype=torch.int64)
    device = planes[0].device
    return torch.cat([head.view(torch.uint8).to(device), *(padded for plane in planes for padded in _padded(plane))])


def decode(frame: Tensor, pieces: Sequence[tuple[int, Ranges, torch.dtype]]) -> Iterator[Changes]:
    """Inverse of `encode`. pieces: (tensor, rectangle, type) by number. Raises ValueError for anything else."""
    reader = _Reader(frame)
    (count,) = reader.take(torch.int64, 1).tolist()
    if not 0 <= count <= len(pieces):
        raise ValueError(f"weight changes: expected at most {len(pieces)} pieces, found {count}")
    for number, changed, gap_bytes, far in reader.take(torch.int64, 4 * count).view(count, 4).tolist():
        if not 0 <= number < len(pieces):
            raise ValueError(f"weight changes: expected one of {len(pieces)} pieces, found number {number}")
        tensor, ranges, dtype = pieces[number]
        positions = _positions(reader.take(torch.uint8, gap_bytes), changed)
        if positions.numel() != changed or (changed and int(positions[-1]) >= volume(ranges)):
            raise ValueError(f"weight changes: expected {changed} of {volume(ranges)} elements, found others")
        steps = None if far < 0 else reader.take(torch.int8, changed)
        if steps is not None and (dtype.itemsize != 2 or int((steps == _FAR).sum()) != far):
            raise ValueError(f"weight changes: expected {far} far elements of a type of two bytes, found others")
        values = reader.take(_BITS[dtype.itemsize], changed if steps is None else far)
        yield Changes(tensor=tensor, ranges=ranges, positions=positions, steps=steps, values=values)
    reader.end()


class _Reader:
    """Takes padded planes from a frame, one after the other."""

    def __init__(self, frame: Tensor) -> None:
        self._frame, self._at = frame, 0

    def take(self, dtype: torch.dtype, count: int) -> Tensor:
        """[count]; Raises ValueError beyond the end."""
        size = count * dtype.itemsize
        if count < 0 or self._at + size > self._frame.numel():
            raise ValueError(
                f"weight changes: expected {size} bytes at {self._at}, found {self._frame.numel()} in all"
            )
        plane = self._frame[self._at : self._at + size].view(dtype)
        self._at += -(-size // 8) * 8
        return plane

    def end(self) -> None:
        """Raises ValueError for bytes that are left."""
        if self._at != self._frame.numel():
            raise ValueError(f"weight changes: expected {self._at} bytes, found {self._frame.numel()}")


def _padded(plane: Tensor) -> list[Tensor]:
    missing = -plane.numel() % 8
    return [plane, plane.new_zeros(missing)] if missing else [plane]


def _gaps(positions: Tensor) -> Tensor:
    """[...] uint8 of rising positions."""
    if positions.device.type == "cpu" and (compiled := loops()) is not None:
        found = np.empty(len(positions) + int(positions[-1]) // _LONG + 1, np.uint8)
        return torch.from_numpy(found[: compiled.gaps(positions.numpy(), found)])
    before = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    longs = before.div(_LONG, rounding_mode="floor")
    ends = torch.cumsum(longs + 1, 0) - 1
    gaps = torch.full((int(ends[-1]) + 1,), _LONG, dtype=torch.uint8, device=positions.device)
    gaps[ends] = (before - longs * _LONG).to(torch.uint8)
    return gaps


def _positions(gaps: Tensor, changed: int) -> Tensor:
    """[changed] int64, inverse of `_gaps`; of another length where the gaps are of others."""
    if gaps.device.type == "cpu" and (compiled := loops()) is not None:
        found = np.empty(max(min(changed, len(gaps)), 0), np.int64)
        count = compiled.positions(gaps.numpy(), found)
        return torch.from_numpy(found[:count] if count >= 0 else np.empty(0, np.int64))
    last = gaps != _LONG
    return torch.cumsum(gaps.to(torch.int64) + last, 0)[last] - 1


def _steps(piece: Found) -> Tensor:
    """[n] int8 distances, _FAR where they do not fit."""
    distance = _ordered(piece.new).to(torch.int32) - _ordered(piece.old)
    return torch.where(distance.abs() < -_FAR, distance, _FAR).to(torch.int8)


def _ordered(bits: Tensor) -> Tensor:
    """Bits of a 2-byte float as int16 in the order of the numbers, and back."""
    return bits ^ ((bits >> 15) & 0x7FFF)
