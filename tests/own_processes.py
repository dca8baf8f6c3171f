"""The processes below this one. A test looks at no others: this machine may run the same test for somebody else."""

import ctypes
import os
from collections.abc import Callable

import psutil


def adopt_orphans() -> None:
    """An orphan's parent becomes this process, so that none hides behind a parent that has ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0):  # PR_SET_CHILD_SUBREAPER
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def own_processes(chosen: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Those that run, no zombies, for which `chosen` is true."""

    def runs(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and chosen(process)
        except (psutil.NoSuchProcess, ProcessLookupError):  # it has ended
            return False

    return [process for process in psutil.Process().children(recursive=True) if runs(process)]


def sandboxes() -> set[int]:
    """Those of the verifier `code`."""
    found = own_processes(lambda process: any("sandbox" in w or "program.py" in w for w in process.cmdline()))
    return {process.pid for process in found} - {os.getpid()}
