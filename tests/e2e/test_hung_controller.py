"""A controller whose event loop hangs is ended and started again: real ranks, stand-in engines."""

import os
import subprocess
import sys

import pytest
from slurm.slurm_runs import ROOT, rows, write_recipe

pytestmark = pytest.mark.slow
PROGRAM = ROOT / "tests" / "fakes" / "run_with_a_hung_loop.py"


def test_a_hung_controller_is_ended_and_its_run_goes_on(tiny, tmp_path):
    run = write_recipe(tmp_path / "r.yaml", tiny, output_dir=tmp_path, checkpoint={"every_steps": 1}, steps=4)
    words = [sys.executable, str(PROGRAM), "train", "--supervise", str(tmp_path / "r.yaml")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert (run / "hung").exists()
    assert "the event loop stood still for 10 s: its process is killed; its stacks:" in done.stderr
    assert "in hang_once\n" in done.stderr
    assert "the run was killed by SIGKILL: restart 1 of at most 5" in done.stderr
    assert [row["incarnation"] for row in rows(run / "attempts.jsonl")] == ["local.0", "local.1"]
    steps = rows(run / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(0 <= row["loop_lag_seconds"] < 10 for row in steps)
