"""The worker's side of a `worker_pool`, which describes the protocol.

This module imports neither asyncio nor anything that takes long to import.
"""

import inspect
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from megatron_scalerl.record import record

SOCKET_VARIABLE = "MSRL_WORKER_FD"
"""Environment variable with the number of the inherited socket."""
FRAME = struct.Struct("!QBQQ")
"""Start of a frame: number of the request, kind of frame, sizes of head and body (bytes). Request 0 gets no reply."""
REQUEST, READ, REPLY, LAST_REPLY = range(4)
"""Kinds of frames."""
THREADS = 4096
"""Largest number of threads for the calls of a worker of several requests."""
CONCURRENT = b"concurrent"
"""Body of the reply to the setup of a worker that works on several requests at once."""
_sending = threading.Lock()
"""Lock around the writing of a frame. A worker of several requests writes from two threads."""


@record
class Answer:
    """A worker's answer to a request."""

    head: object
    """The head, which is sent as JSON."""
    body: bytes = b""
    last: bool = False
    """Whether another worker replaces this worker, which first answers all requests that the pool has sent."""


def serve(load: Callable[[bytes], Callable[[bytes, bytes], Any] | str]) -> None:
    """Answer requests until the pool closes the socket or an answer is the last.

    load: makes from the setup the function that answers (head, body) with an Answer, or returns one line with the
    reason of a refusal. A coroutine function answers several requests at once, and goes on after a last answer until
    the pool closes the socket.
    """
    with pool_socket() as connection:
        number, setup = receive_setup(connection)
        answer = load(setup)
        if isinstance(answer, str):
            send(connection, number, Answer(head=answer, last=True))
            return
        if inspect.iscoroutinefunction(answer):
            import asyncio

            send(connection, number, Answer(head="", body=CONCURRENT))
            asyncio.run(serve_concurrently(connection, answer))
            return
        reply = Answer(head="")
        send(connection, number, reply)
        while not reply.last:
            number, head, body = receive(connection)
            reply = answer(head, body)
            send(connection, number, reply)


async def serve_concurrently(connection: socket.socket, answer: Callable[[bytes, bytes], Any]) -> None:
    """Answer requests with a coroutine function, several at once, until the pool closes the socket."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    # asyncio's default executor has too few threads.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))

    async def reply(number: int, head: bytes, body: bytes) -> None:
        try:
            result = await answer(head, body)
            if number:
                send(connection, number, result)
        # SystemExit is also caught. If raised, it would leave this task, cancel other tasks and wait for threads.
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    reader = ThreadPoolExecutor(1)
    async with asyncio.TaskGroup() as tasks:
        while True:
            request = await asyncio.get_running_loop().run_in_executor(reader, receive, connection)
            tasks.create_task(reply(*request))


def ignore_signals() -> None:
    """Leave signals to the whole process group to the controller."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def pool_socket() -> Iterator[socket.socket]:
    """The socket to the pool."""
    connection = socket.socket(fileno=int(os.environ.pop(SOCKET_VARIABLE)))
    connection.set_inheritable(False)
    # A surviving child must not keep the socket open.
    os.register_at_fork(after_in_child=connection.close)
    try:
        yield connection
    finally:
        # Only the end of this process closes the socket, so that the process has an exit code when the pool notices.
        connection.detach()


def receive_setup(connection: socket.socket) -> tuple[int, bytes]:
    """Read the first request: (number, head). From now on this process also imports from the pool's folders."""
    number, setup, paths = receive(connection)
    sys.path.extend(path for path in map(os.fsdecode, paths.split(b"\0")) if path not in sys.path)
    return number, setup


def receive(connection: socket.socket) -> tuple[int, bytes, bytes]:
    """(number, head, body) of the next request, after a READ frame to the pool."""
    number, _, *sizes = FRAME.unpack(_read(connection, FRAME.size))
    head, body = (_read(connection, size) for size in sizes)
    # The pool is told before the work begins: a death from here on counts against the request.
    if number:
        with _sending:
            connection.sendall(FRAME.pack(number, READ, 0, 0))
    return number, head, body


def send(connection: socket.socket, number: int, answer: Answer) -> None:
    """Send the reply to a request."""
    head = msgspec.json.encode(answer.head)
    kind = REPLY
    if answer.last:
        kind = LAST_REPLY
    with _sending:
        connection.sendall(FRAME.pack(number, kind, len(head), len(answer.body)) + head)
        connection.sendall(answer.body)


def _read(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes. Ends this process if the pool has closed the socket."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    done = 0
    while done < size:
        received = connection.recv_into(view[done:])
        if not received:
            # `os._exit` works from any thread.
            os._exit(0)
        done += received
    return bytes(buffer)
