"""What a program starts ends with it and with its parent, in a session of its own, too."""

import os
import signal
import subprocess
import sys

import pytest
from launch.stand_ins import environment, gone_processes, pids_in

from megatron_scalerl.processes.subreaper import END

PROGRAM = """
import os, subprocess, sys, time
code = "import os, subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
with open(sys.argv[1], "a") as file:
    print(os.getpid(), file=file, flush=True)
    subprocess.run([sys.executable, "-c", code], start_new_session=True, stdout=file)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(child.pid, os.getppid(), sep="\\n", file=file, flush=True)
    time.sleep(600)
"""
"""Starts a program in a session and an orphan in another one; its process id, theirs and its parent's are written."""
PARENT = """
import subprocess, sys
from megatron_scalerl.processes.subreaper import subreaper_command
subprocess.Popen(subreaper_command(sys.argv[1], sys.argv[2:]), start_new_session=True).wait()
"""


@pytest.mark.parametrize("how", ["parent", "program", "end"])
def test_nothing_outlives_a_program(how, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "pids")]
    argv = [sys.executable, "-c", PARENT, str(folder), *program]
    parent = subprocess.Popen(argv, env=environment(), start_new_session=True)
    pids = pids_in(tmp_path / "pids", 4)
    if how == "parent":
        os.killpg(parent.pid, signal.SIGKILL)
    elif how == "program":
        os.kill(pids[0], signal.SIGKILL)
    else:
        os.kill(pids[-1], END)
    assert gone_processes(pids)
    parent.wait()
    assert not folder.exists()
