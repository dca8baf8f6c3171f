"""Ends this process if the event loop hangs: `loop_watcher`, `watched_loop` and the program that watches.

An event loop that is blocked by a hanging file system, a lock or a C function cannot handle a signal. So another
process, the watcher, gets a byte from the loop every second through a pipe. After HUNG_S without a byte the watcher
makes this process write the stacks of all threads to stderr, and sends SIGKILL. `train --supervise` treats this end
as a failure, and starts the run again.

The watcher also watches the closing of the loop, which waits for the loop's threads. `bounded` limits the time of a
block that reads files in a thread, or before a loop exists.

Time in which the watched process is stopped (SIGSTOP, `scontrol suspend`) does not count. Time in which the watcher
is stopped does not count either, because the watcher counts waits of one second.
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
"""Seconds without a byte from the loop after which the process is killed. A restart costs about as much time."""
STACKS_SIGNAL = signal.SIGUSR2
_BEAT_S = 1.0
_STACKS_S = 5.0
"""Seconds between the signal to write the stacks and SIGKILL. stderr may be on the hanging file system."""


class LoopLag:
    """Measures how late the event loop resumes a task that sleeps for one second at a time."""

    def __init__(self) -> None:
        self._longest = 0.0

    def take(self) -> float:
        """The longest delay since the last call (s)."""
        longest = self._longest
        self._longest = 0.0
        return longest

    async def beat(self, pipe: int) -> None:
        """Write a byte to `pipe` every second, until cancelled or until the watcher has ended."""
        clock = asyncio.get_running_loop().time
        while True:
            begin = clock()
            try:
                os.write(pipe, b".")
            except BlockingIOError:
                # The pipe is full, because the watcher is stopped.
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
    """If the block takes longer than HUNG_S, print the stacks of all threads and end the process with exit code 1."""
    faulthandler.dump_traceback_later(HUNG_S, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def loop_watcher() -> Iterator[int]:
    """Run the watcher during the block, which runs an event loop in this main thread. Raises OSError.

    The value is the pipe for `watched_loop`."""
    faulthandler.register(STACKS_SIGNAL, file=2)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    words = [sys.executable, "-m", __name__, str(reader), str(HUNG_S)]
    # In a new session the watcher gets no signals of the terminal, such as SIGINT.
    with subprocess.Popen(tied_command(words), pass_fds=[reader], start_new_session=True) as watcher:
        os.close(reader)
        try:
            yield writer
        finally:
            watcher.kill()
            os.close(writer)


@contextlib.asynccontextmanager
async def watched_loop(pipe: int) -> AsyncIterator[LoopLag]:
    """Let this event loop send the watcher a byte every second during the block. The value has the lag."""
    lag = LoopLag()
    beats = asyncio.create_task(lag.beat(pipe), name="loop watch")
    try:
        yield lag
    finally:
        await cancelled(beats)


def main() -> None:
    """The watcher: watch this process's parent. Arguments: file descriptor of the pipe, time limit in seconds."""
    pipe, limit = map(int, sys.argv[1:])
    watched = os.getppid()
    silent = 0
    while silent < limit:
        if select.select([pipe], [], [], _BEAT_S)[0]:
            silent = 0
            os.read(pipe, select.PIPE_BUF)
        # State T: the process is stopped, and the time does not count. The state t, under a debugger, counts.
        elif b") T " not in Path(f"/proc/{watched}/stat").read_bytes():
            silent += 1
    line = f"megatron-scalerl: the event loop stood still for {limit} s; the process is killed; stacks of threads:\n"
    # A thread writes, because a write to stderr may block forever.
    threading.Thread(target=os.write, args=(2, line.encode()), daemon=True).start()
    time.sleep(_BEAT_S)
    os.kill(watched, STACKS_SIGNAL)
    time.sleep(_STACKS_S)
    os.kill(watched, signal.SIGKILL)


if __name__ == "__main__":
    main()
