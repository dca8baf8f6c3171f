"""The elements of a tensor that changed: found, coded in two to three bytes each, and read again. Lossless.

Positions are coded as gaps: one byte for the number of unchanged elements before each, with 255 for 255 more of them.
Values are coded in one of two ways, both exact to the bit, NaN payloads and signed zeros included:

    absolute    the new bits
    ulp         one signed byte: the distance in units in the last place, in the order of the numbers; -128 for a
                larger one, whose new bits follow apart. Only for types of two bytes, and only on the old values

At a density of 1 %, gaps take 1.08 bytes for an element; in bf16 `absolute` takes 3.1 and `ulp` 2.1 or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from megatron_scalerl.weights.digest import change_at, total, weighed_by
from megatron_scalerl.weights.plan import Ranges, volume

Codec = Literal["absolute", "ulp"]
MOST_CHANGED = 8
"""Where more than one in this many elements changed, all are sent: then coding and writing one by one cost more."""
SMALL = 1 << 14
"""Pieces of up to this many elements are coded at any density: a norm must not make its whole bucket be sent."""
_LONG, _FAR = 255, -128
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
        if not self.values.numel():
            return found
        far = self.steps == _FAR
        return torch.where(far, self.values[(far.cumsum(0) - 1).clamp_(min=0)], found)


def can_code(dtype: torch.dtype) -> bool:
    """Whether changes of tensors of this type can be coded."""
    return dtype.itemsize in _BITS


def bits_of(values: Tensor) -> Tensor:
    """The values as integers of their size."""
    return values.view(_BITS[values.element_size()])


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
    at = (held != new).nonzero().flatten()
    if at.numel() > most:
        return None
    found = Found(positions=at, old=held[at], new=new[at])
    held[at] = found.new
    return found


def encode(found: Sequence[tuple[int, Found]], codec: Codec) -> Tensor:
    """[bytes] uint8, a multiple of 8: the changes of several pieces, each with its number; none of them empty.

    int64 [1]           number of pieces
    int64 [pieces, 4]   number, changed elements, bytes of gaps, far elements (-1: absolute); wide types first
    planes, one after the other those of all pieces, each padded to 8 bytes:
        uint8 [...]     gaps
        int8 [n]        ulp: steps
        bits [...]      absolute: all values; ulp: those of far elements
    """
    found = sorted(found, key=lambda one: -one[1].old.element_size())
    pieces = [piece for _, piece in found]
    counts = [piece.positions.numel() for piece in pieces]
    gaps, gap_bytes = _gaps([piece.positions for piece in pieces])
    whole = [piece for piece in pieces if codec != "ulp" or piece.old.element_size() != 2]
    values, fars, planes = [piece.new.view(torch.uint8) for piece in whole], [-1] * len(whole), [gaps]
    if stepped := pieces[len(whole) :]:
        old, new = torch.cat([piece.old for piece in stepped]), torch.cat([piece.new for piece in stepped])
        distance = _ordered(new).to(torch.int32) - _ordered(old)
        steps = torch.where(distance.abs() < -_FAR, distance, _FAR).to(torch.int8)
        far = steps == _FAR
        before = far.cumsum(0)[_host(ends_of(counts[len(whole) :]), far.device) - 1].tolist()
        fars += [after - start for start, after in zip([0, *before], before)]
        planes.append(steps.view(torch.uint8))
        values.append(new[far].view(torch.uint8))
    planes.append(torch.cat(values))
    rows = zip((number for number, _ in found), counts, gap_bytes, fars)
    head = torch.tensor([len(found), *(field for row in rows for field in row)], dtype=torch.int64)
    return torch.cat([head.view(torch.uint8).to(gaps.device), *(part for plane in planes for part in _padded(plane))])


def decode(frame: Tensor, pieces: Sequence[tuple[int, Ranges, torch.dtype]]) -> list[Changes]:
    """Inverse of `encode`. pieces: (tensor, rectangle, type) by number. Raises ValueError for anything else."""
    reader = _Reader(frame)
    (count,) = reader.take(torch.int64, 1).tolist()
    if not 0 <= count <= len(pieces):
        raise ValueError(f"weight changes: expected at most {len(pieces)} pieces, found {count}")
    rows = reader.take(torch.int64, 4 * count).view(count, 4).tolist()
    for number, changed, gap_bytes, _ in rows:
        if not 0 <= number < len(pieces):
            raise ValueError(f"weight changes: expected one of {len(pieces)} pieces, found number {number}")
        if not 0 < changed <= min(volume(pieces[number][1]), gap_bytes):
            raise ValueError(
                f"weight changes: expected some of {volume(pieces[number][1])} elements, found {changed}"
            )
    if not rows:
        reader.end()
        return []
    own = [pieces[number] for number, *_ in rows]
    counts, fars = [changed for _, changed, _, _ in rows], [far for *_, far in rows]
    if any(a[2].itemsize < b[2].itemsize for a, b in zip(own, own[1:])):
        raise ValueError("weight changes: expected wide types first, found others")
    gap_bytes = [size for _, _, size, _ in rows]
    positions = _positions(
        reader.take(torch.uint8, sum(gap_bytes)), gap_bytes, counts, [volume(r) for _, r, _ in own]
    )
    stepped = [count for count, far in zip(counts, fars) if far >= 0]
    steps = iter(reader.take(torch.int8, sum(stepped)).split(stepped)) if stepped else iter(())
    sizes = [(n if far < 0 else far) * dtype.itemsize for n, far, (_, _, dtype) in zip(counts, fars, own)]
    values = reader.take(torch.uint8, sum(sizes)).split(sizes)
    found = [
        Changes(
            tensor=tensor,
            ranges=ranges,
            positions=at,
            steps=None if far < 0 else next(steps),
            values=bits.view(_BITS[dtype.itemsize]),
        )
        for (tensor, ranges, dtype), at, far, bits in zip(own, positions, fars, values)
    ]
    if stepped:
        _check_far(found, fars)
    reader.end()
    return found


def _check_far(found: Sequence[Changes], fars: Sequence[int]) -> None:
    """Raise ValueError unless as many steps are far as the rows say."""
    each = [change.steps for change in found if change.steps is not None]
    told = [far for far in fars if far >= 0]
    counts = (torch.cat(each) == _FAR).cumsum(0)[_host(ends_of([len(one) for one in each]), each[0].device) - 1]
    if counts.tolist() != ends_of(told) or any(c.steps is not None and c.values.element_size() != 2 for c in found):
        raise ValueError(f"weight changes: expected {sum(told)} far elements of a type of two bytes, found others")


def ends_of(counts: Sequence[int]) -> list[int]:
    """Running totals."""
    return list(accumulate(counts))


def _host(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device)


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


def _gaps(positions: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """([...] uint8 of each piece's rising positions, one piece after the other; bytes of each)."""
    every, ends = torch.cat(list(positions)), ends_of([len(piece) for piece in positions])
    before = torch.diff(every, prepend=every.new_full((1,), -1)) - 1
    starts = _host([0, *ends[:-1]], every.device)
    before[starts] = every[starts]
    longs = before.div(_LONG, rounding_mode="floor")
    last = torch.cumsum(longs + 1, 0)
    sizes = last[_host(ends, every.device) - 1].tolist()
    gaps = torch.full((sizes[-1],), _LONG, dtype=torch.uint8, device=every.device)
    gaps[last - 1] = (before - longs * _LONG).to(torch.uint8)
    return gaps, [end - start for start, end in zip([0, *sizes], sizes)]


def _positions(gaps: Tensor, gap_bytes: list[int], counts: list[int], volumes: list[int]) -> Sequence[Tensor]:
    """[pieces][changed] int64, inverse of `_gaps`. Raises ValueError where the gaps are of others."""
    wrong = ValueError(f"weight changes: expected {counts} of {volumes} elements, found others")
    last = gaps != _LONG
    running, number = torch.cumsum(gaps.to(torch.int64) + last, 0), torch.cumsum(last, 0)
    places = running[last]
    ends = torch.tensor([ends_of(gap_bytes), ends_of(counts), volumes], dtype=torch.int64).to(gaps.device)
    if places.numel() != sum(counts):
        raise wrong
    before = torch.cat([ends.new_zeros(1), running[ends[0] - 1][:-1]])
    within = places - 1 - before[_of_each(counts, gaps.device)]
    if not bool(((number[ends[0] - 1] == ends[1]) & (within[ends[1] - 1] < ends[2])).all()):
        raise wrong
    return within.split(counts)


def _of_each(counts: Sequence[int], device: torch.device) -> Tensor:
    """[sum of counts] the number of the piece that each element is of."""
    return torch.repeat_interleave(_host(counts, device), output_size=sum(counts))


class Together:
    """The changed elements of several rectangles on one device, of one number of dimensions and one type: their
    coordinates and digest in one set of operations, however many rectangles they are."""

    def __init__(self, changes: Sequence[Changes], extra: Sequence[Sequence[int]] = ()) -> None:
        """extra: [columns][rectangles] numbers to spread over their elements (`column`)."""
        self._dimensions, self._ends = (
            len(changes[0].ranges),
            [max(end for _, end in along) for along in zip(*(c.ranges for c in changes))],
        )
        self.positions = torch.cat([change.positions for change in changes])
        device = self.positions.device
        self._which = _of_each([change.positions.numel() for change in changes], device)
        sizes = [[end - first for first, end in along] for along in zip(*(c.ranges for c in changes))]
        firsts = [[first for first, _ in along] for along in zip(*(c.ranges for c in changes))]
        factors = [weighed_by(change.tensor) for change in changes]
        self._table = torch.tensor([factors, *sizes, *firsts, *extra], dtype=torch.int64).to(device)
        rest, self.coordinates = self.positions, [self.positions] * self._dimensions
        for axis in reversed(range(self._dimensions)):
            size = self._column(1 + axis)
            up = rest.div(size, rounding_mode="floor") if axis else torch.zeros_like(rest)
            self.coordinates[axis] = rest - up * size + self._column(1 + self._dimensions + axis)
            rest = up

    def _column(self, row: int) -> Tensor:
        return self._table[row][self._which]

    def column(self, number: int) -> Tensor:
        """[n] int64 of `extra`."""
        return self._column(1 + 2 * self._dimensions + number)

    def digest(self, old: Tensor, new: Tensor) -> Tensor:
        """[] int64, modulo 2^64: what to add to a `value_digest` that had the old bits."""
        mask = (1 << (8 * old.element_size())) - 1
        change = (new.to(torch.int64) & mask) - (old.to(torch.int64) & mask)
        return (change_at(self.coordinates, self._ends, change) * self._column(0)).sum()


def digest_of(changes: Sequence[Changes], old: Sequence[Tensor], new: Sequence[Tensor]) -> int:
    """What to add to a `value_digest` that had the old bits, for all of them."""
    alike: dict[tuple[int, torch.dtype], list[int]] = {}
    for number, change in enumerate(changes):
        alike.setdefault((len(change.ranges), old[number].dtype), []).append(number)
    sums = [
        Together([changes[n] for n in own]).digest(torch.cat([old[n] for n in own]), torch.cat([new[n] for n in own]))
        for own in alike.values()
    ]
    return total(torch.stack(sums).tolist() if sums else [0])


def _ordered(bits: Tensor) -> Tensor:
    """Bits of a 2-byte float as int16 in the order of the numbers, and back."""
    return bits ^ ((bits >> 15) & 0x7FFF)
