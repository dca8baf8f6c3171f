"""SIGINT and SIGTERM end a run in the same way: its coroutine is cancelled, so that every block is left in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from megatron_scalerl.processes.children import kill_all

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A signal ended the run in order. `exit_code` is 128 plus its number: 130 for SIGINT, 143 for SIGTERM."""

    def __init__(self, number: int, also: BaseException | None = None) -> None:
        name = signal.Signals(number).name
        detail = "" if also is None else f" ({type(also).__name__} while stopping: {also})"
        super().__init__(f"stopped by {name}; started again, the run goes on from its last checkpoint{detail}")
        self.exit_code = 128 + number


def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work` on an event loop of its own; call it in the main thread.

    The first SIGINT or SIGTERM cancels `work` and, once it has ended, raises Stopped. Each later one kills the
    run's child processes at once, so that nothing more is waited for; what `work` does to end in order still runs.
    """
    caught: list[int] = []

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def on_signal(number: int) -> None:
            caught.append(number)
            if len(caught) == 1:
                task.cancel()
            else:
                kill_all()

        for number in SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
        try:
            return await work
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if not caught:
            raise
        raise Stopped(caught[0]) from None
    except Exception as error:
        if not caught:
            raise
        raise Stopped(caught[0], error) from error
