"""A pool of worker processes for asyncio. If a worker dies or is killed, the request gets the reason, not a reply.

    ask() --> queue --> one task per worker, or several --socket--> process

Life of a worker:

    start      in a process group that ends with this process; the first request is the setup; the reply is "" if the
               worker accepts the setup, else the reason of the refusal
    work       one request at a time: the worker reports that the request is read, then replies. A worker whose
               reply to the setup is CONCURRENT works on several requests at once, all workers of the pool together on
               `Program.concurrency`, and answers all requests before a regular end
    end        after a `LAST_REPLY`; a worker that exits, exceeds the time limit or sends an invalid frame is killed
               with all children
    replace    a round has up to START_TRIES tries to start a new process; after a failed round the request fails, and
               the worker takes no request until a later round succeeds. An extra worker that cannot start takes the
               next suspect; if no extra worker runs, all waiting suspects fail

Life of a request:

    queue      the request waits for a worker; if the caller is cancelled meanwhile, no worker takes the request
    work       a worker reads the request and completes the work, even if the caller is cancelled
    repeat     if the worker dies, a new process repeats the request. The request fails after MAX_LOSSES workers that
               had read the request, or MAX_EARLY_LOSSES workers that had read no request
    suspect    if a worker with several requests dies, each of the requests may be the cause. Extra workers, as many
               as the pool has workers, repeat the suspects one at a time; workers go on with all further requests

End of the pool: after START_ROUNDS failed rounds per worker without any worker alive, `ask` raises RuntimeError.

Protocol: a worker inherits one end of a socket pair, whose number is in MSRL_WORKER_FD. Both sides send frames
(`worker.FRAME`): number of the request, kind, two sizes; then a head, which is JSON in replies, and a body of bytes.
The body of the setup has the folders from which the pool imports modules (sys.path). A worker exits when the pool
closes the socket.

The queue needs no bound: each caller of `ask` puts a single request into the queue and waits for the reply.

concurrent.futures cannot replace this module: if a process is killed while writing a result, the thread that reads
results waits forever, and the caller's process cannot exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from megatron_scalerl.processes.child_process import ChildProcess, ProcessDied, cancelled, log_end, time_limit
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.processes.worker import (
    CONCURRENT,
    FRAME,
    LAST_REPLY,
    READ,
    REQUEST,
    SOCKET_VARIABLE,
)
from megatron_scalerl.record import record

logger = logging.getLogger(__name__)

T = TypeVar("T")
Head = TypeVar("Head")
MAX_LOSSES = 2
"""Number of workers that read a request and died, after which the request fails."""
MAX_EARLY_LOSSES = 3
"""Number of workers that died before reading a request, after which the request fails."""
START_TRIES = 4
"""Number of tries in one round to start a new process for a dead worker."""
START_PAUSE_S = 0.5
"""Seconds of pause after the first try of a round. The pause doubles after each further try."""
ROUND_PAUSE_S = 20.0
"""Seconds of pause between two rounds of tries."""
START_ROUNDS = 3
"""Number of failed rounds per worker, without any worker alive, after which the pool ends. This takes about a
minute."""
END_TIMEOUT_S = 10.0
"""Seconds that the pool waits for a killed process to exit."""
GRACE_S = 5.0
"""Seconds added to a request's time limit in the pool if workers take several requests at once. Such workers enforce
the time limit, and need time to send the reply."""


@dataclass(eq=False, repr=False)
class WorkerDied(Exception):
    """A worker died before replying to a request. The message is `cause`."""

    cause: str
    """The event instead of a reply, as a noun phrase: "its exit with code 1"."""
    read: bool = False
    """Whether the worker had read this request."""
    unanswered_requests: bool = False
    """Whether the worker had read requests that had no reply when the worker died."""
    late: bool = False
    """Whether the worker exceeded the request's time limit."""
    code: int | None = None
    """The worker's exit code, negative for a signal; None if the pool killed the worker."""
    busy: float = 0.0
    """Processor time of a late worker during the request, divided by the request's duration."""


@record
class Program:
    """The program that every worker of a pool runs."""

    name: str
    """Name of the pool. Worker number N is called NAME-N."""
    module: str
    """Name of the module that a worker's process runs. The module calls `worker.serve`."""
    setup: bytes
    """Head of the first request, the setup."""
    environment: Mapping[str, str]
    """All environment variables of a worker except MSRL_WORKER_FD."""
    subject: str
    """Beginning of the error message if a worker does not start, for example a recipe's key."""
    timeout_s: float
    """Time limit of a request (seconds)."""
    start_timeout_s: float
    """Time limit from the start of a process to the reply to the setup (seconds)."""
    concurrency: int = 1
    """Largest number of requests that all workers together work on, if workers work on several requests at once."""
    most_reply: int = 2**32
    """Largest size of a reply (bytes). A worker whose frame announces a larger size is killed."""
    logs: Path | None = None
    """Folder for the workers' logs, NAME-N.log; None to write the workers' output to the stderr of this process."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Request(Generic[Head]):
    """An outstanding request, whose caller awaits `reply`."""

    head: bytes
    body: bytes
    reply: asyncio.Future[tuple[Head, bytes]]
    begun: Callable[[], None]
    """Called without arguments each time when a worker takes the request."""
    losses: int = 0
    """Number of workers that died after reading the request."""
    early_losses: int = 0
    """Number of workers that died before reading any request."""

    def fail(self, problem: Exception) -> None:
        """Raise `problem` for the caller, unless the caller was cancelled or has a reply."""
        if not self.reply.done():
            self.reply.set_exception(problem)


class WorkerPool(Generic[Head]):
    """Workers that all run one program, and answer the requests of `ask`."""

    def __init__(
        self,
        program: Program,
        count: int,
        reply_type: type[Head],
        *,
        settles: Callable[[WorkerDied], bool],
    ):
        """reply_type: type of the replies' heads. settles: called when a worker died while the worker had a single
        request. Returns True to fail the request, False to let a worker try again."""
        self._program = program
        self._output = _Output()
        workers = [Worker(f"{program.name}-{n}", program, self._output) for n in range(2 * count)]
        self._workers = workers[:count]
        self._extra = workers[count:]
        """Extra workers, which repeat the suspects: requests that a worker had read when the worker died."""
        self._decode = msgspec.json.Decoder(reply_type).decode
        self._settles = settles
        self._queue: asyncio.Queue[_Request[Head]] = asyncio.Queue()
        self._suspects = self._queue
        """Requests that extra workers take one at a time, because each may have killed a worker. Equal to `_queue` if
        no worker takes several requests at once."""
        self._outstanding: set[_Request[Head]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._limit_s = program.timeout_s
        self._failed_rounds = 0
        self._failed_tries = 0
        """Number of failed tries since a process was last started."""
        self._end: Exception | None = RuntimeError(f"the {program.name} pool was not started")
        """The exception that `ask` raises; None while the pool works."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers, without extra workers."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def start(self) -> None:
        """Start all workers. If one fails, kills all processes and raises the error.

        Raises ValueError if the program refuses the setup, ProcessDied if the program does not reply to the setup in
        time, and OSError if a process cannot be started.
        """
        assert not self._tasks, "started twice"
        if self._program.logs is None:
            self._output.open()
        try:
            for result in await asyncio.gather(*(w.start() for w in self._workers), return_exceptions=True):
                if result is not None:
                    raise result
        except BaseException:
            await self.close()
            raise
        self._end = None
        places = self._workers
        if places[0].greeting == CONCURRENT:
            self._limit_s += GRACE_S
            places = list(itertools.islice(itertools.cycle(places), self._program.concurrency)) + self._extra
            self._suspects = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._work(worker), name=worker.name) for worker in places]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    async def close(self) -> None:
        """Kill all processes. `ask` raises RuntimeError for all outstanding requests. May be called twice."""
        self.end(RuntimeError(f"the {self._program.name} pool is closed"))
        await cancelled(*self._tasks)
        await asyncio.gather(*(worker.kill() for worker in (*self._workers, *self._extra)))
        self._output.close()

    def end(self, problem: Exception) -> None:
        """Raise `problem` in every pending and later `ask`."""
        self._end = problem
        for request in self._outstanding:
            request.fail(problem)

    async def ask(
        self, head: bytes, body: bytes = b"", *, alone: bool = False, begun: Callable[[], None] = lambda: None
    ) -> tuple[Head, bytes]:
        """Send a request to a worker and return (head, body) of the reply.

        alone: True for a worker without any other request meanwhile. begun: called each time when a worker takes the
        request. Raises WorkerDied, for the last worker that died, if the request fails; `read` is False if the worker
        had not read the request. If the pool has ended, raises the exception with which the pool ended.
        """
        if self._end is not None:
            raise self._end
        reply = asyncio.get_running_loop().create_future()
        request = _Request[Head](head=head, body=body, reply=reply, begun=begun)
        self._outstanding.add(request)
        queue = self._suspects if alone else self._queue
        queue.put_nowait(request)
        try:
            return await reply
        finally:
            self._outstanding.discard(request)
            # The request stays in the queue if the caller is cancelled, so the body, often large, is dropped.
            request.body = b""

    async def _work(self, worker: Worker) -> None:
        concurrent = worker in self._workers and self._suspects is not self._queue
        queue = self._queue if concurrent else self._suspects
        while True:
            request = await queue.get()
            # A worker that is not alive is replaced only after the last replies, so another worker takes the request.
            if concurrent and not worker.alive:
                queue.put_nowait(request)
            else:
                await self._serve(worker, request, queue)
            while worker in self._workers and not await self._ready(worker):
                pass

    async def _serve(self, worker: Worker, request: _Request[Head], queue: asyncio.Queue[_Request[Head]]) -> None:
        """Let the worker try a request until a reply or a failure. If the worker works on several requests and dies
        with the request, put the request into the queue of suspects."""
        concurrent = queue is not self._suspects
        # The future is also done if the caller is cancelled.
        while not request.reply.done():
            if not await self._ready(worker):
                self._refuse(request, queue)
                continue
            await self._try(worker, request, concurrent)
            if concurrent and request.losses:
                self._suspects.put_nowait(request)
                break

    def _refuse(self, request: _Request[Head], queue: asyncio.Queue[_Request[Head]]) -> None:
        """Fail a request because the worker cannot be started. If no extra worker runs, a suspect's failure fails all
        waiting suspects, too."""
        waiting = [request]
        if queue is not self._queue and not any(worker.alive for worker in self._extra):
            waiting += [queue.get_nowait() for _ in range(queue.qsize())]
        for failed_request in waiting:
            failed_request.fail(WorkerDied(f"the failed start of a {self._program.name} process"))

    async def _try(self, worker: Worker, request: _Request[Head], concurrent: bool) -> None:
        """Send a request to the worker once. If the worker dies, fail the request after too many deaths or by
        `settles`."""
        request.begun()
        try:
            reply = await worker.ask(request.head, request.body, self._limit_s, self._decode)
        except WorkerDied as death:
            if death.read:
                request.losses += 1
            elif not death.unanswered_requests:
                request.early_losses += 1
            too_many = request.losses >= MAX_LOSSES or request.early_losses >= MAX_EARLY_LOSSES
            if too_many or (not concurrent and self._settles(death)):
                request.fail(death)
        else:
            if not request.reply.done():
                request.reply.set_result(reply)

    async def _ready(self, worker: Worker) -> bool:
        """Make sure that a worker runs. If START_TRIES tries to start a process fail, wait ROUND_PAUSE_S and return
        False.

        Raises RuntimeError after START_ROUNDS failed rounds per worker without any worker of the pool alive.
        """
        async with worker.gate:
            if worker.alive:
                return True
            problem: Exception | None = None
            for attempt in range(START_TRIES):
                if attempt:
                    await asyncio.sleep(START_PAUSE_S * 2 ** (attempt - 1))
                try:
                    await worker.start()
                except (ValueError, OSError, ProcessDied) as error:
                    # The program has accepted the setup before, so a refusal now is treated as a passing fault.
                    problem = error
                    self._failed_tries += 1
                    continue
                self._failed_rounds = 0
                self._failed_tries = 0
                return True
            logger.warning("%s could not be started again; further tries follow: %s", worker.name, problem)
            if not any(peer.alive for peer in self._workers):
                self._failed_rounds += 1
            if self._failed_rounds >= START_ROUNDS * len(self._workers):
                raise RuntimeError(
                    f"no {self._program.name} process can be started: {self._failed_tries} tries in a row failed, "
                    f"the last with: {problem}"
                )
            await asyncio.sleep(ROUND_PAUSE_S)
            return False

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        problem = task.exception()
        if problem is not None:
            assert isinstance(problem, Exception)
            self.end(problem)


class Worker(asyncio.Protocol):
    """A worker's process and socket; `start` replaces a process that has ended.

    If the socket is closed or delivers an invalid frame, all outstanding requests of the worker fail.
    """

    def __init__(self, name: str, program: Program, output: _Output | None = None):
        self.name = name
        self._program = program
        self._output = output or _Output()
        self._log = Path(os.devnull)
        if program.logs is not None:
            self._log = program.logs / f"{name}.log"
        self._child: ChildProcess | None = None
        self._transport: asyncio.Transport | None = None
        self._number = 0
        """Number of the last request."""
        self._replies: dict[int, asyncio.Future[Any]] = {}
        """Number of an outstanding request -> future with (kind, head, body) of the reply."""
        self._read: set[int] = set()
        """Numbers of the requests that the worker's process has read but not replied to. `start` makes a new set."""
        self._received = bytearray()
        self._ending = False
        """Whether the process has sent a LAST_REPLY, and so will end."""
        self.gate = asyncio.Lock()
        """Lock for starting the process. Every request waits for the lock, and so for a start in progress."""
        self.greeting = b""
        """Body of the worker's reply to the setup: CONCURRENT, or empty for one request at a time."""

    @property
    def pid(self) -> int | None:
        """Process id; None without a process."""
        if self._child is None:
            return None
        return self._child.pid

    @property
    def alive(self) -> bool:
        """True while the process runs and takes requests: from `start` until `kill`, a LAST_REPLY or the exit."""
        return self._child is not None and self._child.running and not self._ending

    async def start(self) -> None:
        """Start the process and wait for the reply to the setup. Raises the errors of `WorkerPool.start`."""
        try:
            refusal = await self._start()
        except WorkerDied as death:
            end = "" if self._program.logs is None else log_end(self._log)
            raise ProcessDied(
                f"{self._program.subject}: its process was not ready within {self._program.start_timeout_s:g} s "
                f"({death}){end}"
            ) from None
        if refusal:
            raise ValueError(refusal)

    async def _start(self) -> str:
        """Wait for the last replies of an ending process, then start a process. Returns the reply to the setup."""
        if self._ending and self._replies:
            await asyncio.wait(self._replies.values())
        await self.kill()
        pool_socket, worker_socket = socket.socketpair()
        self._received.clear()
        self._read = set()
        self._ending = False
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=pool_socket)
        # `with` closes this process's copy of the worker's end. Then only the worker keeps the connection open.
        with worker_socket:
            descriptor = worker_socket.fileno()
            self._child = await ChildProcess.start(
                self.name,
                [sys.executable, "-m", self._program.module],
                {**self._program.environment, SOCKET_VARIABLE: str(descriptor)},
                self._log,
                pass_fds=(descriptor,),
                output=self._output.writer,
            )
        decode = msgspec.json.Decoder(str).decode
        paths = b"\0".join(map(os.fsencode, sys.path))
        reply, self.greeting = await self.ask(self._program.setup, paths, self._program.start_timeout_s, decode)
        return reply

    async def ask(self, head: bytes, body: bytes, timeout_s: float, decode: Callable[[bytes], T]) -> tuple[T, bytes]:
        """Send a request and return (decoded head, body) of the reply.

        Raises WorkerDied without a valid reply in time; the process is dead then. If this call is cancelled, the
        caller must kill the worker, because a reply to a forgotten request counts as an invalid frame.
        """
        transport = self._transport
        unanswered = self._read
        self._number += 1
        number = self._number
        begin = time.monotonic()
        used_before = self._processor_s()
        try:
            async with time_limit(timeout_s):
                last, reply_head, reply_body = await self._exchange(number, head, body)
            # If the head cannot be decoded, the request counts as read and without a reply.
            unanswered.add(number)
            decoded = decode(reply_head)
            unanswered.discard(number)
        except (OSError, EOFError, ValueError, RecursionError) as problem:
            died = functools.partial(WorkerDied, read=number in unanswered, unanswered_requests=bool(unanswered))
            busy = (self._processor_s() - used_before) / (time.monotonic() - begin)
            code = None
            # If `_transport` has changed, the failure of another request has ended this process already.
            if self._transport is transport:
                code = await self.kill()
            if isinstance(problem, TimeoutError):
                raise died(f"no answer within {timeout_s:g} s", late=True, busy=busy) from None
            if isinstance(problem, ValueError | RecursionError):
                raise died("bytes in its socket that are not a valid reply") from None
            # The socket was closed. `code` is the exit code, also if the process was killed just now.
            raise died(end_of(code), code=code) from None
        finally:
            self._replies.pop(number, None)
        self._ending |= last
        return decoded, reply_body

    def _processor_s(self) -> float:
        """Processor time of the process and all descendants so far (seconds)."""
        ticks = 0
        waiting = [str(self.pid)]
        while waiting:
            folder = Path(f"/proc/{waiting.pop()}")
            # The process may have ended meanwhile.
            with contextlib.suppress(OSError):
                # Fields are counted after the name, which may contain spaces. Fields 11 to 14 are utime, stime, and
                # the two times of waited-for children.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
                for children in folder.glob("task/*/children"):
                    waiting += children.read_text().split()
        return ticks / os.sysconf("SC_CLK_TCK")

    async def kill(self) -> int | None:
        """Send SIGKILL to the process group. Returns the exit code, or None without a process or an exit within
        END_TIMEOUT_S. May be called twice."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        child = self._child
        self._child = None
        if child is None:
            return None
        child.kill()
        try:
            return await asyncio.wait_for(child.wait(), END_TIMEOUT_S)
        except TimeoutError:
            logger.warning("%s (%d) is still running %g s after SIGKILL", self.name, child.pid, END_TIMEOUT_S)
            return None

    async def _exchange(self, number: int, head: bytes, body: bytes) -> tuple[bool, bytes, bytes]:
        """Send a request; returns (True if the reply is a LAST_REPLY, head, body). May raise EOFError."""
        if self._transport is None or self._transport.is_closing():
            raise EOFError
        kind, head, body = await self.send(number, head, body)
        return kind == LAST_REPLY, head, body

    def send(self, number: int, head: bytes, body: bytes = b"") -> asyncio.Future[Any]:
        """Send a request. Returns a future for (kind, head, body) of the reply; number 0 gets no reply."""
        # All callers check before that the process is alive, also in `environments.pool`.
        assert self._transport is not None, "started"
        self._transport.write(FRAME.pack(number, REQUEST, len(head), len(body)) + head)
        self._transport.write(body)
        reply = asyncio.get_running_loop().create_future()
        if number:
            self._replies[number] = reply
        return reply

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= FRAME.size:
            number, kind, head, body = FRAME.unpack_from(self._received)
            body_start = FRAME.size + head
            end = body_start + body
            if number not in self._replies or not READ <= kind <= LAST_REPLY or end > self._program.most_reply:
                self.connection_lost(ValueError())
                return
            if len(self._received) < end:
                return
            frame = bytes(self._received[:end])
            del self._received[:end]
            if kind == READ:
                self._read.add(number)
            elif not self._replies[number].done():
                self._read.discard(number)
                self._replies.pop(number).set_result((kind, frame[FRAME.size : body_start], frame[body_start:]))

    def connection_lost(self, problem: Exception | None) -> None:
        if self._transport is not None:
            self._transport.abort()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(problem or EOFError())


def end_of(code: int | None) -> str:
    """A noun phrase for the end of a process. code: the exit code; None if the process only closed the socket."""
    if code is None:
        return "a closed socket"
    if code < 0:
        return f"its exit with code {code} ({signal.strsignal(-code)})"
    return f"its exit with code {code}"


class _Output:
    """A pipe from the workers of a pool to the stderr of this process.

    Workers do not inherit stderr: if stderr is a log file, a worker's limit on file sizes would apply to the log. The
    subprocess pipes of asyncio are not used: such a pipe waits until a worker's surviving children close the pipe.
    """

    writer: int | None = None
    """File descriptor to which workers write; None while the pipe is not open."""

    def open(self) -> None:
        """Open the pipe, and let the event loop forward the workers' output from now on."""
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, self._forward)

    def close(self) -> None:
        """Forward the remaining output and close the pipe; may be called twice."""
        if self.writer is None:
            return
        os.close(self.writer)
        self.writer = None
        asyncio.get_running_loop().remove_reader(self._reader)
        self._forward()
        os.close(self._reader)

    def _forward(self) -> None:
        """Write the contents of the pipe, at most 64 KiB, to stderr."""
        with contextlib.suppress(BlockingIOError):
            output = os.read(self._reader, 1 << 16)
            sys.stderr.write(printable(output.decode(errors="replace")))
