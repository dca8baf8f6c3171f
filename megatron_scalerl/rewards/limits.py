"""Applies the resource limits of one check inside the worker process: processor time, memory and files (Linux).

An answer whose check exceeds a limit is wrong. The pool tells from the end of the check which limit was exceeded:

    processor time  a timer (ITIMER_PROF, exact, starts again for every check) ends the process by SIGPROF
    memory          an allocation fails: Python raises MemoryError, a C library aborts (SIGABRT)
    files           writing fails with OSError, an error of the verifier

The number of processes (RLIMIT_NPROC) is not limited: the kernel would count all processes and threads of the user,
trainer and engines included, so no number fits. The limits are no sandbox: a verifier has the rights of the user.
"""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_scalerl.record import record

OPEN_FILES = 256
"""Largest number of open files of a worker."""
MIB = 2**20


class VerifierUnavailable(RuntimeError):
    """A check could not be made, through no fault of the answer, for example because a judge does not answer."""


class TimeLimitExceeded(Exception):
    """Raised by a verifier that measures time itself: the answer exceeded the limit, and is wrong (`timeout`)."""


@record
class Limits:
    """The limits of one check, from the recipe's `rewards`."""

    cpu_s: float
    """Processor time (s) that the check may use in all threads of the worker, child processes not counted."""
    memory_mb: int | None
    """Address space (MiB) by which the worker's address space may grow during the check; None: no limit."""
    file_mb: int
    """Largest size of each written file (MiB)."""


def address_space() -> int:
    """Address space of this process in bytes."""
    pages, *_ = Path("/proc/self/statm").read_text().split()
    return int(pages) * resource.getpagesize()


def limit_process(limits: Limits) -> None:
    """Set the limits that hold as long as the worker lives: no core dumps, small files, few open files."""
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_FSIZE, limits.file_mb * MIB)
    lower(resource.RLIMIT_NOFILE, OPEN_FILES)


@contextmanager
def limited_check(limits: Limits) -> Iterator[None]:
    """Context in which processor time and memory of this process are limited."""
    memory = limits.memory_mb
    if memory is not None:
        lower(resource.RLIMIT_AS, address_space() + memory * MIB, soft_only=True)
    # the default action of SIGPROF ends the process at once; a handler in Python would run only after a call in C
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
    """Set a limit of this process to `value`, or to the hard limit of the host if lower."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, hard if soft_only else value))
