"""Rectangles of tensors: what a rank holds, what a worker needs, what a message carries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

Ranges = tuple[tuple[int, int], ...]
"""A rectangle: (first, end) along each dimension of a tensor; () of a scalar."""


def overlap(one: Ranges, other: Ranges) -> Ranges | None:
    """The rectangle that two have in common, None if there is none."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
    return common if all(a < b for a, b in common) else None


def volume(ranges: Ranges) -> int:
    """Elements of a rectangle."""
    return prod(b - a for a, b in ranges)


def within(outer: Ranges, inner: Ranges) -> tuple[slice, ...]:
    """Where a rectangle lies in a larger one's own coordinates."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(inner, outer))


def split(ranges: Ranges, most: int) -> Iterable[Ranges]:
    """Pieces of at most `most` elements: cut along the first dimension, and where one index is too many, the next."""
    if volume(ranges) <= most:
        return [ranges]
    (first, end), rest = ranges[0], ranges[1:]
    rows = most // volume(rest)
    if rows == 0:
        return [((row, row + 1), *tail) for row in range(first, end) for tail in split(rest, most)]
    return [((row, min(row + rows, end)), *rest) for row in range(first, end, rows)]


def merged(rectangles: Iterable[Ranges]) -> tuple[Ranges, ...]:
    """Disjoint rectangles with the same elements: neighbors along one dimension become one."""
    current = sorted(disjoint(rectangles))
    for axis in reversed(range(len(current[0]) if current else 0)):
        by_rest: dict[Ranges, list[tuple[int, int]]] = {}
        for ranges in current:
            by_rest.setdefault(ranges[:axis] + ranges[axis + 1 :], []).append(ranges[axis])
        current = [
            (*rest[:axis], along, *rest[axis:]) for rest, parts in by_rest.items() for along in _joined(sorted(parts))
        ]
    return tuple(sorted(current))


def disjoint(rectangles: Iterable[Ranges]) -> list[Ranges]:
    """The same elements without repetition: what overlaps is cut at the boundaries of the other rectangle."""
    done: list[Ranges] = []
    for ranges in sorted(rectangles):
        rest = [ranges]
        for other in done:
            rest = [piece for part in rest for piece in _without(part, other)]
        done += rest
    return done


def _without(ranges: Ranges, other: Ranges) -> Iterator[Ranges]:
    """`ranges` less `other`, as rectangles."""
    if any(b <= c or d <= a for (a, b), (c, d) in zip(ranges, other)):
        yield ranges
        return
    head: Ranges = ()
    for axis, ((a, b), (c, d)) in enumerate(zip(ranges, other)):
        tail = ranges[axis + 1 :]
        if a < c:
            yield (*head, (a, c), *tail)
        if d < b:
            yield (*head, (d, b), *tail)
        head = (*head, (max(a, c), min(b, d)))


def _joined(parts: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first, end = parts[0]
    for a, b in parts[1:]:
        if a > end:
            yield first, end
            first = a
        end = b
    yield first, end
