"""Controls garbage collection and freed memory in a process of many weeks whose event loop must not stand still."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator

_M_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD of <malloc.h>
_M_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>
_LARGE_BLOCK = 1 << 20
"""Size from which a block of memory is large (bytes)."""
FULL_COLLECTIONS_EVERY = 100
"""Number of collections of the middle generation after which a full collection follows. Python's default is 10."""


@contextlib.contextmanager
def rare_full_collections() -> Iterator[None]:
    """A block in which full collections are rare, and skip objects that are older than the block.

    A full collection over the objects of thousands of requests, some 100,000, stops the event loop for 0.1 s and
    more. Young garbage is collected as often as ever; cycles of older objects are freed ten times as late.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    # Collections skip frozen objects.
    gc.freeze()
    gc.set_threshold(*thresholds[:2], FULL_COLLECTIONS_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """A short block without garbage collection, for imports of torch and transformers, which leave no garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def map_large_blocks() -> None:
    """Let malloc take every block of 1 MiB and more from the system, and give freed blocks back, for good.

    glibc raises its thresholds, up to 32 and 64 MiB, with the blocks that a process frees. Then each thread that
    ever needed such memory keeps the end of a heap, which malloc_trim leaves alone: 47 MiB for every thread in which
    a long run's forecast was made. Other C libraries have no such function.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(parameter, _LARGE_BLOCK)


def release_memory() -> None:
    """Collect all garbage, and give freed pages back to the system; for moments when the event loop may stand still.

    Freed memory stays with the process in fragments of the heap, several heaps where threads allocate, until
    glibc's malloc_trim walks the heaps. Other C libraries have no such function.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
