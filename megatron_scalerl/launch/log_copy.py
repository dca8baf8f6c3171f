"""Copies the output of a child process to a descriptor of this process, its stdout, and keeps the end of it.

A thread does it: where that leads to another host and that does not read, it is the thread that blocks, and with it
the child, but not the event loop of this process.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_BLOCK_BYTES = 1 << 16
_KEPT_BYTES = 20_000
_LINES = 15
_END_S = 5.0
"""Seconds for the last output to arrive, once the process has exited: one of its own children may hold the pipe."""


class LogCopy:
    """One pipe whose read end is copied. Produced by `log_copy`."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: where the output is copied to."""
        self._descriptor = descriptor
        self._read, self.write = os.pipe()
        """Descriptor that the child process writes to."""
        self._end = b""
        self._thread = threading.Thread(target=self._copy, name="log-copy", daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """The last lines, as text. Waits for the rest of the output, up to some seconds; the child has exited."""
        self.close()
        self._thread.join(_END_S)
        return "\n".join(self._end.decode(errors="replace").splitlines()[-_LINES:])

    def close(self) -> None:
        """Close this process's write end; the copying ends when the child's are closed too. May be called twice."""
        if self.write >= 0:
            os.close(self.write)
            self.write = -1

    def _copy(self) -> None:
        taken = True
        while block := os.read(self._read, _BLOCK_BYTES):
            self._end = (self._end + block)[-_KEPT_BYTES:]
            if taken:
                taken = _written(self._descriptor, block)
        os.close(self._read)


def _written(descriptor: int, block: bytes) -> bool:
    """Write a block; False if nobody reads any more."""
    left = memoryview(block)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:  # the reader is gone, or its disk is full: the end is kept all the same
        return False
    return True


@contextlib.contextmanager
def log_copy(descriptor: int) -> Iterator[LogCopy]:
    """A copy to `descriptor`."""
    copy = LogCopy(descriptor)
    try:
        yield copy
    finally:
        copy.close()
