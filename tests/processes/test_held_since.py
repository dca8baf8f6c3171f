"""What a job holds before its first charge, and between two programs of it."""

import subprocess
import sys
import time

import pytest

from megatron_scalerl.commands import supervise
from megatron_scalerl.processes.held_since import HELD_SINCE, held_from_now, held_uncharged

NOTE = "import os, sys; print(os.environ.get('MSRL_HELD_SINCE'), file=open(sys.argv[1], 'a')); sys.exit(1)"


@pytest.mark.parametrize(
    ("ago", "held"), [("0", 0.0), ("40.5", 40.5), ("-9", 0.0), (None, 0.0), ("x", 0.0), ("nan", 0.0)]
)
def test_a_job_has_held_its_devices_since_its_start(ago, held, monkeypatch):
    monkeypatch.setattr(time, "clock_gettime", lambda clock: {time.CLOCK_BOOTTIME: 1000.0}[clock])
    monkeypatch.delenv(HELD_SINCE, raising=False)
    if ago is not None:
        monkeypatch.setenv(HELD_SINCE, str(1000 - float(ago)) if ago != "x" else ago)
    assert held_uncharged() == held


def test_the_variable_counts_on_the_clock_of_the_job_scripts_words():
    written = subprocess.run(["cut", "-d", " ", "-f1", "/proc/uptime"], capture_output=True, text=True, check=True)
    assert abs(float(written.stdout) - time.clock_gettime(time.CLOCK_BOOTTIME)) < 5


def test_a_program_that_is_started_again_holds_since_the_end_of_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "FIRST_DELAY_S", 0.0)
    monkeypatch.setenv(HELD_SINCE, "12.5")
    command = [sys.executable, "-c", NOTE, str(tmp_path / "in_a_job")]
    before = float(held_from_now()[HELD_SINCE])
    assert supervise.supervise(command, tmp_path, restarts=1) == 1
    first, second = (tmp_path / "in_a_job").read_text().split()
    assert first == "12.5" and before < float(second) <= float(held_from_now()[HELD_SINCE])
    monkeypatch.delenv(HELD_SINCE)
    assert supervise.supervise([*command[:-1], str(tmp_path / "outside")], tmp_path, restarts=1) == 1
    assert (tmp_path / "outside").read_text().split() == ["None", "None"]
