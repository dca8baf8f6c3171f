"""SIGINT and SIGTERM stop a run gracefully: its coroutine is cancelled, so that every context manager exits."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from megatron_scalerl.processes.child_process import kill_all

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A signal stopped the run. `exit_code` is 128 plus the signal number: 130 for SIGINT, 143 for SIGTERM."""

    def __init__(self, number: int, also: BaseException | None = None) -> None:
        name = signal.Signals(number).name
        detail = "" if also is None else f" ({type(also).__name__} while stopping: {also})"
        super().__init__(f"stopped by {name}; the same command resumes from the last checkpoint{detail}")
        self.exit_code = 128 + number


def run_until_signal(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` on a new event loop and return its result; call it in the main thread.

    The first SIGINT or SIGTERM cancels the coroutine; Stopped is raised once it has returned. Each later signal
    kills all child processes, so that the coroutine's cleanup, which still runs, waits for none of them.
    """
    received: list[int] = []

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def on_signal(number: int) -> None:
            received.append(number)
            if len(received) == 1:
                task.cancel()
            else:
                kill_all()

        for number in SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
        try:
            return await coroutine
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if not received:
            raise
        raise Stopped(received[0]) from None
    except Exception as error:
        if not received:
            raise
        raise Stopped(received[0], error) from error
