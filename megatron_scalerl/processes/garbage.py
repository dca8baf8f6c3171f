"""Controls garbage collection and freed memory in processes that run for weeks with an event loop."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator

_M_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD of <malloc.h>
_M_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>
_LARGE_BLOCK = 1 << 20
"""Least size of a block of memory that malloc takes from the system (bytes); see `map_large_blocks`."""
FULL_COLLECTIONS_EVERY = 100
"""Number of collections of Python's middle generation between two full collections. Python's default is 10."""


@contextlib.contextmanager
def rare_full_collections() -> Iterator[None]:
    """Make full garbage collections rare in the block. Objects from before the block are not collected meanwhile.

    With thousands of requests there are some 100,000 objects, and a full collection stops the event loop for 0.1 s or
    more. Young objects are collected as often as before; cycles of old objects are freed ten times as late.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    # Garbage collections skip all objects that exist now.
    gc.freeze()
    gc.set_threshold(*thresholds[:2], FULL_COLLECTIONS_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Turn garbage collection off in the block, for imports of torch and transformers, which leave no garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def map_large_blocks() -> None:
    """Make malloc take each block of 1 MiB or more from the system, and return the block when freed (glibc only).

    Without this, glibc raises its thresholds for mapping (up to 32 MiB) and trimming (up to 64 MiB) as a process
    frees large blocks. Then each thread that once needed large blocks keeps freed memory at the end of a heap, which
    malloc_trim does not return: 47 MiB for each thread that made the forecast of a long run.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(parameter, _LARGE_BLOCK)


def release_memory() -> None:
    """Collect all garbage, and return freed memory to the system. Blocks the event loop for a while.

    Freed memory remains in the process's heaps as fragments until malloc_trim of glibc returns free pages. With other
    C libraries only the garbage is collected.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
