"""How tests wait: for a condition, with a limit that a process which is not scheduled for a while does not reach."""

import asyncio
import time
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 240.0


async def until(condition):
    """The value of the condition once it is true, while the event loop goes on. Raises TimeoutError."""
    async with asyncio.timeout(LIMIT_S):
        while not (value := condition()):
            await asyncio.sleep(0.005)
    return value


def wait_until(condition, limit_s=LIMIT_S):
    """The same outside of an event loop."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.005)
    return value


async def passes(count=50):
    """So many passes of the event loop: what is not done after them waits for something else."""
    for _ in range(count):
        await asyncio.sleep(0)
