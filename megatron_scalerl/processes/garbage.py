"""Python's cyclic garbage collector in a process whose event loop must not stand still."""

from __future__ import annotations

import contextlib
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
