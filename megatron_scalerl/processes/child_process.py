"""Child processes of a run. Each has a process group, which is stopped as a whole, and a log file.

A child dies with the controller, however the controller exits (`processes.parent_death`). The child's own children
are in the child's process group, which `stop` and `kill` signal as a whole.

Also here: a wait for the first of several tasks (`race`), time limits that do not count the time in which this
process was stopped (`time_limit`), and the end of a process that formed torch's process groups (`end_with`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import stat
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from megatron_scalerl.processes.logs import NAME_VARIABLE
from megatron_scalerl.processes.parent_death import tied_command

logger = logging.getLogger(__name__)

LOG_LINES = 15
"""Number of lines at the end of a log that an error message quotes."""
LOG_END = "; the end of "
"""Text that separates an error message from the quoted last lines of a log."""
KILLED_S = 30.0
"""Seconds to wait for the end of a process after SIGKILL. On a busy host the kernel takes time to free the memory."""
_TAIL_BYTES = 20_000
_SLICES = 4
"""Number of equal waits into which `time_limit` divides a time limit."""

_started: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


class ProcessDied(RuntimeError):
    """A process of the run exited unexpectedly. The message ends with the last lines of the process's log."""


class ChildProcess:
    """A child process with a log file that only the file's owner can read."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path):
        self.name = name
        self.log = log
        self._process = process
        self._group_gone = False
        """True if no process of the group is left. The number may be reused then, so no signal is sent."""
        _started.add(self)

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        *,
        pass_fds: Sequence[int] = (),
        output: int | None = None,
    ) -> ChildProcess:
        """Start the command line `argv` as a child process. Raises OSError.

        env: the complete environment except NAME_VARIABLE. log: file to which stdout and stderr are appended. output:
        file descriptor for stdout and stderr instead of `log`, which is not opened then. pass_fds: inherited file
        descriptors. The kernel kills the child when the calling thread ends, so the caller must call from a thread
        that lives as long as this process, preferably the main thread.
        """
        log_file = contextlib.nullcontext(output) if output is not None else open_log(log)
        with log_file as output_file:
            process = await asyncio.create_subprocess_exec(
                *tied_command(list(argv)),
                env={**env, NAME_VARIABLE: name},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output_file,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        logger.info("started %s, pid %d", name, process.pid)
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        """Process id, which is also the process group id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """True until this process has noticed the exit of the child."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait until the process has exited; returns the exit code, which is negative for a signal."""
        return await self._process.wait()

    async def watch(self) -> NoReturn:
        """Wait until the process has exited, then raise ProcessDied, whatever the exit code."""
        code = await self.wait()
        raise ProcessDied(f"{self.name} exited with code {code}{log_end(self.log)}")

    async def stop(self, grace_s: float = 10.0) -> None:
        """Send SIGTERM to the process group, and SIGKILL after `grace_s` seconds; may be called twice.

        Raises RuntimeError if the process is still running KILLED_S seconds after SIGKILL (`grace_s` seconds, if
        more). If this call is cancelled, the group gets SIGKILL at once.
        """
        killed_s = max(KILLED_S, grace_s)
        try:
            if self._signal(signal.SIGTERM):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.wait(), grace_s)
                self._signal(signal.SIGKILL)
        except asyncio.CancelledError:
            # After the cancellation nothing would send SIGKILL later, so SIGKILL is sent now.
            self.kill()
            raise
        try:
            await asyncio.wait_for(self.wait(), killed_s)
        except TimeoutError:
            raise RuntimeError(
                f"{self.name} (process {self.pid}) is still running {killed_s:g} s after SIGKILL"
            ) from None
        self._group_gone = True

    def kill(self) -> None:
        """Send SIGKILL to the process group; does not wait."""
        self._signal(signal.SIGKILL)

    def _signal(self, sig: int) -> bool:
        """Send a signal to the process group; False if no process of the group is left."""
        # The kernel reuses a process id only if no process group has this number. So if the child has exited and a
        # process with the child's id exists, the child's group is empty, and the other process must not be signaled.
        if not self.running and Path(f"/proc/{self.pid}").exists():
            self._group_gone = True
        if not self._group_gone:
            try:
                os.killpg(self.pid, sig)
            except ProcessLookupError:
                self._group_gone = True
        return not self._group_gone


def kill_all() -> None:
    """Send SIGKILL to the process group of every `ChildProcess` that is still running; does not wait."""
    for process in list(_started):
        if process.running:
            process.kill()


async def stop_all(processes: Sequence[Any], *grace_s: float) -> None:
    """Stop all processes at the same time. A failure is logged as one line and keeps no other process from stopping.

    processes: objects with `name` and `stop`, such as ChildProcess. grace_s: passed to `stop` if given.
    """
    results = await asyncio.gather(*(process.stop(*grace_s) for process in processes), return_exceptions=True)
    for process, error in zip(processes, results):
        if isinstance(error, BaseException):
            logger.warning("%s could not be stopped: %s", process.name, str(error) or type(error).__name__)


def open_log(path: Path) -> BinaryIO:
    """Open a log file for appending (binary). Only the owner may read a log, because a traceback may contain prompts.

    The mode of a device file, such as /dev/null, is not changed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        # The file may exist already, with another mode.
        os.fchmod(fd, 0o600)
    return os.fdopen(fd, "ab")


def log_tail(path: Path) -> str:
    """The last LOG_LINES lines of a log; empty if the file does not exist."""
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-LOG_LINES:])


def log_end(path: Path) -> str:
    """Text to append to an error message: LOG_END, the log's path and the log's last lines."""
    return f"{LOG_END}{path}:\n{log_tail(path)}"


_ERROR = re.compile(r"^(?:\(.*?\) )?(?:ERROR .*?\] )? *((?:\w+\.)*\w+(?:Error|Exception): [^\n]*)", re.MULTILINE)
_FATAL = re.compile(r"fatal error\.\n.*?^ *((?:\w+\.)*\w+(?:Error|Exception): [^\n]*)", re.DOTALL | re.MULTILINE)


def fatal_error(path: Path) -> str:
    """The exception that follows the last "fatal error." of vLLM's core near the end of a log.

    Without "fatal error.", the last exception in the log; empty if the log has no exception or cannot be read.
    """
    # A log that another host writes may not be readable here.
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 10 * _TAIL_BYTES))
        text = file.read().decode(errors="replace")
        return (_FATAL.findall(text) or _ERROR.findall(text) or [""])[-1]
    return ""


@contextlib.asynccontextmanager
async def race(*works: Awaitable[Any]) -> AsyncIterator[list[asyncio.Future[Any]]]:
    """Run awaitables as tasks, and enter the block when the first task is done. The value has all tasks, in order.

    After the block all tasks are cancelled and awaited. A caller who passes a future with further waiters must wrap
    the future in `asyncio.shield`.
    """
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        await cancelled(*tasks)


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until each has ended, by a result or by an exception."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Cancel the block after `seconds` and raise TimeoutError.

    The limit is divided into _SLICES waits. If this process is stopped for hours, for example in a suspended job, at
    most one wait passes meanwhile, and the block still has the remaining waits to finish.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def wait_for_slices(remaining_slices: int) -> None:
        nonlocal timer
        if remaining_slices:
            timer = loop.call_later(seconds / _SLICES, wait_for_slices, remaining_slices - 1)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds / _SLICES, wait_for_slices, _SLICES - 1)
        try:
            yield
        finally:
            timer.cancel()


def end_with(main: Callable[[], object]) -> NoReturn:
    """Call `main`, flush stdout and stderr, and end this process with the exit code, without Python's cleanup.

    `main` returns an exit code or None, or raises. SystemExit gives the exit code as usual; any other exception is
    printed and gives exit code 1. Functions of `atexit` are not called.

    Needed by processes with gloo groups. The groups' threads keep running after `parallel.shutdown_parallel`, because
    Megatron still refers to the groups. During Python's cleanup the threads sometimes abort the process ("terminate
    called without an active exception": 1 of 40 processes with one rank on two busy cores, torch 2.13), and a group's
    destructor may wait for a lost peer.
    """
    code: object = 1
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    # As for sys.exit, None is exit code 0, and a text is printed and gives exit code 1.
    status = 0
    if isinstance(code, int):
        status = code
    elif code is not None:
        status = 1
    last_line = f"{code}\n" if isinstance(code, str) else ""
    for stream, text in ((sys.stdout, ""), (sys.stderr, last_line)):
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            # The program that reads the stream has ended, or the disk is full.
            status = status or 1
        except (ValueError, AttributeError):
            # `main` closed the stream, or the process has no such stream (None).
            pass
    os._exit(status & 0xFF)
