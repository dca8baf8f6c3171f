"""One verifier process, controlled by the pool: start, send checks, read results within a time limit, kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_scalerl.processes.child_process import signal_group
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.rewards.limits import Limits
from megatron_scalerl.rewards.worker import FRAME

logger = logging.getLogger(__name__)

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
INHERITED = (
    "PATH",
    "HOME",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONHOME",
)
"""Environment variables that a worker inherits, besides LC_* and those of `rewards.environment`."""

END_TIMEOUT_S = 10.0
"""Seconds for a killed process to exit; after that it is left behind."""

_EXIT_S = 5.0
"""Seconds for a process to exit after it has closed its pipes."""
_OUTCOMES = {"value", "error", "memory", "timeout", "unavailable"}
"""Keys of a reply; one of them holds the outcome of a check."""


class _KilledAtStart(ValueError):
    """A signal ended the process before its verifier was loaded."""


class WorkerDied(Exception):
    """The verifier process exited while it was in use."""

    def __init__(self, limit: str = "") -> None:
        super().__init__(limit)
        self.limit = limit
        """The limit that ended it: `timeout` or `memory`. Empty: none of them."""


def worker_environment(passed: Sequence[str]) -> dict[str, str]:
    """The environment of a worker, without the user's tokens, keys and agents unless `passed` names them.

    Raises ValueError if a variable of `passed` is not set.
    """
    for name in passed:
        if name not in os.environ:
            raise ValueError(f"rewards.environment: expected {name!r} to be set, found no such environment variable")
    path = os.pathsep.join(filter(None, (PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
    kept = {n: v for n, v in os.environ.items() if n in INHERITED or n.startswith("LC_") or n in passed}
    # unbuffered: output before a kill is not lost
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


class WorkerProcess:
    """A verifier process and its pipes; `start` may be called again after `kill`."""

    def __init__(self, verifier: str, *, limits: Limits, environment: Sequence[str], start_timeout_s: float) -> None:
        self._verifier = verifier
        self._limits = limits
        self._environment = tuple(environment)
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._pipes: _Pipes | None = None
        self._output: _Output | None = None

    @property
    def alive(self) -> bool:
        """False before `start`, after `kill`, and once the exit of the process was noticed."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process and wait until its verifier is loaded.

        A process that a signal ends meanwhile is started once more. Raises ValueError if the verifier does not load,
        OSError if the system starts no process.
        """
        try:
            await self._start()
        except _KilledAtStart:
            await self._start()

    async def _start(self) -> None:
        environment = worker_environment(self._environment)
        with _Output() as output:
            async with _Pipes() as pipes:
                # Its own session: its child processes are killed with it, and Ctrl-C reaches the controller only.
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "megatron_scalerl.rewards.worker",
                    str(os.getpid()),
                    stdin=pipes.their_requests,
                    stdout=pipes.their_replies,
                    stderr=output.writer,
                    start_new_session=True,
                    env=environment,
                )
        self._output, self._pipes = output, pipes
        try:
            await self._send({"verifier": self._verifier, "sys_path": sys.path, "limits": self._limits})
            hello = await self._line(self._start_timeout_s)
        except (TimeoutError, WorkerDied) as problem:
            expected = f"expected its process to be ready within {self._start_timeout_s:g} s"
            expected = f"rewards.verifier {self._verifier!r}: {expected}"
            if isinstance(problem, TimeoutError):
                await self.kill()
                raise ValueError(f"{expected}, found nothing") from None
            code = await self._exit_code()
            await self.kill()
            if code < 0:
                raise _KilledAtStart(f"{expected}, found its end by {signal.Signals(-code).name}") from None
            raise ValueError(f"{expected}, found its exit with code {code}") from None
        if "error" in hello:
            await self.kill()
            raise ValueError(hello["error"])

    async def _exit_code(self) -> int:
        """The exit code of a process that closed its pipes; that of SIGKILL if it does not exit."""
        assert self._process is not None
        try:
            async with asyncio.timeout(_EXIT_S):
                return await self._process.wait()
        except TimeoutError:
            return -signal.SIGKILL

    async def send_checks(self, checks: Sequence[tuple[int, bytes]], timeout_s: float) -> None:
        """Send numbered, pickled checks; then await `began` and `result` for each, in this order.

        Raises TimeoutError and WorkerDied.
        """
        async with asyncio.timeout(timeout_s):
            await self._send(list(checks))

    async def began(self, serial: int, timeout_s: float) -> None:
        """Wait until the process begins check `serial`. Raises TimeoutError and WorkerDied."""
        if (await self._line(timeout_s)).get("began") != serial:
            raise WorkerDied

    async def result(self, serial: int, timeout_s: float) -> dict[str, Any]:
        """The result of the check that began last. Raises TimeoutError and WorkerDied."""
        reply = await self._line(timeout_s)
        if reply.get("serial") != serial or "retire" not in reply or not _OUTCOMES & reply.keys():
            raise WorkerDied
        return reply

    async def kill(self) -> None:
        """Kill the process and all its child processes."""
        process = self._process
        if process is None:
            return
        await self._end()
        self._process = None
        if self._pipes is not None:
            self._pipes.close()
        if self._output is not None:
            self._output.close()

    async def _end(self) -> int | None:
        """Kill the process group; returns the exit status, negative for a signal, None if it does not exit."""
        assert self._process is not None
        pid = self._process.pid
        # After it was reaped and its group is empty, its id may have been reused.
        if self._process.returncode is None or not Path(f"/proc/{pid}").exists():
            signal_group(pid)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                return await self._process.wait()
        except TimeoutError:
            logger.warning("verifier process %d is still running %g s after SIGKILL", pid, END_TIMEOUT_S)
            return None

    async def _send(self, message: Any) -> None:
        assert self._pipes is not None
        body = pickle.dumps(message)
        try:
            self._pipes.requests.write(FRAME.pack(len(body)) + body)
            await self._pipes.requests.drain()
        except (ConnectionError, RuntimeError):
            raise WorkerDied from None

    async def _line(self, timeout_s: float) -> dict[str, Any]:
        """The next line from the process. Raises TimeoutError after timeout_s seconds, and WorkerDied."""
        assert self._pipes is not None
        replies = self._pipes.replies
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    line = await replies.readline()
            except TimeoutError:
                # The event loop itself may have been late: a reply that is already in the buffer was in time.
                async with asyncio.timeout(0):
                    line = await replies.readline()
            if not line.endswith(b"\n"):
                raise await self._death()
            message = json.loads(line)
        except ValueError:  # the verifier wrote into our pipe: this process can no longer be trusted
            raise WorkerDied from None
        if not isinstance(message, dict):
            raise WorkerDied
        return message

    async def _death(self) -> WorkerDied:
        """Why the process exited, as far as its signal tells."""
        assert self._process is not None
        # A process that closed its pipe has exited, with its status fixed, or can no longer be trusted.
        code = await self._end()
        if code == -signal.SIGPROF:
            return WorkerDied("timeout")
        if code == -signal.SIGABRT and self._limits.memory_mb is not None:
            return WorkerDied("memory")
        return WorkerDied()


class _Pipes:
    """The pipes for a worker's requests and replies.

    Not those of asyncio's subprocess: there, waiting for the process waits for its surviving child processes too,
    which hold the other ends.
    """

    requests: asyncio.StreamWriter
    replies: asyncio.StreamReader

    def __init__(self) -> None:
        self._theirs, self._ours = contextlib.ExitStack(), contextlib.ExitStack()

    async def __aenter__(self) -> _Pipes:
        try:
            await self._open()
        except BaseException:
            self._theirs.close()
            self.close()
            raise
        return self

    async def __aexit__(self, kind: object, *error: object) -> None:
        self._theirs.close()  # the worker has its own copies
        if kind is not None:
            self.close()

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self.their_requests, ours = os.pipe()
        self._theirs.callback(os.close, self.their_requests)
        requests = self._ours.enter_context(os.fdopen(ours, "wb", 0))
        ours, self.their_replies = os.pipe()
        self._theirs.callback(os.close, self.their_replies)
        replies = self._ours.enter_context(os.fdopen(ours, "rb", 0))
        self.replies = asyncio.StreamReader()
        source, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self.replies), replies)
        self._ours.callback(source.close)
        sink, flow = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), requests
        )
        self.requests = asyncio.StreamWriter(sink, flow, None, loop)
        self._ours.callback(self._abort_requests)

    def _abort_requests(self) -> None:
        if not self.requests.transport.is_closing():  # asyncio closes it when the worker closes its end
            self.requests.transport.abort()

    def close(self) -> None:
        """Close our ends; unwritten data is dropped."""
        self._ours.close()


class _Output:
    """Forwards a worker's output to the stderr of this process, through a pipe.

    The worker does not inherit stderr itself, because its limit on file sizes would apply to a log file too. A pipe
    of asyncio's subprocess is not used for the reason given in `_Pipes`.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._forward)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        os.close(self.writer)  # the worker has its own copy
        if kind is not None:
            self.close()

    def close(self) -> None:
        """Forward the remaining output and close the pipe."""
        self._loop.remove_reader(self._reader)
        self._forward()
        os.close(self._reader)

    def _forward(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self._reader, 1 << 16)
            sys.stderr.write(printable(part.decode(errors="replace")))
            if not part:
                self._loop.remove_reader(self._reader)
