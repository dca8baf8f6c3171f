"""Signals that end a run gracefully: the run's coroutine is cancelled, so that every context manager exits.

Life of a signal, in `run_until_signal`:

    first       SIGINT and SIGTERM cancel the coroutine at once, SIGUSR1 after a save of the run (`SaveAndExit`)
    later       each further SIGINT or SIGTERM kills all child processes, so that the cleanup waits for no child
    after       signals after the cleanup are ignored, and the process ends with the first signal's exit code. If the
                end takes longer than THREADS_S, the process prints the threads' stacks and ends with exit code 1

`Takeover` detects that Slurm has started a later attempt of the job while this attempt is still running, as on a node
that Slurm has lost contact with.

`uncharged_seconds` is the time for which a Slurm job has held its devices without a charge in the ledger. The
variable HELD_SINCE has the begin of this time in seconds of /proc/uptime, which setting the clock does not change.
The job's script sets the variable to the job's start. When `train --supervise` starts a program again, the variable
is set to the end of the previous program if that program has charged time to the ledger.
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
"""Exit code after SAVE_SIGNAL: the run is not finished, and the same command resumes the run."""
THREADS_S = 60.0
"""Time limit for the process to end after the cleanup (s). A thread that waits for a hanging file system would
otherwise keep the process from ending."""
IN_USE_CODE = 76
"""Exit code if another controller has locked the run's folder: the same command may succeed later."""
HOSTS_LEFT_CODE = 77
"""Exit code if Slurm has removed hosts of the trainer from the job: the run can go on in another allocation."""
ATTEMPT_FILE = Path("slurm", "attempt")
"""File in RUN/ to which the job script writes JOB.RESTART when an attempt begins."""
HELD_SINCE = "MSRL_HELD_SINCE"
"""Environment variable with the time from which the job has held devices without a charge (s of /proc/uptime)."""


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
    """Handles SAVE_SIGNAL, the request to save the run's state and to exit. Belongs to one event loop.

    While `run` is not in progress there is nothing to save, and a request cancels the coroutine of `run_until_signal`
    at once.
    """

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._idle = asyncio.Event()
        """Set while no block of `uninterrupted` is in progress."""
        self._idle.set()
        self._depth = 0
        """Number of blocks of `uninterrupted` in progress, nested blocks included."""
        self._deferred = False
        """True while `run` is in progress. `request` then leaves the cancellation to `run`, which saves first."""
        self.cancel: Callable[[], object] = lambda: None
        """Cancels the coroutine of `run_until_signal`, which sets this function."""

    @property
    def requested(self) -> bool:
        """True after `request`."""
        return self._requested.is_set()

    def request(self) -> None:
        """Ask the run to save and to exit. Further calls have no effect."""
        if self.requested:
            return
        self._requested.set()
        if not self._deferred:
            self.cancel()

    @contextlib.asynccontextmanager
    async def uninterrupted(self) -> AsyncIterator[None]:
        """Keep a request from interrupting the block, which is a part of the work of `run`. Blocks may be nested.

        After a request no new block is entered: code that would enter a block waits until `run` cancels the work.
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
        """Run `work` and return the result; `save` is awaited if a request interrupts the work.

        A request cancels `work` once no block of `uninterrupted` is in progress, awaits `save`, and cancels the
        coroutine of `run_until_signal`.
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
                if task.cancelled():  # else the work has ended by itself and needs no save
                    await save()
            return task.result()
        finally:
            self._deferred = False
            if self.requested:
                self.cancel()
            await cancelled(task, request)


def exit_code_of(number: int) -> int:
    """Exit code of a run that ended by the signal `number`."""
    if number == SAVE_SIGNAL:
        return SAVED_CODE
    return 128 + number


def run_until_signal(
    coroutine: Coroutine[Any, Any, T],
    saving: SaveAndExit | None = None,
    consequence: Callable[[], str] = lambda: "starts again",
) -> T:
    """Run `coroutine` on a new event loop of the main thread and return the result.

    The first SIGINT or SIGTERM cancels the coroutine, and Stopped is raised once the coroutine has ended. For later
    signals see the module. saving: handles SAVE_SIGNAL; None to leave the action of SAVE_SIGNAL unchanged.
    consequence: returns the argument `consequence` of Stopped.
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
        faulthandler.cancel_dump_traceback_later()  # the coroutine has returned despite a signal
        return result
    except asyncio.CancelledError:
        # The coroutine was cancelled, but not by a signal.
        if (number := stopped_by()) is None:
            raise
        raise Stopped(number, consequence()) from None
    except Exception as error:
        if not received:
            raise
        raise Stopped(received[0], consequence(), error) from error


def _handle_late(loop: asyncio.AbstractEventLoop, numbers: Sequence[int], *, stopped: bool) -> None:
    """Remove the signal handlers of a loop. stopped: True to ignore further signals and to end within THREADS_S."""
    # Signals are blocked, since remove_signal_handler restores the default action, which would end the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        loop.remove_signal_handler(number)
        if stopped:
            signal.signal(number, signal.SIG_IGN)
    if stopped:
        faulthandler.dump_traceback_later(THREADS_S, exit=True, file=2)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


class Takeover:
    """Detects that the Slurm job has begun another attempt since this object was made. Without Slurm, never."""

    def __init__(self, run_dir: str | Path):
        self._file = Path(run_dir) / ATTEMPT_FILE
        self._attempt = self._read()

    @property
    def happened(self) -> bool:
        """True if the attempt in ATTEMPT_FILE has changed since the start; False if the file cannot be read."""
        return self._read() not in (None, self._attempt)

    def _read(self) -> str | None:
        try:
            return self._file.read_text(encoding="utf8").strip() or None
        except (OSError, UnicodeDecodeError):
            return None


def uncharged_seconds() -> float:
    """Seconds for which this Slurm job has held devices without a charge in the ledger; 0 outside of a job."""
    try:
        since = float(os.environ.get(HELD_SINCE, "inf"))
    except ValueError:
        return 0.0
    return max(0.0, _uptime() - since)


def uncharged_from_now() -> dict[str, str]:
    """Environment for a program that starts after a charge: HELD_SINCE, set to now; empty outside of a job."""
    if HELD_SINCE not in os.environ:
        return {}
    return {HELD_SINCE: f"{_uptime():.2f}"}


def _uptime() -> float:
    """Seconds since the host has started."""
    # /proc/uptime is read, as in the job's script: in a container this file may differ from the host's clocks.
    return float(Path("/proc/uptime").read_text("ascii").split()[0])
