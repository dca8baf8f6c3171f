"""The worker's side of a `worker_pool`, which describes the protocol.

So that workers start quickly, this module imports asyncio only for concurrent workers, and no slow modules.
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
"""Environment variable with the file descriptor of the worker's end of the socket pair."""
FRAME = struct.Struct("!QBQQ")
"""Start of a frame: number of the request, kind of frame, size of the head, size of the body (bytes). A request with
number 0 gets no reply."""
REQUEST, READ, REPLY, LAST_REPLY = range(4)
"""Kinds of frames: REQUEST, from the pool; READ, the worker's report of having read a request; REPLY; LAST_REPLY, a
reply after which the pool replaces the worker."""
THREADS = 4096
"""Largest number of threads for blocking calls in a worker that works on several requests at once."""
CONCURRENT = b"concurrent"
"""Body of the reply to the setup of a worker that works on several requests at once."""
_sending = threading.Lock()
"""Lock for writing a frame to the pool. In a worker that works on several requests at once, the thread that reads the
requests also writes frames (READ)."""


@record
class Answer:
    """A worker's answer to a request."""

    head: object
    """Head of the reply; sent as JSON."""
    body: bytes = b""
    last: bool = False
    """True if the pool has to replace this worker after the reply. Before the end, a worker that works on several
    requests at once answers all requests that the pool has sent."""


def serve(load: Callable[[bytes], Callable[[bytes, bytes], Any] | str]) -> None:
    """Answer requests until the pool closes the socket, or until an answer with `last`.

    load: called once with the setup (bytes). Returns a function that answers (head, body) of a request with an
    Answer, or a line with the reason why the setup is refused. If `load` returns a coroutine function, the worker
    answers several requests at once, also after an answer with `last`, until the pool closes the socket.
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

    # asyncio's default executor has at most 32 threads.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))

    async def reply(number: int, head: bytes, body: bytes) -> None:
        try:
            result = await answer(head, body)
            if number:
                send(connection, number, result)
        # SystemExit is caught, too: outside of this task it would cancel the remaining tasks and wait for threads.
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    reader = ThreadPoolExecutor(1)
    async with asyncio.TaskGroup() as tasks:
        while True:
            request = await asyncio.get_running_loop().run_in_executor(reader, receive, connection)
            tasks.create_task(reply(*request))


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM to the whole process group: the controller handles both and ends workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def pool_socket() -> Iterator[socket.socket]:
    """The socket to the pool, during the block. Children of this process do not inherit the socket."""
    connection = socket.socket(fileno=int(os.environ.pop(SOCKET_VARIABLE)))
    connection.set_inheritable(False)
    # A forked child that outlives the worker would keep the socket open.
    os.register_at_fork(after_in_child=connection.close)
    try:
        yield connection
    finally:
        # The socket stays open until this process has ended: then the pool finds an exit code.
        connection.detach()


def receive_setup(connection: socket.socket) -> tuple[int, bytes]:
    """Read the setup and return (number, head). Adds the folders from which the pool imports modules to sys.path."""
    number, setup, paths = receive(connection)
    sys.path.extend(path for path in map(os.fsdecode, paths.split(b"\0")) if path not in sys.path)
    return number, setup


def receive(connection: socket.socket) -> tuple[int, bytes, bytes]:
    """Read the next request, report READ to the pool, and return (number, head, body)."""
    number, _, *sizes = FRAME.unpack(_read(connection, FRAME.size))
    head, body = (_read(connection, size) for size in sizes)
    # Report READ before the work: if the worker dies during the work, the pool blames this request for the death.
    if number:
        with _sending:
            connection.sendall(FRAME.pack(number, READ, 0, 0))
    return number, head, body


def send(connection: socket.socket, number: int, answer: Answer) -> None:
    """Send the reply to the request with this number."""
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
            # This code may run in a thread, from which sys.exit would not end the process.
            os._exit(0)
        done += received
    return bytes(buffer)
