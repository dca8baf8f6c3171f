"""Stand-ins for the processes of a run: they start quickly and run until they are killed."""

import os
import sys
import time
from pathlib import Path

import psutil
from own_processes import own_processes

ROOT = Path(__file__).parent.parent.parent

STAND_IN_CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    signal.pause()
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
while True:
    time.sleep(60)
"""
"""Ignores SIGTERM, as does its own child; argument: the file to append its process id to."""


def stand_in(pids):
    """The command line of a stand-in child that appends its process id to the file `pids`."""
    return [sys.executable, "-c", STAND_IN_CHILD, str(pids)]


def environment(**more):
    """The environment of a controller in these tests."""
    folders = (ROOT, ROOT / "tests", ROOT / "tests" / "launch")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **more}


def pids_in(path, count):
    """Wait until `count` process ids are written, and return them."""
    until = time.monotonic() + 240
    while time.monotonic() < until:
        found = path.read_text().split() if path.exists() else []
        if len(found) >= count:
            return [int(pid) for pid in found]
        time.sleep(0.02)
    raise AssertionError(f"expected {count} process ids in {path} within 240 s")


def alive(groups):
    """Processes that run in one of these process groups."""
    return [process.pid for process in own_processes(lambda process: os.getpgid(process.pid) in groups)]


def gone(groups, timeout_s=240.0):
    """True once no process of these groups is left; otherwise the remaining ones are printed."""
    return none_left(lambda: alive(groups), timeout_s)


def gone_processes(pids):
    """True once none of these processes runs; otherwise the remaining ones are printed."""
    return none_left(lambda: [pid for pid in pids if runs(pid)], 240)


def runs(pid):
    """True for a process that is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def none_left(look, timeout_s):
    """True once `look()` finds no process; it looks once more after the limit, which this process may have slept."""
    until, late = time.monotonic() + timeout_s, False
    while left := look():
        if late:
            print("still alive:", [process.cmdline() for process in own_processes(lambda p: p.pid in left)])
            return False
        late = time.monotonic() > until
        time.sleep(0.02)
    return True
