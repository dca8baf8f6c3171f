"""The supervisor of a controller: which ends are final, and how often a run is started again."""

import os
import signal
import subprocess
import sys

import pytest
from launch.stand_ins import environment, gone, pids_in

from megatron_scalerl.commands import supervise as module
from megatron_scalerl.commands.supervise import supervise

STAND_IN_CONTROLLER = """
import os, signal, sys
from pathlib import Path
run, *ends = sys.argv[1:]
starts = Path(run) / "starts"
count = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (count + 1))
end = ends[count]
if end == "commit":
    folder = Path(run) / "checkpoints" / f"step_{count:06d}"
    folder.mkdir(parents=True)
    (folder / "COMMIT").write_text("{}")
    sys.exit(1)
if end == "taken_over":
    (Path(run) / "slurm").mkdir()
    (Path(run) / "slurm" / "attempt").write_text("7.1")
    sys.exit(1)
if end == "kept":
    (Path(run) / "rollouts").mkdir()
    (Path(run) / "rollouts" / "journal.jsonl.kept").touch()
    sys.exit(1)
if end.startswith("end"):
    gave_up = "true" if end == "end_gave_up" else "false"
    (Path(run) / "end.json").write_text('{"reason": "", "gave_up": %s}' % gave_up)
    sys.exit(1)
if end.startswith("SIG"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.Signals[end])
sys.exit(int(end))
"""


@pytest.fixture(autouse=True)
def no_delay(monkeypatch):
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.0)


@pytest.mark.parametrize(
    "ends, restarts, code, starts",
    [
        ("0", 2, 0, 1),
        ("2", 2, 2, 1),
        ("76", 2, 76, 1),
        ("1 76 0", 2, 0, 3),
        ("1 77 0", 2, 77, 2),
        ("taken_over 0", 2, 1, 1),
        ("143", 2, 143, 1),
        ("SIGTERM", 2, 143, 1),
        ("SIGINT", 2, 130, 1),
        ("75", 2, 75, 1),
        ("SIGUSR1", 2, 75, 1),
        ("SIGKILL 2 0", 2, 0, 3),
        ("SIGKILL 2 2 0", 4, 2, 3),
        ("1 2 1 2 0", 4, 0, 5),
        ("1 kept 0", 2, 1, 2),
        ("1 1 1 0", 2, 1, 3),
        ("1 SIGKILL 0", 1, 1, 2),
        ("1 commit 1 commit 1 0", 2, 0, 6),
        ("end_done 0", 2, 0, 2),
        ("end_gave_up end_gave_up", 2, 1, 1),
    ],
)
def test_a_failed_run_is_started_again_while_it_makes_progress(tmp_path, ends, restarts, code, starts, caplog):
    command = [sys.executable, "-c", STAND_IN_CONTROLLER, str(tmp_path), *ends.split()]
    assert supervise(command, tmp_path, restarts=restarts) == code
    assert len((tmp_path / "starts").read_text()) == starts
    if "kept" in ends:
        assert f"rename {tmp_path}/rollouts/journal.jsonl.kept to journal.jsonl first" in caplog.text


PROGRAM = """
import sys
from pathlib import Path
from megatron_scalerl.commands.supervise import supervise
program = 'trap "exit 143" TERM; trap "exit $1" USR1; echo $$ >> "$0"; while true; do sleep 0.05; done'
child = ["bash", "-c", program, *sys.argv[1:]]
sys.exit(supervise(child, Path("/nonexistent"), restarts=3))
"""


@pytest.mark.parametrize(
    "number, childs, code",
    [(signal.SIGTERM, 1, 143), (signal.SIGUSR1, 1, 75), (signal.SIGUSR1, 77, 75), (signal.SIGKILL, 1, -9)],
)
def test_a_signal_to_the_supervisor_ends_the_run(tmp_path, number, childs, code):
    """It is passed on, and the run is not started again; after SIGKILL the kernel ends the child.

    A run that fails after SIGUSR1 can go on, too, also where a host of the trainer has left.
    """
    pids = tmp_path / "pids"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(pids), str(childs)], env=environment())
    [child] = pids_in(pids, 1)
    process.send_signal(number)
    assert process.wait(240) == code
    assert gone({child})
    assert len(pids.read_text().split()) == 1


def test_a_signal_while_the_child_is_started_reaches_it(tmp_path, monkeypatch):
    start = subprocess.Popen

    def start_and_signal(*arguments, **options):
        child = start(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return child

    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    assert supervise([sys.executable, "-c", "import signal; signal.pause()"], tmp_path, restarts=3) == 143


DELAYED = """
import sys
from pathlib import Path
from megatron_scalerl.commands import supervise as module
module.FIRST_DELAY_S = 300.0
sys.exit(module.supervise([sys.executable, "-c", "raise SystemExit(1)"], Path("/nonexistent"), restarts=3))
"""


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_a_signal_between_two_starts_ends_the_delay(number, code):
    process = subprocess.Popen([sys.executable, "-c", DELAYED], env=environment(), stderr=subprocess.PIPE)
    assert b"restart 1 of at most 3 in 300 s" in process.stderr.readline()
    process.send_signal(number)
    try:
        assert process.wait(240) == code
    finally:
        process.kill()
        process.wait()
