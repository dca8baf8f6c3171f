"""The end of this process when the event loop stands still: `loop_watcher`, `watched_loop` and the watching program.

A loop that waits for a file system that hangs, for a lock or for a C function answers no signal. So another process,
the watcher, gets a byte from the loop every second, through a pipe, which no file system holds up. After HUNG_S
without a byte the watcher has the stacks of all threads written to stderr, and sends SIGKILL. `train --supervise`
takes this for a failure, and starts the run again.

The watch lasts until the loop is closed, which waits for the loop's threads. `bounded` is for a block that reads in a
thread, or before there is a loop.

Time in which the watched process is stopped (SIGSTOP, `scontrol suspend`) does not count. Time in which the watcher
does not run does not count either, since the watcher counts waits of a second.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from megatron_scalerl.processes.child_process import cancelled
from megatron_scalerl.processes.parent_death import tied_command

logger = logging.getLogger(__name__)

HUNG_S = 300
"""Seconds without a byte from the loop after which the process is killed: about the cost of a restart."""
STACKS_SIGNAL = signal.SIGUSR2
_BEAT_S = 1.0
_STACKS_S = 5.0
"""Seconds in which the stacks have to be written. stderr may be a file of the file system that hangs."""


class LoopLag:
    """The delay with which the event loop came back to a task that waits for a second at a time."""

    def __init__(self) -> None:
        self._longest = 0.0

    def take(self) -> float:
        """The longest delay since the last call (s)."""
        longest = self._longest
        self._longest = 0.0
        return longest

    async def beat(self, pipe: int) -> None:
        """Write a byte to `pipe` every second, until cancelled, or until nobody reads the pipe."""
        clock = asyncio.get_running_loop().time
        while True:
            begin = clock()
            try:
                os.write(pipe, b".")
            except BlockingIOError:
                # The pipe's reader is stopped.
                pass
            except BrokenPipeError:
                logger.warning(
                    "the process that watches the event loop has ended; a run whose loop hangs is no longer killed"
                )
                return
            await asyncio.sleep(_BEAT_S)
            self._longest = max(self._longest, clock() - begin - _BEAT_S)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """A block that ends the process with exit code 1 and the stacks of all threads if the block exceeds HUNG_S."""
    faulthandler.dump_traceback_later(HUNG_S, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def loop_watcher() -> Iterator[int]:
    """A block around an event loop in this main thread. The value is the pipe for `watched_loop`. Raises OSError."""
    faulthandler.register(STACKS_SIGNAL, file=2)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    words = [sys.executable, "-m", __name__, str(reader), str(HUNG_S)]
    # The watcher is in another session, so that the signals that a terminal sends to the run do not stop the watcher.
    with subprocess.Popen(tied_command(words), pass_fds=[reader], start_new_session=True) as watcher:
        os.close(reader)
        try:
            yield writer
        finally:
            watcher.kill()
            os.close(writer)


@contextlib.asynccontextmanager
async def watched_loop(pipe: int) -> AsyncIterator[LoopLag]:
    """A block in which this event loop sends the watcher a sign of life every second."""
    lag = LoopLag()
    beats = asyncio.create_task(lag.beat(pipe), name="loop watch")
    try:
        yield lag
    finally:
        await cancelled(beats)


def main() -> None:
    """Watch the parent of this process: argv has the pipe's descriptor and the limit in seconds."""
    pipe, limit = map(int, sys.argv[1:])
    watched = os.getppid()
    silent = 0
    while silent < limit:
        if select.select([pipe], [], [], _BEAT_S)[0]:
            silent = 0
            os.read(pipe, select.PIPE_BUF)
        # State T means that the process is stopped. Under a tracer the state is t, and the time counts.
        elif b") T " not in Path(f"/proc/{watched}/stat").read_bytes():
            silent += 1
    line = f"megatron-scalerl: the event loop stood still for {limit} s; the process is killed; stacks of threads:\n"
    # The write is in a thread, because a write to stderr may wait for ever.
    threading.Thread(target=os.write, args=(2, line.encode()), daemon=True).start()
    time.sleep(_BEAT_S)
    os.kill(watched, STACKS_SIGNAL)
    time.sleep(_STACKS_S)
    os.kill(watched, signal.SIGKILL)


if __name__ == "__main__":
    main()
