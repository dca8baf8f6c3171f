"""Start a program that dies with its parent: `python -m megatron_scalerl.processes.parent_death PARENT_PID ARGV ...`

The kernel's parent-death signal (Linux, PR_SET_PDEATHSIG) is set before exec and stays set after exec, so that the
program is covered from the first import on. The signal is SIGKILL, which also ends a program that hangs. The kernel
sends the signal when the thread that started the process ends, so this thread must live as long as the child. Forked
children do not inherit the setting; `tie_forked_children` is for forked children.

This module imports only the standard library.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_forking_pid = 0


def die_with_parent(parent_pid: int, sig: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent exits. If the parent has exited already, the signal
    comes at once.

    parent_pid: process id of the parent. Does nothing on systems other than Linux. Raises OSError.
    """
    set_process(_PR_SET_PDEATHSIG, sig)
    # The parent may have exited before the signal was set.
    if os.getppid() != parent_pid and sys.platform == "linux":
        signal.raise_signal(sig)


def hide_memory() -> None:
    """Hide this process's memory and environment in /proc from the user's other processes. Raises OSError.

    The process also leaves no core dump, and only root can attach a debugger. A program that this process executes
    is visible again.
    """
    set_process(_PR_SET_DUMPABLE, 0)


def set_process(option: int, value: int) -> None:
    """Set an option of this process by Linux's prctl, which Python lacks. Does nothing on systems other than Linux.

    Raises OSError if prctl fails.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(option, value) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def tie_forked_children() -> None:
    """Let every process that is forked from now on die with the process that forked, also in forked children."""
    os.register_at_fork(before=_remember_parent, after_in_child=lambda: die_with_parent(_forking_pid))


def _remember_parent() -> None:
    global _forking_pid
    _forking_pid = os.getpid()


def tied_command(argv: list[str]) -> list[str]:
    """A command line that runs `argv` in a process that dies with this process."""
    return [sys.executable, "-m", "megatron_scalerl.processes.parent_death", str(os.getpid()), *argv]


def main() -> None:
    """Tie this process to the parent, then exec the program."""
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
