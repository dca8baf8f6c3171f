"""Applies the resource limits of one check inside the worker process: processor time, memory and files (Linux).

A check that exceeds a limit makes the answer wrong, so the pool must be able to tell the limits apart:

    processor time  a timer (ITIMER_PROF, exact, starts at 0 for every check) ends the process by SIGPROF
    memory          an allocation fails: Python raises MemoryError, a C library aborts (SIGABRT)
    files           writing fails with OSError, an error of the verifier

The number of processes (RLIMIT_NPROC) is not limited: the kernel would count all processes and threads of the user,
including trainer and engines, so no limit would be right. The limits are no sandbox: a verifier runs with the user's
rights.
"""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_scalerl.record import record

OPEN_FILES = 256
"""Most open files of a worker."""
MIB = 2**20


class VerifierUnavailable(RuntimeError):
    """A check could not be made, through no fault of the answer, so the answer gets no score."""


class TimeLimitExceeded(Exception):
    """An answer exceeded a time limit that the verifier measures, and is wrong with the reason `timeout`."""


@record
class Limits:
    """The limits of one check, from the recipe's `rewards`."""

    cpu_s: float
    """Processor seconds of the worker with all threads, without child processes."""
    memory_mb: int | None
    """Address space that the check may add to the worker's at the start of the check (MiB); None: no limit."""
    file_mb: int
    """Size in MiB of each written file."""


def address_space() -> int:
    """Address space of this process in bytes."""
    pages, *_ = Path("/proc/self/statm").read_text().split()
    return int(pages) * resource.getpagesize()


def limit_process(limits: Limits) -> None:
    """Apply the limits for the lifetime of the worker: no core dumps, small files, few open files."""
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_FSIZE, limits.file_mb * MIB)
    lower(resource.RLIMIT_NOFILE, OPEN_FILES)


@contextmanager
def limited_check(limits: Limits) -> Iterator[None]:
    """Limit processor time and memory inside the block."""
    memory = limits.memory_mb
    if memory is not None:
        lower(resource.RLIMIT_AS, address_space() + memory * MIB, soft_only=True)
    # the default action ends the process at once: a handler in Python would wait for the end of a long call in C
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if memory is not None:
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def lower(kind: int, value: int, *, soft_only: bool = False) -> None:
    """Set a limit, never above the hard limit, which the host may have set lower."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, hard if soft_only else value))
