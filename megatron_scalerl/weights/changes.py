"""Changed elements of tensors: found, coded in about three bytes each, and decoded, without loss.

Life of a change:

    find        the optimizer's step compares bits and makes a `ChangedElements` for each shard it writes
                (`weights.change_record`); without such a record the sender compares each slot with a copy
    encode      the sender codes the `ChangedElements`s of all slots of a bucket as one frame
    decode      the receiver checks the frame's digest and makes `Changes` of each slot
    write       `weights.live_changes` writes the `Changes` into live parameters

Positions are coded as gaps. A gap is one byte, the number of unchanged elements before a changed element; 255 stands
for 255 unchanged elements and a further byte. Values are the new bits, NaN payloads and signed zeros included. At a
density of 1 % a gap takes 1.08 bytes for an element, and gap and bits take 3.1 bytes in bf16.

All slots of a bucket are coded, decoded and written in the same operations. The number of a GPU's operations, and of
the host's waits, then does not grow with the number of tensors.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megatron_scalerl.record import record
from megatron_scalerl.weights.plan import Ranges

MOST_CHANGED = 8
"""If more than 1 / MOST_CHANGED of the elements of a slot (a rectangle in a bucket) changed, all values are sent.

To code and write single elements would cost more."""
SMALL = 1 << 14
"""The changes of a slot of up to this many elements are always coded.

If all values of one small norm were sent, the whole bucket would have to be sent."""
_LONG = 255
"""A gap's byte with this value stands for 255 unchanged elements, and the gap continues in the next byte."""
_BITS = {2: torch.int16, 4: torch.int32}
"""Size of an element (bytes) -> integer type that has the element's bits."""


@record
class ChangedElements:
    """Elements whose bits changed, in rising order of position."""

    positions: Tensor
    """[n] int64: each element's position in the slot, region or view."""
    bits: Tensor
    """[n] int16 or int32, the new bits."""


@record
class Changes:
    """Changed elements of a rectangle of a tensor. Produced by `decode`."""

    tensor: int
    """Number of the tensor in the plan."""
    ranges: Ranges
    """The rectangle, in the whole tensor's indices."""
    positions: Tensor
    """[n] int64, rising: positions among the rectangle's elements in row-major order."""
    values: Tensor
    """[n] the new values, in the tensor's type."""


def bits_of(values: Tensor) -> Tensor:
    """The bits of the values, as integers of the same size."""
    return values.view(_BITS[values.element_size()])


def most_coded(elements: int) -> int:
    """The largest number of changes that are coded in a slot of `elements` elements.

    With more changes, all values of the slot are sent.
    """
    return max(elements // MOST_CHANGED, min(elements, SMALL))


def find(old_bits: Tensor, values: Tensor) -> ChangedElements:
    """Find the elements whose bits changed, and write the new bits into `old_bits`.

    old_bits: [n] contiguous, from `bits_of`. values: the new values, n elements of any shape.
    """
    new_bits = bits_of(values.detach().reshape(-1))
    positions = (old_bits != new_bits).nonzero().flatten()
    bits = new_bits[positions]
    old_bits[positions] = bits
    return ChangedElements(positions=positions, bits=bits)


def encode(slots: Sequence[tuple[int, ChangedElements]]) -> Tensor:
    """The changes of several slots as one frame: [bytes] uint8, a multiple of 8.

    slots: (number, changes) of each slot, and no slot without changes. The frame holds:

        int64 [1]           number of slots
        int64 [slots, 3]    number, changed elements, bytes of gaps; wide types first
        uint8 [...]         gaps of all slots, padded to 8 bytes
        bits [...]          new bits of all slots, padded to 8 bytes
    """
    # A typed view must start at a multiple of the element's size, so slots of wide types come first.
    ordered = sorted(slots, key=lambda slot: -slot[1].bits.element_size())
    gaps, gap_bytes = _gaps([changes.positions for _, changes in ordered])
    head = [len(ordered)]
    for (number, changes), size in zip(ordered, gap_bytes):
        head += [number, len(changes.positions), size]
    bits = torch.cat([changes.bits.view(torch.uint8) for _, changes in ordered])
    return torch.cat([_host(head, gaps.device).view(torch.uint8), _padded(gaps), _padded(bits)])


def decode(frame: Tensor, slots: Sequence[tuple[int, Ranges, torch.dtype]]) -> list[Changes]:
    """The changes that `encode` put into a frame. slots: (tensor, rectangle, type) of each slot, by the slot's
    number."""
    count = int(frame[:8].view(torch.int64))
    start = 8 + 24 * count
    numbers, counts, gap_bytes = frame[8:start].view(torch.int64).view(count, 3).t().tolist()
    positions = _positions(frame[start : start + sum(gap_bytes)], gap_bytes, counts)
    start += -(-sum(gap_bytes) // 8) * 8
    sizes = [changed * slots[number][2].itemsize for number, changed in zip(numbers, counts)]
    planes = frame[start : start + sum(sizes)].split(sizes)
    changes = []
    for number, slot_positions, plane in zip(numbers, positions, planes):
        tensor, ranges, dtype = slots[number]
        changes.append(Changes(tensor=tensor, ranges=ranges, positions=slot_positions, values=plane.view(dtype)))
    return changes


def slot_numbers(counts: Sequence[int], device: torch.device) -> Tensor:
    """For each element, the number of the element's slot: [sum of counts] int64. counts: elements of each slot."""
    return torch.repeat_interleave(_host(counts, device), output_size=sum(counts))


def _host(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device)


def _padded(plane: Tensor) -> Tensor:
    return torch.nn.functional.pad(plane, (0, -plane.numel() % 8))


def _gaps(positions: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """([...] uint8 gaps of all slots, one slot after another; number of gap bytes of each slot).

    positions: rising positions of each slot.
    """
    all_positions = torch.cat(list(positions))
    ends = list(accumulate(map(len, positions)))
    unchanged = torch.diff(all_positions, prepend=all_positions.new_full((1,), -1)) - 1
    # The first gap of a slot counts from the slot's start, not from the previous slot's last position.
    starts = _host([0, *ends[:-1]], all_positions.device)
    unchanged[starts] = all_positions[starts]
    long_gaps = unchanged.div(_LONG, rounding_mode="floor")
    last_bytes = torch.cumsum(long_gaps + 1, 0)
    gap_ends = last_bytes[_host(ends, all_positions.device) - 1].tolist()
    gaps = torch.full((gap_ends[-1],), _LONG, dtype=torch.uint8, device=all_positions.device)
    gaps[last_bytes - 1] = (unchanged - long_gaps * _LONG).to(torch.uint8)
    return gaps, [end - start for start, end in zip([0, *gap_ends], gap_ends)]


def _positions(gaps: Tensor, gap_bytes: Sequence[int], counts: Sequence[int]) -> Sequence[Tensor]:
    """The positions in each slot, [slots][changed] int64, from the bytes of the gaps; inverse of `_gaps`."""
    is_last = gaps != _LONG
    # The running sum does not restart at a slot, so the sum before the slot is subtracted from the slot's positions.
    running = torch.cumsum(gaps.to(torch.int64) + is_last, 0)
    ends = _host(list(accumulate(gap_bytes)), gaps.device)
    sums_before = torch.cat([ends.new_zeros(1), running[ends[:-1] - 1]])
    return (running[is_last] - 1 - sums_before[slot_numbers(counts, gaps.device)]).split(list(counts))
