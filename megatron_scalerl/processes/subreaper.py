"""Start a program. When the program or its parent ends, all descendants of the program are killed, in all sessions.

    python -m megatron_scalerl.processes.subreaper PARENT_PID FOLDER ARGV ...

This process, the subreaper, stands between parent and program. A descendant that loses its parent becomes a child of
the subreaper (Linux, PR_SET_CHILD_SUBREAPER). So the subreaper finds all descendants, kills all, removes the folder
FOLDER and exits. The subreaper must have a session of its own: a SIGKILL for the parent's process group would end the
subreaper and leave descendants running. If the subreaper gets SIGKILL, the program ends, but not the descendants.

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
"""Signal to the subreaper that ends the program and all descendants. No terminal can send SIGHUP to the session."""
_PR_SET_CHILD_SUBREAPER = 36


def subreaper_command(folder: str, argv: list[str]) -> list[str]:
    """A command line that runs `argv` under a subreaper, which ends with this process. The caller must start the
    command in a new session. folder: removed at the end."""
    return [sys.executable, "-m", "megatron_scalerl.processes.subreaper", str(os.getpid()), folder, *argv]


def _end(*_: object) -> None:
    # os.wait raises ChildProcessError when no child is left.
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in Path("/proc/thread-self/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            os.wait()
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Run the program until the end or the signal END, then end all descendants."""
    signal.signal(END, _end)
    set_process(_PR_SET_CHILD_SUBREAPER, 1)
    die_with_parent(int(sys.argv[1]), END)
    program = os.spawnv(os.P_NOWAIT, sys.executable, tied_command(sys.argv[3:]))
    while os.wait()[0] != program:
        pass
    _end()


if __name__ == "__main__":
    main()
