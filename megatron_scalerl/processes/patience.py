"""Time limits that do not count the time in which this process itself was stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_SLICES = 4


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled after `seconds`. Raises TimeoutError then.

    The limit is waited for in _SLICES parts: where this process is stopped for hours (a suspended job), that counts
    as one of them, and `work` has the others to finish.
    """
    task = asyncio.create_task(work)
    try:
        for _ in range(_SLICES):
            done, _ = await asyncio.wait({task}, timeout=seconds / _SLICES)
            if done:
                return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
