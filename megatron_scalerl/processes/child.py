"""Start a program that dies with its parent: `python -m megatron_scalerl.processes.child PARENT_PID PROGRAM ...`

The kernel's parent-death signal (Linux, PR_SET_PDEATHSIG) is set before the program is executed, so no import
of the program comes first, and it stays set over exec. It is SIGKILL: a program that hangs dies too. The kernel
ties it to the thread that started the process, which must therefore be one that lives as long as its process;
and it clears it in a forked child, which is what `tie_forked_children` is for.

This module imports nothing outside the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_forking_pid = 0


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; if that has happened already, exit at once.

    parent_pid: process id of the parent as it knows itself. Does nothing on systems other than Linux.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent_pid:  # it ended before the signal was set
        os._exit(1)


def tie_forked_children() -> None:
    """From now on, whatever this process forks dies with it, and so do the forked children's own ones."""
    os.register_at_fork(before=_remember_parent, after_in_child=_die_with_forking_process)


def _remember_parent() -> None:
    global _forking_pid
    _forking_pid = os.getpid()


def _die_with_forking_process() -> None:
    die_with_parent(_forking_pid)


def command(argv: list[str]) -> list[str]:
    """`argv` as a command line that dies with this process."""
    return [sys.executable, "-m", "megatron_scalerl.processes.child", str(os.getpid()), *argv]


def main() -> None:
    """Tie this process to the one that started it, and become the program."""
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
