"""The processes below this one. A test looks at no others: this machine may run the same test for somebody else."""

import os

import psutil

from megatron_scalerl.processes.parent_death import set_process


def adopt_orphans():
    """An orphan's parent becomes this process, so that none hides behind a parent that has ended."""
    set_process(36, 1)  # PR_SET_CHILD_SUBREAPER


def own_processes(chosen):
    """Those that run, no zombies, for which `chosen` is true."""

    def runs(process):
        try:
            return process.status() != psutil.STATUS_ZOMBIE and chosen(process)
        except (psutil.NoSuchProcess, ProcessLookupError):  # it has ended
            return False

    return [process for process in psutil.Process().children(recursive=True) if runs(process)]


def sandboxes():
    """Those of the verifier `code`."""
    found = own_processes(lambda process: any("sandbox" in w or "program.py" in w for w in process.cmdline()))
    return {process.pid for process in found} - {os.getpid()}
