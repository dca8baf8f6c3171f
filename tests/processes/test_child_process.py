"""No child outlives the process that started it, however and whenever that exits."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from launch.stand_ins import ROOT, environment, gone, gone_processes, pids_in, stand_in
from waiting import passes

from megatron_scalerl.processes.child_process import ChildProcess, ProcessDied, fatal_error, open_log

CONTROLLER = ROOT / "tests/launch/controller.py"


@pytest.fixture
def controller(tmp_path):
    """Starts a controller with two stand-in children; all of them are killed at the end."""
    started = []

    def start(*more):
        process = subprocess.Popen(
            [sys.executable, CONTROLLER, tmp_path / "pids", tmp_path / "logs", *map(str, more)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for pid in pids_in(tmp_path / "pids", 0):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.mark.slow
def test_children_die_with_a_killed_controller(controller, tmp_path):
    process = controller()
    pids = pids_in(tmp_path / "pids", 2)
    process.kill()
    # a stand-in's own child is not tied to the controller and ignores all signals but SIGKILL: check the leaders only
    assert gone_processes(pids)


def test_a_child_that_has_not_started_to_run_dies_with_a_killed_controller(tmp_path):
    """The parent dies as soon as the process exists, before the child's program runs."""
    program = [sys.executable, "-c", f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()"]
    script = (
        "import os, signal, subprocess, sys\n"
        "from megatron_scalerl.processes.parent_death import tied_command\n"
        "print(subprocess.Popen(tied_command(sys.argv[1:]), start_new_session=True).pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = ended(script, *program)
    assert done.returncode == -signal.SIGKILL
    assert gone_processes([int(done.stdout)]) and not (tmp_path / "ran").exists()


def test_a_program_whose_parent_has_exited_is_not_started(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    module = ["-m", "megatron_scalerl.processes.parent_death"]
    argv = [sys.executable, *module, str(ended.pid), "touch", str(tmp_path / "ran")]
    assert subprocess.run(argv, env=environment(), timeout=240).returncode == -signal.SIGKILL
    assert not (tmp_path / "ran").exists()


def test_forked_children_die_with_their_parent_and_theirs_with_them(tmp_path):
    script = (
        "import os, sys, time\n"
        "from megatron_scalerl.processes.parent_death import tie_forked_children\n"
        "tie_forked_children()\n"
        "if os.fork() == 0:\n"
        "    os.fork()\n"
        "    open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, tmp_path / "pids"], env=environment())
    pids = pids_in(tmp_path / "pids", 2)
    process.kill()
    process.wait()
    assert gone_processes(pids)


async def started(folder):
    child = await ChildProcess.start("child", stand_in(folder / "pids"), environment(), folder / "log")
    pids_in(folder / "pids", 1)
    return child


async def test_stop_kills_a_process_group_that_ignores_sigterm(tmp_path):
    child = await started(tmp_path)
    await child.stop(0.3)
    await child.stop(0.3)
    with pytest.raises(ProcessDied, match=r"child exited with code -9; the end of .*/log:"):
        await child.watch()
    assert gone({child.pid})


async def test_no_signal_is_sent_to_a_group_that_has_ended(tmp_path, monkeypatch):
    """Its number may be another group's by then: a run lasts for weeks."""
    sent = []

    child = await started(tmp_path)
    await child.stop(0.3)
    monkeypatch.setattr(os, "killpg", lambda pid, sig: sent.append(pid))
    child.kill()
    await child.stop(0.3)
    assert sent == []


async def test_a_cancelled_stop_leaves_nothing(tmp_path):
    child = await started(tmp_path)
    stop = asyncio.create_task(child.stop(600))
    await passes()
    stop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stop
    await child.wait()
    assert gone({child.pid})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_controller_gracefully(controller, tmp_path, number):
    process = controller()
    groups = set(pids_in(tmp_path / "pids", 2))
    process.send_signal(number)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 128 + number
    assert out == "stopping\nstopped gracefully\n"
    assert err.strip() == f"stopped by {number.name}; the same command starts again"
    assert gone(groups)


def test_a_second_signal_kills_the_children_at_once(controller, tmp_path):
    process = controller(600)  # grace period in seconds, much longer than the test
    groups = set(pids_in(tmp_path / "pids", 2))
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopping\n"
    for _ in range(3):
        process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM and "stopped gracefully" in out
    assert gone(groups)


def ended(program, *words):
    return programs.ended(sys.executable, "-c", program, *words, **environment())


def test_a_signal_after_the_cleanup_changes_no_exit_code():
    program = (
        "import asyncio, os, signal, sys\n"
        "from megatron_scalerl.processes import signals\n"
        "async def run():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await asyncio.sleep(60)\n"
        "try:\n"
        "    signals.run_until_signal(run())\n"
        "except signals.Stopped as stopped:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here', flush=True)\n"
        "    sys.exit(stopped.exit_code)\n"
    )
    done = ended(program)
    assert (done.returncode, done.stdout) == (143, "still here\n"), done.stderr


THREADS = {
    "of the loop": "    reading = asyncio.get_running_loop().run_in_executor(None, open, sys.argv[1])\n",
    "of the program": "    threading.Thread(target=open, args=sys.argv[1:]).start()\n"
    "    reading = asyncio.sleep(600)\n",
}


@pytest.mark.parametrize("thread", THREADS)
def test_a_signal_ends_a_program_whose_thread_never_ends_and_prints_its_stacks(tmp_path, thread):
    """As a read of a file system that hangs: here a pipe that nobody opens for writing."""
    os.mkfifo(tmp_path / "pipe")
    program = (
        "import asyncio, os, signal, sys, threading\n"
        "from megatron_scalerl.processes import signals\n"
        "signals.THREADS_S = 1.0\n"
        "async def run():\n"
        f"{THREADS[thread]}"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await reading\n"
        "signals.run_until_signal(run())\n"
    )
    done = ended(program, str(tmp_path / "pipe"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "Timeout (0:00:01)!" in done.stderr and "threading.py" in done.stderr


def test_a_signal_while_python_ends_changes_no_exit_code():
    """Python restores the default actions of signals before it clears the modules."""
    program = (
        "import asyncio, os, signal, sys\n"
        "from megatron_scalerl.processes import signals\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), write=os.write):\n"
        "        kill(pid, 2), kill(pid, 15), write(1, b'to the end')\n"
        "last = Last()\n"
        "async def run():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await asyncio.sleep(60)\n"
        "try:\n"
        "    signals.run_until_signal(run())\n"
        "except signals.Stopped as stopped:\n"
        "    sys.exit(stopped.exit_code)\n"
    )
    done = ended(program)
    assert (done.returncode, done.stdout) == (143, "to the end"), done.stderr


def test_a_signal_while_the_children_start(controller, tmp_path):
    process = controller()
    pids_in(tmp_path / "pids", 1)  # the second may not exist yet
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == 143
    assert gone(set(pids_in(tmp_path / "pids", 1)))


def test_a_log_is_private_and_a_device_in_its_place_keeps_its_mode(tmp_path):
    path = tmp_path / "log"
    path.touch(0o644)
    open_log(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    before = Path("/dev/null").stat().st_mode
    open_log(Path("/dev/null")).close()
    assert Path("/dev/null").stat().st_mode == before


def test_the_exception_after_the_last_fatal_error_is_found(tmp_path):
    log = tmp_path / "engine-0.log"
    assert fatal_error(log) == ""
    core = "ERROR core: EngineCore encountered a fatal error.\n    Traceback (most recent call last):\n      File x\n"
    last = "    RuntimeError: Unsupported CPU attention configuration: head_dim=16\n"
    after = "ERROR engine-0 api: caught\n    vllm.v1.engine.exceptions.EngineDeadError: see above\n"
    log.write_text(f"{core}    ValueError: before\n{after}{core}{last}{after}")
    assert fatal_error(log) == "RuntimeError: Unsupported CPU attention configuration: head_dim=16"
