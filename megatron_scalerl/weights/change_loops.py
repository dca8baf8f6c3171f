"""Loops over changed elements, compiled for CPUs.

`weights.changes` and `weights.live_changes` do the same with torch's operations, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

MOST_DIMENSIONS = 3
"""Of tensors whose elements `weigh` and `write` take."""
LONG_GAP = 255
"""Stands for 255 unchanged elements, with more to come."""
FAR = -128
"""Stands for a step that a signed byte does not hold."""
AHEAD = 32
"""Elements between the one that is written and the one whose memory is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loops:
    """Compiled functions. Positions are int64 and rise, bits unsigned integers of the values' size."""

    find: Callable[..., int]
    """(held, new, held_words, new_words, positions, old) -> how many differ, -1 where they do not fit into
    `positions` and `old`. Compares eight bytes at a time, then the elements of those that differ; `held` gets the
    new bits."""
    gaps: Callable[..., int]
    """(positions, gaps) -> bytes written to `gaps`, which has room for them."""
    positions: Callable[..., int]
    """(gaps, positions) -> how many, -1 where they do not fit into `positions`."""
    weigh: Callable[..., int]
    """(positions, sizes, firsts, tables, old, new) -> what a digest changes by, without the tensor's factor.

    sizes, firsts: [3] of the rectangle whose elements `positions` counts. tables: [3] factors of the indices."""
    write: Callable[..., int]
    """(positions, steps, values, sizes, firsts, tables, begins, ends, strides, live) -> what a digest changes by.

    Writes those whose indices are from `begins` to `ends` to their place in `live`. steps: [n] int8, or empty, in
    which case all values are absolute."""


@cache
def loops() -> Loops | None:
    """None where numba is missing."""
    try:
        import numba
    except ImportError:
        return None
    compiled = numba.njit(nogil=True)
    single, stepped = compiled(_single), compiled(_stepped)
    return Loops(
        find=compiled(_find(single)),
        gaps=compiled(_gaps),
        positions=compiled(_positions),
        weigh=compiled(_weigh(numba.uint64)),
        write=compiled(_write(numba.uint64, stepped, _prefetch())),
    )


def _single(held: Any, new: Any, first: int, end: int, positions: Any, old: Any, count: int) -> int:
    for i in range(first, end):
        if held[i] != new[i]:
            if count == len(positions):
                return -1
            positions[count] = i
            old[count] = held[i]
            held[i] = new[i]
            count += 1
    return count


def _find(single: Callable[..., int]) -> Callable[..., int]:
    def find(held: Any, new: Any, held_words: Any, new_words: Any, positions: Any, old: Any) -> int:
        count, each = 0, 8 // held.itemsize
        for word in range(len(held_words)):
            if held_words[word] != new_words[word]:
                count = single(held, new, word * each, word * each + each, positions, old, count)
                if count < 0:
                    return count
        return single(held, new, len(held_words) * each, len(held), positions, old, count)

    return find


def _gaps(positions: Any, gaps: Any) -> int:
    at, before = 0, -1
    for position in positions:
        gap = position - before - 1
        before = position
        while gap >= LONG_GAP:
            gaps[at] = LONG_GAP
            at += 1
            gap -= LONG_GAP
        gaps[at] = gap
        at += 1
    return at


def _positions(gaps: Any, positions: Any) -> int:
    count, at = 0, 0
    for gap in gaps:
        at += gap
        if gap != LONG_GAP:
            if count == len(positions):
                return -1
            positions[count] = at
            count += 1
            at += 1
    return count


def _weigh(unsigned: Any) -> Callable[..., int]:
    def weigh(positions: Any, sizes: Any, firsts: Any, tables: Any, old: Any, new: Any) -> int:
        total, row, row_end, factor = unsigned(0), -1, 0, unsigned(1)
        table_0, table_1, table_2 = tables
        for n in range(len(positions)):
            position = positions[n]
            if position >= row_end:
                row = position // sizes[2]
                row_end = (row + 1) * sizes[2]
                plane = row // sizes[1]
                factor = table_0[firsts[0] + plane] * table_1[firsts[1] + row - plane * sizes[1]]
            change = unsigned(new[n]) - unsigned(old[n])
            total += factor * table_2[firsts[2] + position - (row_end - sizes[2])] * change
        return total

    return weigh


def _stepped(bits: Any, step: Any) -> int:
    """The bits of a 2-byte float a number of units in the last place away."""
    bits = (bits & 0x7FFF) - (bits & 0x8000)
    bits = (bits ^ ((bits >> 15) & 0x7FFF)) + step
    return (bits ^ ((bits >> 15) & 0x7FFF)) & 0xFFFF


def _prefetch() -> Any:
    """Compiled: (array, index) asks for the line of an element that is about to be written; any index will do."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
            elements = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            place = builder.bitcast(builder.gep(elements, [arguments[1]]), byte)
            kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
            function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
            builder.call(function, [place, *(ir.Constant(flag, n) for n in (1, 3, 1))])  # to write, to keep, data
            return context.get_dummy_value()

        return types.void(array, index), generate

    return intrinsic(prefetch)


def _write(unsigned: Any, stepped: Callable[..., int], prefetch: Any) -> Callable[..., int]:
    def write(  # type: ignore[no-untyped-def]
        positions, steps, values, sizes, firsts, tables, begins, ends, strides, live
    ):
        total, factor, far = unsigned(0), unsigned(1), 0
        row_end, row_at, row_here = 0, 0, False
        table_0, table_1, table_2 = tables
        for n in range(len(positions)):
            position = positions[n]
            if position >= row_end:
                row = position // sizes[2]
                row_end = (row + 1) * sizes[2]
                plane = row // sizes[1]
                i, j = firsts[0] + plane, firsts[1] + row - plane * sizes[1]
                row_here = begins[0] <= i < ends[0] and begins[1] <= j < ends[1]
                factor = table_0[i] * table_1[j]
                row_at = (i - begins[0]) * strides[0] + (j - begins[1]) * strides[1]
            k = firsts[2] + position - (row_end - sizes[2])
            is_far = len(steps) > 0 and steps[n] == FAR
            if row_here and begins[2] <= k < ends[2]:
                at = row_at + (k - begins[2]) * strides[2]
                if n + AHEAD < len(positions):  # where rows follow each other in memory; elsewhere it is of no use
                    prefetch(live, at + positions[n + AHEAD] - position)
                old = live[at]
                if len(steps) == 0:
                    live[at] = values[n]
                elif is_far:
                    live[at] = values[far]
                else:
                    live[at] = stepped(int(old), int(steps[n]))
                total += factor * table_2[k] * (unsigned(live[at]) - unsigned(old))
            far += is_far
        return total

    return write
