"""Run a function in a separate process that reports events; the caller survives however that process ends.

For code that may end its process in any way: an exception of any class, a crash, a GPU whose context is unusable
after one failed call, or a hang.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Literal

Event = dict[str, Any]
"""A JSON object that the function reports."""
SendEvent = Callable[[Event], None]
FAILED, USER_ERROR = "failed", "user_error"
"""Keys of the last event after a failure: a one-line reason, and True if a ValueError was raised."""

POLL_INTERVAL_S = 1.0
"""Seconds between two checks whether the process is still running."""
EXIT_TIMEOUT_S = 30.0
"""Seconds for the process to exit after its last event, GPU driver teardown included."""


def events(
    function: Callable[..., None], *arguments: Any, start: Literal["fork", "spawn"], silence_timeout_s: float
) -> Iterator[Event]:
    """Yield what `function(*arguments, send)` sends, then {FAILED: reason} if it raised, died or hung.

    start: "fork" is fast and requires a caller without threads that has not initialized a GPU; "spawn" imports
    modules again and requires picklable arguments. The process is killed when it sends nothing for
    `silence_timeout_s` seconds and when the caller closes the iterator.
    """
    context: Any = multiprocessing.get_context(start)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(function, arguments, sender))
    child.start()
    sender.close()
    failed = False
    try:
        while not failed and (event := _next_event(receiver, child, silence_timeout_s)) is not None:
            failed = FAILED in event
            yield event
        if child.is_alive():
            child.join(EXIT_TIMEOUT_S)
        if not failed and child.exitcode != 0:
            yield {FAILED: f"its process ended with {_exit_status(child.exitcode)}"}
    finally:
        if child.is_alive():
            child.kill()
        child.join()
        receiver.close()


def _next_event(receiver: Connection, child: Any, silence_timeout_s: float) -> Event | None:
    """The next event, or None after the last one. A silent process is killed, which is reported as an event."""
    end = time.monotonic() + silence_timeout_s
    while not receiver.poll(min(POLL_INTERVAL_S, silence_timeout_s)):
        # a grandchild may keep the pipe open after the process has exited
        if not child.is_alive() and not receiver.poll():
            return None
        if time.monotonic() > end:
            child.kill()
            return {FAILED: f"no event within {silence_timeout_s:g} s"}
    try:
        event: Event = json.loads(receiver.recv_bytes())
    except EOFError:
        return None
    return event


def _exit_status(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _run(function: Callable[..., None], arguments: tuple[Any, ...], sender: Connection) -> None:
    def send(event: Event) -> None:
        sender.send_bytes(json.dumps(event).encode())

    try:
        function(*arguments, send)
    except ValueError as error:  # a user error: the message alone is enough
        send({FAILED: _first_line(error), USER_ERROR: True})
        raise SystemExit(2) from error
    except BaseException as error:
        send({FAILED: f"{type(error).__name__}: {_first_line(error)}"})
        raise


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else "no message"
