"""Signals that end a run gracefully: the run's coroutine is cancelled, so that every context manager exits.

Life of a signal, in `run_until_signal`:

    first       SIGINT and SIGTERM cancel the coroutine at once, SIGUSR1 once its state is saved (`SaveAndExit`)
    later       each later signal kills all child processes, so that the cleanup waits for no child
    after       a signal after the cleanup is ignored: Python ends with the first signal's code. If Python waits for
                a thread for THREADS_S, the process ends with exit code 1 and the stacks of the threads

`Takeover` detects a later attempt of the run's job, which began while this attempt still lives, on a node that Slurm
has lost.

`uncharged_seconds` is the time for which a Slurm job has held its devices without a charge in the ledger. The
variable HELD_SINCE has the begin of this time in seconds of /proc/uptime, which no change of the time of day moves.
The job's script sets the variable to the job's start. When `train --supervise` starts a program again, the variable
becomes the end of the program before, if that program has charged anything.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron_scalerl.processes.child_process import cancelled, kill_all

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVE_SIGNAL = signal.SIGUSR1
SAVED_CODE = 75
"""Exit code after SAVE_SIGNAL: the run is not finished, and the same command goes on with the run."""
THREADS_S = 60.0
"""Seconds for the process to end after the cleanup; a thread that reads a hanging file system would delay the end."""
IN_USE_CODE = 76
"""Exit code where another controller has the run's folder: the same command may succeed later."""
HOSTS_LEFT_CODE = 77
"""Exit code where Slurm has taken hosts of the trainer out of the job: the run can go on in another allocation."""
ATTEMPT_FILE = Path("slurm", "attempt")
"""File in RUN/ to which the job script writes JOB.RESTART when an attempt begins."""
HELD_SINCE = "MSRL_HELD_SINCE"
"""Variable with the time from which a job holds devices uncharged (seconds of /proc/uptime)."""


class Stopped(Exception):
    """A signal stopped the run. `exit_code`: 130 for SIGINT, 143 for SIGTERM, SAVED_CODE for SAVE_SIGNAL.

    consequence: effect of starting the same command again, as the predicate of a sentence.
    """

    def __init__(self, number: int, consequence: str, also: BaseException | None = None):
        name = signal.Signals(number).name
        detail = "" if also is None else f" (while stopping, {type(also).__name__}: {also})"
        super().__init__(f"stopped by {name}; the same command {consequence}{detail}")
        self.exit_code = exit_code_of(number)


class SaveAndExit:
    """The request of SAVE_SIGNAL to save the run's state and to exit; belongs to one event loop.

    While no `run` is in progress there is nothing to save, and the run is cancelled at once.
    """

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._idle = asyncio.Event()
        """Set while no block of `uninterrupted` is in progress."""
        self._idle.set()
        self._depth = 0
        """Blocks of `uninterrupted` in progress, nested blocks included."""
        self._deferred = False
        """Whether `run` is in progress, and cancels the run after the save."""
        self.cancel: Callable[[], object] = lambda: None
        """Cancels the whole run; set by `run_until_signal`."""

    @property
    def requested(self) -> bool:
        """True after `request`."""
        return self._requested.is_set()

    def request(self) -> None:
        """Ask the run to save and to exit; further calls change nothing."""
        if self.requested:
            return
        self._requested.set()
        if not self._deferred:
            self.cancel()

    @contextlib.asynccontextmanager
    async def uninterrupted(self) -> AsyncIterator[None]:
        """A block of the work of `run` that a request does not interrupt; blocks may be nested.

        After a request no further block is entered: the caller waits until `run` cancels the caller.
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
        """Run `work` and return the result, even if a request to save comes before the end of the work.

        A request cancels `work` outside of every block of `uninterrupted`, awaits `save`, and cancels the run.
        """
        self._deferred = True
        task = asyncio.ensure_future(work)
        request = asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait({task, request}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self._idle.wait()
                task.cancel()
                await asyncio.wait({task})
                if task.cancelled():  # otherwise the work is done, and has saved or failed
                    await save()
            return task.result()
        finally:
            self._deferred = False
            if self.requested:
                self.cancel()
            await cancelled(task, request)


def exit_code_of(number: int) -> int:
    """Exit code of a run that this signal ended."""
    if number == SAVE_SIGNAL:
        return SAVED_CODE
    return 128 + number


def run_until_signal(
    coroutine: Coroutine[Any, Any, T],
    saving: SaveAndExit | None = None,
    consequence: Callable[[], str] = lambda: "starts again",
) -> T:
    """Run `coroutine` on a new event loop of the main thread and return the result.

    The first SIGINT or SIGTERM cancels the coroutine; Stopped is raised once the coroutine has returned. The module
    describes later signals. saving: gets the requests of SAVE_SIGNAL, whose action does not change if this is None.
    consequence: gives the consequence for `Stopped`.
    """
    received: list[int] = []
    numbers = list(SIGNALS)
    if saving is not None:
        numbers.append(SAVE_SIGNAL)

    def stopped_by() -> int | None:
        if received:
            return received[0]
        if saving is not None and saving.requested:
            return SAVE_SIGNAL
        return None

    async def guarded() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
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
            _handle_late(loop, numbers, stopped=stopped_by() is not None)

    try:
        result = asyncio.run(guarded())
        faulthandler.cancel_dump_traceback_later()  # a signal came too late for a stop: the caller has work to do
        return result
    except asyncio.CancelledError:
        # Without a signal, somebody else has cancelled the coroutine.
        if (number := stopped_by()) is None:
            raise
        raise Stopped(number, consequence()) from None
    except Exception as error:
        if not received:
            raise
        raise Stopped(received[0], consequence(), error) from error


def _handle_late(loop: asyncio.AbstractEventLoop, numbers: Sequence[int], *, stopped: bool) -> None:
    """Remove signal handlers from a loop. After a first signal, ignore later signals and limit the time left."""
    # asyncio restores the default action, which would end the process, before another action can be set.
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        loop.remove_signal_handler(number)
        if stopped:
            signal.signal(number, signal.SIG_IGN)
    if stopped:
        faulthandler.dump_traceback_later(THREADS_S, exit=True, file=2)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


class Takeover:
    """Detects a Slurm attempt that began after this object was made. Without Slurm, no attempt is detected."""

    def __init__(self, run_dir: str | Path):
        self._file = Path(run_dir) / ATTEMPT_FILE
        self._attempt = self._read()

    @property
    def happened(self) -> bool:
        """True once the file names another attempt; False while the file cannot be read."""
        return self._read() not in (None, self._attempt)

    def _read(self) -> str | None:
        try:
            return self._file.read_text(encoding="utf8").strip() or None
        except (OSError, UnicodeDecodeError):
            return None


def uncharged_seconds() -> float:
    """Seconds for which this job has held devices uncharged; 0 outside of a job."""
    try:
        since = float(os.environ.get(HELD_SINCE, "inf"))
    except ValueError:
        return 0.0
    return max(0.0, _uptime() - since)


def uncharged_from_now() -> dict[str, str]:
    """HELD_SINCE, set to now, for a program that starts after a charge for this job; empty outside of a job."""
    if HELD_SINCE not in os.environ:
        return {}
    return {HELD_SINCE: f"{_uptime():.2f}"}


def _uptime() -> float:
    """Seconds since the host has started."""
    # The job's script reads the same file, which in a container may differ from every clock of the host.
    return float(Path("/proc/uptime").read_text("ascii").split()[0])
