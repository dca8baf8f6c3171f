"""Work in a process of its own that reports as it goes: whatever becomes of it, its caller goes on.

For code that may end its process in any way: an exception of any class, a crash, a GPU that refuses every further
call after one bad one, silence.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Literal

Say = Callable[[dict[str, Any]], None]
"""Sends an event, a mapping that JSON can hold, to the caller."""
FAILED, USERS = "failed", "users"
"""Keys of the last event where the work did not end well: why, in one line, and whether it was a ValueError."""

LOOK_S = 1.0
"""Between two looks whether the process still runs."""
CLOSING_S = 30.0
"""For a process that has said its last to end, a GPU's driver with it."""


def events(
    work: Callable[..., None], *arguments: Any, start: Literal["fork", "spawn"], patience_s: float
) -> Iterator[dict[str, Any]]:
    """What `work(*arguments, say)` says, and {FAILED: why} at the end where it raised, died or fell silent.

    `start` "fork" is quick and wants a caller that has no threads and has not touched a GPU; "spawn" imports anew and
    wants what pickles. The process is killed when it says nothing for `patience_s` seconds, and when the caller stops
    listening.
    """
    context: Any = multiprocessing.get_context(start)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(work, arguments, sender))
    child.start()
    sender.close()
    told = False
    try:
        while not told and (heard := _next(receiver, child, patience_s)) is not None:
            told = FAILED in heard
            yield heard
        if child.is_alive():
            child.join(CLOSING_S)
        if not told and child.exitcode != 0:
            yield {FAILED: f"its process ended with {_exit(child.exitcode)}"}
    finally:
        if child.is_alive():
            child.kill()
        child.join()
        receiver.close()


def _next(receiver: Connection, child: Any, patience_s: float) -> dict[str, Any] | None:
    """The next event; None where no more can come. A silent process is killed, and its end is the event."""
    end = time.monotonic() + patience_s
    while not receiver.poll(min(LOOK_S, patience_s)):
        # a process that it started may hold the pipe open when it is gone
        if not child.is_alive() and not receiver.poll():
            return None
        if time.monotonic() > end:
            child.kill()
            return {FAILED: f"nothing heard for {patience_s:g} s"}
    try:
        found: dict[str, Any] = json.loads(receiver.recv_bytes())
    except EOFError:
        return None
    return found


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _work(work: Callable[..., None], arguments: tuple[Any, ...], sender: Connection) -> None:
    def say(event: dict[str, Any]) -> None:
        sender.send_bytes(json.dumps(event).encode())

    try:
        work(*arguments, say)
    except ValueError as error:  # a user's error: one line is enough
        say({FAILED: _one_line(error), USERS: True})
        raise SystemExit(2) from error
    except BaseException as error:
        say({FAILED: f"{type(error).__name__}: {_one_line(error)}"})
        raise


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else "no message"
