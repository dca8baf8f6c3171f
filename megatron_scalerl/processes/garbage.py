"""Python's cyclic garbage collector in a process whose event loop must not stand still."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

FULL_COLLECTIONS_EVERY = 100
"""Collections of the middle generation for one full collection; Python's own value is 10."""


@contextlib.contextmanager
def rare_full_collections() -> Iterator[None]:
    """A block in which full collections are rare, and skip what was there before it.

    One over some 100,000 objects, those of thousands of requests, stops the event loop for 0.1 s and more. Young
    garbage is collected as often as ever; cycles that outlive it are freed ten times as late.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], FULL_COLLECTIONS_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def release_memory() -> None:
    """Collect all garbage, and give freed pages back to the system; for moments when the event loop may stand still.

    Freed memory stays with the process in fragments of the heap, several heaps where threads allocate, until
    glibc's malloc_trim walks them. Other C libraries have no such function.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
