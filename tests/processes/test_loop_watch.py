"""A process whose event loop stands still is ended, with its stacks; one that is stopped, or well, is not."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from launch.stand_ins import environment

PROGRAM = """
import asyncio, ctypes, os, sys, threading, time
from megatron_scalerl.processes import loop_watch
loop_watch.HUNG_S = 3

def hang_in_c():
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # keeps the interpreter's lock, and answers no signal

def hang_in_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def hang_busy():
    while True:
        pass

def hang_in_a_write():
    reader, writer = os.pipe()
    while True:
        os.write(writer, bytes(4096))

async def main(how):
    async with loop_watch.watched_loop() as lag:
        print("begun", flush=True)
        if how == "late":
            await asyncio.sleep(0.2)
            time.sleep(2)
            await asyncio.sleep(1.5)
            print(f"lag {lag.take():.1f} {lag.take():.1f}", flush=True)
        elif how == "well":
            await asyncio.sleep(6)
        else:
            globals()[how]()

asyncio.run(main(sys.argv[1]))
print("ended", flush=True)
"""


def started(how):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("how", ["hang_in_c", "hang_in_a_lock", "hang_busy", "hang_in_a_write"])
def test_a_loop_that_stands_still_is_ended_with_its_stacks(how):
    process = started(how)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (-signal.SIGKILL, "begun\n")
    assert err.startswith(
        "megatron-scalerl: the event loop stood still for 3 s: its process is killed; its stacks:\n"
    )
    assert f"in {how}\n" in err and "in main\n" in err


def test_a_process_that_is_stopped_is_not_ended():
    process = started("well")
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(8)  # of the limit of 3 s; the watch would send SIGKILL after 9 s
    [watcher] = psutil.Process(process.pid).children()
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out, err) == (0, "ended\n", "")
    assert not watcher.is_running()


def test_the_lag_is_what_the_loop_came_late_by():
    process = started("late")
    out, err = process.communicate(timeout=240)
    begun, lag, ended = out.splitlines()
    longest, rest = map(float, lag.removeprefix("lag ").split())
    assert (begun, ended, err) == ("begun", "ended", "")
    assert longest >= 1.0 and rest == 0


def test_a_run_goes_on_without_its_watch():
    process = started("well")
    assert process.stdout.readline() == "begun\n"
    [watcher] = psutil.Process(process.pid).children()
    os.kill(watcher.pid, signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (0, "ended\n")
    assert "nothing ends a loop that hangs" in err
