"""Stand-ins for the processes of a run: they start quickly and run until they are killed."""

import os
import sys

import psutil
from own_processes import own_processes
from programs import ROOT
from waiting import wait_until

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
    folders = (ROOT, ROOT / "tests", ROOT / "tests/launch")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **more}


def pids_in(path, count):
    """Wait until `count` process ids are written, and return them."""

    def written():
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    wait_until(lambda: len(written()) >= count)
    return written()


def alive(groups):
    """Processes that run in one of these process groups."""
    return [process.pid for process in own_processes(lambda process: os.getpgid(process.pid) in groups)]


def gone(groups):
    """True once no process of these groups is left."""
    return wait_until(lambda: not alive(groups))


def gone_processes(pids):
    """True once none of these processes runs."""
    return wait_until(lambda: not any(map(runs, pids)))


def runs(pid):
    """True for a process that is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
