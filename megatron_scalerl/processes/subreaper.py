"""Start a program whose end, or that of its parent, ends all that it has started, in sessions of their own, too.

    python -m megatron_scalerl.processes.subreaper PARENT_PID FOLDER ARGV ...

This process stands between the two. A descendant that loses its parent becomes its child (Linux,
PR_SET_CHILD_SUBREAPER), so that it finds all of them: it kills them, removes the program's folder and exits. It leads
a session, as a SIGKILL of its group would leave them running. SIGKILL of this process alone ends the program, and
nothing that the program has started.

This module imports only the standard library and `parent_death`.
"""

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

from megatron_scalerl.processes.parent_death import die_with_parent, set_process, tied_command

END = signal.SIGHUP
"""Ends the program and its descendants. The session has no terminal that would send it."""
_PR_SET_CHILD_SUBREAPER = 36


def subreaper_command(folder: str, argv: list[str]) -> list[str]:
    """`argv` as the command line of a new session, which ends with this process."""
    return [sys.executable, "-m", "megatron_scalerl.processes.subreaper", str(os.getpid()), folder, *argv]


def _end(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):  # until there is no child left
        while True:
            for child in Path("/proc/thread-self/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            os.wait()
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Run the program until it ends or END comes."""
    signal.signal(END, _end)
    set_process(_PR_SET_CHILD_SUBREAPER, 1)
    die_with_parent(int(sys.argv[1]), END)
    program = os.spawnv(os.P_NOWAIT, sys.executable, tied_command(sys.argv[3:]))
    while os.wait()[0] != program:
        pass
    _end()


if __name__ == "__main__":
    main()
