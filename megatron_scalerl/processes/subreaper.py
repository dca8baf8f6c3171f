"""Start a program; when program or parent ends, all descendants of the program end, in whatever session.

    python -m megatron_scalerl.processes.subreaper PARENT_PID FOLDER ARGV ...

This process, the subreaper, stands between parent and program. A descendant that loses its parent becomes a child of
the subreaper (Linux, PR_SET_CHILD_SUBREAPER), which thus finds all descendants, kills all, removes the program's
folder and exits. The subreaper leads a session, as a SIGKILL of the parent's group would leave the descendants
running. SIGKILL of the subreaper alone ends the program, and nothing that the program has started.

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
"""Signal that ends the program and all descendants. The session has no terminal that would send SIGHUP."""
_PR_SET_CHILD_SUBREAPER = 36


def subreaper_command(folder: str, argv: list[str]) -> list[str]:
    """`argv` as the command line of a new session, which ends with this process."""
    return [sys.executable, "-m", "megatron_scalerl.processes.subreaper", str(os.getpid()), folder, *argv]


def _end(*_: object) -> None:
    # The loop ends when no child is left.
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in Path("/proc/thread-self/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            os.wait()
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Run the program until the program ends or END comes."""
    signal.signal(END, _end)
    set_process(_PR_SET_CHILD_SUBREAPER, 1)
    die_with_parent(int(sys.argv[1]), END)
    program = os.spawnv(os.P_NOWAIT, sys.executable, tied_command(sys.argv[3:]))
    while os.wait()[0] != program:
        pass
    _end()


if __name__ == "__main__":
    main()
