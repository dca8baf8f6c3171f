"""A process whose event loop stands still is ended, with its stacks; one that is stopped, or well, is not."""

import os
import signal
import subprocess
import sys

import psutil
from launch.stand_ins import environment
from waiting import wait_until

PROGRAM = """
import asyncio, ctypes, os, sys, time
from megatron_scalerl.processes import loop_watch
loop_watch.HUNG_S = 3

def hang_in_c():
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # keeps the interpreter's lock, and answers no signal

def hang_in_a_write():
    reader, writer = os.pipe()
    while True:
        os.write(writer, bytes(4096))

async def main(how, pipe):
    async with loop_watch.watched_loop(pipe) as lag:
        print("begun", flush=True)
        if how == "late":
            await asyncio.sleep(0.2)
            time.sleep(2)
            await asyncio.sleep(1.5)
            print(f"lag {lag.take():.1f} {lag.take():.1f}", flush=True)
        elif how == "well":
            await asyncio.sleep(6)
        elif how == "read":
            with loop_watch.bounded():
                await asyncio.to_thread(open, "pipe")
        elif how == "read and fail":
            asyncio.get_running_loop().run_in_executor(None, open, "pipe")
            raise RuntimeError
        elif how == "read in time":
            with loop_watch.bounded():
                await asyncio.to_thread(time.sleep, 1)
            await asyncio.sleep(4)
        else:
            globals()[how]()

with loop_watch.loop_watcher() as pipe:
    asyncio.run(main(sys.argv[1], pipe))
print("ended", flush=True)
"""


def started(how, folder=None):
    """A program that has begun its loop. folder: where it runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        env=environment(),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "begun\n"
    return process


def watcher_of(process):
    """Once it runs its own program."""
    return wait_until(
        lambda: next(
            (
                w
                for w in psutil.Process(process.pid).children()
                if "megatron_scalerl.processes.loop_watch" in w.cmdline()
            ),
            None,
        )
    )


def test_a_loop_that_stands_still_is_ended_with_its_stacks():
    hangs = ("hang_in_c", "hang_in_a_write")
    processes = [started(how) for how in hangs]
    said = "megatron-scalerl: the event loop stood still for 3 s; the process is killed; stacks of threads:\n"
    for how, process in zip(hangs, processes):
        out, err = process.communicate(timeout=240)
        assert (process.returncode, out) == (-signal.SIGKILL, ""), how
        assert err.startswith(said) and f"in {how}\n" in err and "in main\n" in err


def test_a_read_that_hangs_in_a_thread_ends_with_its_stacks(tmp_path):
    """Within a block that has a limit, and where the end of the loop waits for the thread."""
    os.mkfifo(tmp_path / "pipe")
    within, after, well = (started(how, tmp_path) for how in ("read", "read and fail", "read in time"))
    out, err = within.communicate(timeout=240)
    assert (within.returncode, out) == (1, "")
    assert err.startswith("Timeout (0:00:03)!") and "in run" in err and "concurrent/futures/thread.py" in err
    out, err = after.communicate(timeout=240)
    assert (after.returncode, out) == (-signal.SIGKILL, "")
    assert "stood still for 3 s; the process is killed" in err and "concurrent/futures/thread.py" in err
    assert well.communicate(timeout=240) == ("ended\n", "")


def test_a_process_that_is_stopped_is_not_ended_and_the_watch_ends_with_it():
    """The limit is 3 s; stacks and SIGKILL would come 6 s later."""
    process = started("well")
    watcher = watcher_of(process)
    process.send_signal(signal.SIGSTOP)
    ticks = watcher.num_ctx_switches().voluntary
    wait_until(lambda: watcher.num_ctx_switches().voluntary >= ticks + 12)  # its own waits, of a second each
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=240) == ("ended\n", "")
    assert process.returncode == 0 and not watcher.is_running()


def test_the_lag_is_what_the_loop_came_late_by():
    process = started("late")
    out, err = process.communicate(timeout=240)
    lag, ended = out.splitlines()
    longest, rest = map(float, lag.removeprefix("lag ").split())
    assert (process.returncode, ended, err) == (0, "ended", "")
    assert longest >= 1.0 and rest == 0


def test_a_run_goes_on_without_its_watch():
    process = started("well")
    watcher_of(process).kill()
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (0, "ended\n")
    assert "a run whose loop hangs is no longer killed" in err
