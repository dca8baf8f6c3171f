"""Parts of an agent that need no controller: its GPUs and its name."""

import asyncio
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console

from megatron_scalerl.commands import engine as join
from megatron_scalerl.commands.engine import engine_name
from megatron_scalerl.launch.local_server import gpus_at


def test_gpus_are_positions_among_the_visible_ones(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_at([2, 3]) == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5,6")
    assert gpus_at([0, 1]) == "4,GPU-5"
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES: 4,GPU-5,6 names fewer GPUs than the 4"):
        gpus_at([3])


def test_an_agent_stays_small_beside_its_engine():
    program = "import sys, megatron_scalerl.launch.agent; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_the_name_of_an_engine_that_joins(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu_7/a" + "x" * 100)
    assert engine_name() == f"extra-gpu-7-a{'x' * 41}-{os.getpid()}"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    assert engine_name() == "extra-77-2"
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert engine_name() == "extra-77-2.3"


def test_an_engine_that_joins_survives_a_file_system_that_fails_for_a_while(tmp_path, monkeypatch, capsys):
    seen = [OSError(116, "Stale file handle"), ValueError("attempts.jsonl:3: expected JSON"), True]

    def has_ended(folder):
        found = seen.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(join, "has_ended", has_ended)
    monkeypatch.setattr(join, "FIRST_DELAY_S", 0.0)
    assert asyncio.run(join._keep_joined(tmp_path, "extra-7-0", 1, 60, Console())) == ""
    said = capsys.readouterr().out
    assert seen == [] and "Stale file handle; the next attempt" in said and "attempts.jsonl:3" in said


@pytest.mark.slow
@pytest.mark.parametrize("code, finished", [(4, False), (3, True)], ids=["never taken in", "taken in each time"])
def test_an_engine_that_no_controller_takes_in_gives_up(tmp_path, monkeypatch, code, finished):
    """The run ends long after the time in which an engine has to be taken in."""
    (tmp_path / "logs").mkdir()
    end = time.monotonic() + 3.0
    monkeypatch.setattr(join, "has_ended", lambda folder: finished and time.monotonic() > end)
    monkeypatch.setattr("megatron_scalerl.launch.control_folder.read_controller", lambda folder: {})
    monkeypatch.setattr(join, "AGENT", (sys.executable, "-c", f"raise SystemExit({code})"))
    monkeypatch.setattr(join, "FIRST_DELAY_S", 0.0)
    last = asyncio.run(join._keep_joined(tmp_path, "extra-7-0", 1, 1.0, Console()))
    assert last == ("" if finished else "no controller accepted the engine")
