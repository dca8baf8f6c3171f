"""Signals that end a run gracefully: its coroutine is cancelled, so that every context manager exits.

SIGINT and SIGTERM cancel it at once, SIGUSR1 once its state is saved (`SaveAndExit`).

`Takeover` tells of a later attempt of the run's job, which began while this one still lives: on a node that Slurm has
lost.

`held_uncharged` says since when a Slurm job holds its devices without a charge in the ledger. The job's script sets a
variable to its start, and `train --supervise` to the end of the program that it starts
again, if that one has charged anything. It is in seconds of /proc/uptime, which no change of the time of day moves.
"""

import asyncio
import atexit
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from megatron_scalerl.processes.child_process import cancelled, kill_all

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVE_SIGNAL = signal.SIGUSR1
SAVED_CODE = 75
"""Exit code after SAVE_SIGNAL: the run is not finished, and the same command goes on with it."""
EXIT_S = 5.0
"""Seconds for the interpreter to end after the cleanup, in which further signals are ignored."""
IN_USE_CODE = 76
"""Exit code where another controller has the run's folder: the same command may succeed later."""
HOSTS_LEFT_CODE = 77
"""Exit code where Slurm has taken hosts of the trainer out of the job: the run can go on in another allocation."""


class Stopped(Exception):
    """A signal stopped the run. `exit_code`: 130 for SIGINT, 143 for SIGTERM, SAVED_CODE for SAVE_SIGNAL."""

    def __init__(self, number: int, also: BaseException | None = None):
        name = signal.Signals(number).name
        detail = "" if also is None else f" ({type(also).__name__} while stopping: {also})"
        super().__init__(f"stopped by {name}; the same command resumes from the last checkpoint{detail}")
        self.exit_code = exit_code_of(number)


class SaveAndExit:
    """What SAVE_SIGNAL asks of a run. Create it anywhere; use it on one event loop.

    While no `run` is in progress there is nothing to save, and the run is cancelled at once.
    """

    def __init__(self) -> None:
        self._requested, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._depth = 0
        """Blocks of `uninterrupted` in progress, nested ones included."""
        self._deferred = False
        self.cancel: Callable[[], object] = lambda: None
        """Cancels the whole run; set by `run_until_signal`."""

    @property
    def requested(self) -> bool:
        """True after `request`."""
        return self._requested.is_set()

    def request(self) -> None:
        """Ask the run to save its state and to exit; further calls change nothing."""
        if self.requested:
            return
        self._requested.set()
        if not self._deferred:
            self.cancel()

    @contextlib.asynccontextmanager
    async def uninterrupted(self) -> AsyncIterator[None]:
        """A block of the work of `run` that is finished before a request interrupts it; blocks may be nested.

        After a request none is entered any more: the caller waits until it is cancelled.
        """
        if self.requested and not self._depth:
            await asyncio.Future()
        self._depth += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._idle.set()

    async def run(self, work: Coroutine[Any, Any, T], save: Callable[[], Awaitable[None]]) -> T:
        """The result of `work`, also where it ends after a request.

        A request cancels `work` outside of every block of `uninterrupted`, awaits `save`, and cancels the run.
        """
        self._deferred = True
        task, asked = asyncio.ensure_future(work), asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self._idle.wait()
                task.cancel()
                await asyncio.wait({task})
                if task.cancelled():
                    await save()
            return task.result()
        finally:
            self._deferred = False
            if self.requested:
                self.cancel()
            await cancelled(task, asked)


def exit_code_of(number: int) -> int:
    """Exit code of a run that this signal ended."""
    return SAVED_CODE if number == SAVE_SIGNAL else 128 + number


class _Late:
    """The handler of signals that come after the cleanup. Python's own end may wait for a thread, for ever."""

    def __init__(self, code: int):
        self._code, self._end = code, time.monotonic() + EXIT_S

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() > self._end:
            os._exit(self._code)


@atexit.register
def _ignore_to_the_end() -> None:
    """Python has waited for its threads, and is about to restore the default actions, which change the exit code.

    From here on only SIGKILL ends a process whose destructors hang.
    """
    for number in (*SIGNALS, SAVE_SIGNAL):
        if isinstance(signal.getsignal(number), _Late):
            signal.signal(number, signal.SIG_IGN)


def run_until_signal(coroutine: Coroutine[Any, Any, T], saving: SaveAndExit | None = None) -> T:
    """Run `coroutine` on a new event loop and return its result; call it in the main thread.

    The first SIGINT or SIGTERM cancels the coroutine; Stopped is raised once it has returned. Each later signal
    kills all child processes, so that the coroutine's cleanup, which still runs, waits for none of them. One that
    comes after the cleanup is ignored, for EXIT_S: the process exits with the code of the first; after that time it
    does so at once, while Python waits for its threads. saving: gets the requests of SAVE_SIGNAL, which without it
    keeps its action.
    """
    received: list[int] = []
    numbers = [*SIGNALS, *([SAVE_SIGNAL] if saving is not None else [])]

    def stopped_by() -> int | None:
        if received:
            return received[0]
        return SAVE_SIGNAL if saving is not None and saving.requested else None

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def on_signal(number: int) -> None:
            if number == SAVE_SIGNAL:
                assert saving is not None
                saving.request()
                return
            received.append(number)
            if len(received) == 1:
                task.cancel()
            else:
                kill_all()

        if saving is not None:
            saving.cancel = task.cancel
        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)
        try:
            return await coroutine
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            for number in numbers:
                loop.remove_signal_handler(number)
                if (first := stopped_by()) is not None:
                    signal.signal(number, _Late(exit_code_of(first)))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if (number := stopped_by()) is None:
            raise
        raise Stopped(number) from None
    except Exception as error:
        if not received:
            raise
        raise Stopped(received[0], error) from error


ATTEMPT_FILE = Path("slurm", "attempt")
"""In RUN/. The job script writes JOB.RESTART to it when an attempt begins."""


class Takeover:
    """Whether an attempt began after this object was made. Without Slurm none does."""

    def __init__(self, run_dir: str | Path):
        self._file = Path(run_dir) / ATTEMPT_FILE
        self._own = self._read()

    @property
    def happened(self) -> bool:
        """True once the file names another attempt; False while it cannot be read."""
        return (now := self._read()) is not None and now != self._own

    def _read(self) -> str | None:
        try:
            return self._file.read_text(encoding="utf8").strip() or None
        except (OSError, UnicodeDecodeError):
            return None


HELD_SINCE = "MSRL_HELD_SINCE"


def held_uncharged() -> float:
    """Seconds for which this job has held its devices uncharged; 0 outside of a job."""
    try:
        since = float(os.environ.get(HELD_SINCE, "inf"))
    except ValueError:
        return 0.0
    return max(0.0, _uptime() - since)


def held_from_now() -> dict[str, str]:
    """The variable for a program that is started after another one of this job has charged; none outside of a job."""
    if HELD_SINCE not in os.environ:
        return {}
    return {HELD_SINCE: f"{_uptime():.2f}"}


def _uptime() -> float:
    """Read where the job's script reads it: a container may have a /proc/uptime of its own, and no clock like it."""
    return float(Path("/proc/uptime").read_text("ascii").split()[0])
