"""Waits for whichever of several things comes first: a sign of life, an exit, a signal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any


@contextlib.asynccontextmanager
async def race(*works: Awaitable[Any]) -> AsyncIterator[list[asyncio.Future[Any]]]:
    """The works as tasks, in this order, once the first of them is done; on exit from the block the others are
    cancelled and awaited. A future that others wait for is passed with `asyncio.shield`."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
