"""How backends walk a projection: slices of tokens or columns, and one buffer that all blocks share."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def slices(total: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover 0 to `total`."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def block_of(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """[rows, columns] view of the start of a flat buffer."""
    return buffer[: rows * columns].view(rows, columns)
