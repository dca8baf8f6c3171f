"""Worker processes that can be killed, behind asyncio: a request gets a reply, or the reason why there is none.

    ask() --> queue --> one task per worker, or several --socket--> process

Life of a worker:

    start      in a process group that ends with this process; the first request is the setup, and the reply is "" or
               the reason of a refusal
    work       one request at a time: the worker says that the request is read, then sends the reply. A worker that
               greets as CONCURRENT works on several requests, all workers together on `Program.concurrency`, and
               answers all requests at work before the end
    end        after a `LAST_REPLY`; a worker that exits, exceeds the time limit or sends anything else is killed with
               all children
    replace    START_TRIES tries with pauses are a round; after a failed round the worker's request is lost, and the
               worker takes no other request and goes on trying. An extra worker takes the next suspect request;
               where no extra worker runs, all waiting suspects are lost

Life of a request:

    queue      the request waits for a worker; if the caller is cancelled meanwhile, no worker begins the request
    work       a worker reads the request and works to the end, also for a cancelled caller
    repeat     if the worker dies, by up to MAX_LOSSES workers in all; workers that died before they had read any
               request are counted separately (MAX_EARLY_LOSSES)
    suspect    any of several requests in a dead worker may be the cause of the death. Extra workers, started for the
               first suspect and as many as the pool has, repeat all suspects, one at a time; other requests go on

End of the pool: after START_ROUNDS failed rounds for every worker, with no worker alive, `ask` raises RuntimeError.

Protocol: a worker inherits one end of a socket pair, whose number is in MSRL_WORKER_FD. Both sides send frames
(`worker.FRAME`): number of the request, kind, two sizes; then a head, which is JSON in replies, and a body of bytes.
The body of the setup says where the pool imports modules from. A worker ends when the socket is closed.

Each caller of `ask` puts a single request into the queue and waits for the reply, which bounds the queue; the
workers' tasks empty the queue.

concurrent.futures is no substitute: if a process is killed while writing a result, the thread that reads results
waits forever, and with it the exit of the caller.
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
"""Number of workers that may die with one request that they have read; then the request fails."""
MAX_EARLY_LOSSES = 3
"""Number of workers that may die before one request is read; then the request fails."""
START_TRIES = 4
"""Number of tries to start a dead worker's process again in one round."""
START_PAUSE_S = 0.5
"""Pause after the first try of a round, which doubles after each further try (seconds)."""
ROUND_PAUSE_S = 20.0
"""Pause between two rounds (seconds)."""
START_ROUNDS = 3
"""Number of failed rounds per worker, with no worker alive, after which the pool ends. The rounds take about a
minute."""
END_TIMEOUT_S = 10.0
"""Seconds for a killed process to exit. A slower process is left behind."""
GRACE_S = 5.0
"""Seconds added to a request's time limit if workers take several requests at once: such a worker enforces the limit
itself, and needs time to say so."""


@dataclass(eq=False, repr=False)
class WorkerDied(Exception):
    """A worker died before the reply to a request. The message is `cause`."""

    cause: str
    """The event that came in place of a reply, as a noun phrase, such as "its exit with code 1"."""
    read: bool = False
    """Whether the worker had read the request."""
    unanswered_requests: bool = False
    """Whether the worker had read any request that has no reply so far."""
    late: bool = False
    """Whether the worker exceeded the time limit."""
    code: int | None = None
    """The worker's exit code, negative for a signal; None if the pool killed the worker."""
    busy: float = 0.0
    """Share of the time limit in which a late worker used a processor."""


@record
class Program:
    """The program that every worker of a pool runs."""

    name: str
    """Workers are called NAME-N."""
    module: str
    """Name of the module that a worker's process runs. The module calls `worker.serve`."""
    setup: bytes
    """Head of the first request, the setup."""
    environment: Mapping[str, str]
    """All environment variables, without the variable for the socket's number."""
    subject: str
    """First words of the error message if a worker does not start, such as a recipe's key."""
    timeout_s: float
    """Time limit of a request (seconds)."""
    start_timeout_s: float
    """Time limit of the start with the setup (seconds)."""
    concurrency: int = 1
    """Number of requests at work in all workers together, if a worker works on several requests."""
    most_reply: int = 2**32
    """The largest size of a reply (bytes). A frame that announces more is taken for damage."""
    logs: Path | None = None
    """Folder for the logs, NAME-N.log. None: output goes to the stderr of this process."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Request(Generic[Head]):
    """An outstanding request, whose caller awaits `reply`."""

    head: bytes
    body: bytes
    reply: asyncio.Future[tuple[Head, bytes]]
    begun: Callable[[], None]
    """Function that is called for each worker that takes the request."""
    losses: int = 0
    """Number of workers that ended after the request was read."""
    early_losses: int = 0
    """Number of workers that ended before the request was read."""

    def fail(self, problem: Exception) -> None:
        """Raise `problem` for the caller, unless the caller was cancelled or has a reply."""
        if not self.reply.done():
            self.reply.set_exception(problem)


class WorkerPool(Generic[Head]):
    """Workers that all run one program."""

    def __init__(
        self,
        program: Program,
        count: int,
        reply_type: type[Head],
        *,
        settles: Callable[[WorkerDied], bool],
    ):
        """reply_type: type of the replies' heads. settles: whether a death ends the request without a repeat."""
        self._program = program
        self._output = _Output()
        workers = [Worker(f"{program.name}-{n}", program, self._output) for n in range(2 * count)]
        self._workers = workers[:count]
        self._extra = workers[count:]
        """Extra workers, which repeat the suspects: requests that were at work in a worker that died."""
        self._decode = msgspec.json.Decoder(reply_type).decode
        self._settles = settles
        self._queue: asyncio.Queue[_Request[Head]] = asyncio.Queue()
        self._suspects = self._queue
        """Requests to be repeated one at a time, since any may have killed a worker."""
        self._outstanding: set[_Request[Head]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._limit_s = program.timeout_s
        self._failed_rounds = 0
        self._failed_tries = 0
        """Numbers of failed rounds and of failed tries since a process was last started."""
        self._end: Exception | None = RuntimeError(f"the {program.name} pool was not started")
        """The reason why `ask` gets no answer, None while the pool works."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def start(self) -> None:
        """Start all processes; after an error no process is left.

        Raises ValueError if the program refuses the setup, ProcessDied if the program does not answer, OSError.
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
        """Kill all processes and fail all outstanding requests; may be called twice."""
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
        """(head, body) of the reply to a request.

        alone: whether the worker works on no other request meanwhile. begun: callback for a worker that takes the
        request. Raises WorkerDied of the last worker that died with the request, with `read` false if no worker had
        read the request. Raises the reason of the end if the pool has ended.
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
            # The request of a cancelled caller stays in the queue until its turn, and the body may be large.
            request.body = b""

    async def _work(self, worker: Worker) -> None:
        concurrent = worker in self._workers and self._suspects is not self._queue
        queue = self._queue if concurrent else self._suspects
        while True:
            request = await queue.get()
            # A replacement waits for the last replies of the ending worker, so another worker takes the request.
            if concurrent and not worker.alive:
                queue.put_nowait(request)
            else:
                await self._serve(worker, request, queue)
            while worker in self._workers and not await self._ready(worker):
                pass

    async def _serve(self, worker: Worker, request: _Request[Head], queue: asyncio.Queue[_Request[Head]]) -> None:
        """Try a request until there is a reply or a failure, or put the request into the queue of suspects."""
        concurrent = queue is not self._suspects
        # If the caller is cancelled, the future of the reply is also done.
        while not request.reply.done():
            if not await self._ready(worker):
                self._refuse(request, queue)
                continue
            await self._try(worker, request, concurrent)
            if concurrent and request.losses:
                self._suspects.put_nowait(request)
                break

    def _refuse(self, request: _Request[Head], queue: asyncio.Queue[_Request[Head]]) -> None:
        """Fail a request whose worker does not start, and all suspects if no extra worker runs."""
        waiting = [request]
        if queue is not self._queue and not any(worker.alive for worker in self._extra):
            waiting += [queue.get_nowait() for _ in range(queue.qsize())]
        for failed_request in waiting:
            failed_request.fail(WorkerDied(f"the failed start of a {self._program.name} process"))

    async def _try(self, worker: Worker, request: _Request[Head], concurrent: bool) -> None:
        """Resolve the request by a reply or after too many deaths; else the caller of `_try` repeats the request."""
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
        """Start a worker that does not run, in one round; False, after a pause, if all tries failed.

        Raises RuntimeError after too many failed rounds with no worker of the pool alive.
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
                    # The program has started before, so a refused setup is as transient as a lack of memory.
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

    The end of the socket, and anything but a frame, ends all outstanding requests.
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
        """(kind, head, body) of the replies to outstanding requests, by the request's number."""
        self._read: set[int] = set()
        """Numbers of requests that the process has read and not replied to; a new process gets a new set."""
        self._received = bytearray()
        self._ending = False
        """Whether a reply was the last reply of the process."""
        self.gate = asyncio.Lock()
        """Lock that each request passes. A replacement of the process holds the lock."""
        self.greeting = b""
        """Body of the reply to the setup."""

    @property
    def pid(self) -> int | None:
        """Process id, None if there is no process."""
        if self._child is None:
            return None
        return self._child.pid

    @property
    def alive(self) -> bool:
        """False before `start`, after `kill` and a last reply, and once the exit of the process was noticed."""
        return self._child is not None and self._child.running and not self._ending

    async def start(self) -> None:
        """Start the process and wait for readiness. Raises as `WorkerPool.start`."""
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
        """Start the process, after all replies of an ending predecessor. Returns the reply to the setup."""
        if self._ending and self._replies:
            await asyncio.wait(self._replies.values())
        await self.kill()
        pool_socket, worker_socket = socket.socketpair()
        self._received.clear()
        self._read = set()
        self._ending = False
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=pool_socket)
        # This process closes its copy of the socket, so that the end of the worker closes the socket.
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
        """(decoded head, body) of the reply. Raises WorkerDied, after which the process is dead.

        After a cancellation the worker has to be killed: a late reply would be damage.
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
            # The request counts as unanswered until the head of the reply is decoded.
            unanswered.add(number)
            decoded = decode(reply_head)
            unanswered.discard(number)
        except (OSError, EOFError, ValueError, RecursionError) as problem:
            died = functools.partial(WorkerDied, read=number in unanswered, unanswered_requests=bool(unanswered))
            busy = (self._processor_s() - used_before) / (time.monotonic() - begin)
            code = None
            # If the transport differs, another request has already ended the process.
            if self._transport is transport:
                code = await self.kill()
            if isinstance(problem, TimeoutError):
                raise died(f"no answer within {timeout_s:g} s", late=True, busy=busy) from None
            if isinstance(problem, ValueError | RecursionError):
                raise died("bytes in its socket that are not a valid reply") from None
            # A process that closed the socket has exited with a fixed code, or can no longer be trusted.
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
            # The process may have ended.
            with contextlib.suppress(OSError):
                # The fields follow the name, which may contain spaces. The four fields are utime, stime, and both
                # times of the children that have ended.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
                for children in folder.glob("task/*/children"):
                    waiting += children.read_text().split()
        return ticks / os.sysconf("SC_CLK_TCK")

    async def kill(self) -> int | None:
        """End the process and all children at once. Returns the exit code, None if there is none. May be called
        twice."""
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
        """(whether the reply is the last, head, body) of the reply to a request."""
        if self._transport is None or self._transport.is_closing():
            raise EOFError
        kind, head, body = await self.send(number, head, body)
        return kind == LAST_REPLY, head, body

    def send(self, number: int, head: bytes, body: bytes = b"") -> asyncio.Future[Any]:
        """Send a request. The future gets (kind, head, body) of the reply, which never comes for number 0."""
        # The process is alive, because `_Process.call` and `leave` of environments look first.
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
    """The end of a process with this exit code, as a noun phrase."""
    if code is None:
        return "a closed socket"
    if code < 0:
        return f"its exit with code {code} ({signal.strsignal(-code)})"
    return f"its exit with code {code}"


class _Output:
    """A pipe from the workers of a pool to the stderr of this process.

    Workers do not inherit stderr, because a worker's limit on file sizes would apply to a log file too. A pipe of
    asyncio's subprocess would wait for the worker's surviving children, which hold the pipe's other end.
    """

    writer: int | None = None
    """Descriptor that workers write to, None if the pipe is not open."""

    def open(self) -> None:
        """Open the pipe, and forward the workers' output from now on."""
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
        """Forward the contents of the pipe, which holds at most 64 KiB."""
        with contextlib.suppress(BlockingIOError):
            output = os.read(self._reader, 1 << 16)
            sys.stderr.write(printable(output.decode(errors="replace")))
