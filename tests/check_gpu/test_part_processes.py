"""Processes of a part: the whole group is killed, only the owner reads the log, and ranks report how they failed."""

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest
from waits import gone, limits_count_from

from megatron_scalerl.check_gpu.programs import run_command
from megatron_scalerl.check_gpu.ranks import run_ranks


def wait_for(path):
    for _ in range(300):
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.1)
    raise AssertionError(f"{path}: nothing after 30 s")


def test_a_group_is_killed_as_a_whole_and_only_its_owner_reads_its_log(tmp_path, monkeypatch):
    log, child = tmp_path / "log", tmp_path / "pid"
    log.write_text("of an earlier call\n")
    limits_count_from(monkeypatch, log, "said\n  \n")
    old = os.umask(0)
    try:
        script = f"sleep 600 & echo $! > {child}; echo said; echo '  '; wait"
        done = asyncio.run(run_command(["/bin/sh", "-c", script], log, limit_s=1.0, grace_s=1.0))
    finally:
        os.umask(old)
    assert gone(int(wait_for(child))) and done.code is None
    assert log.stat().st_mode & 0o777 == 0o600
    assert done.output == log.read_text() == "said\n  \n"
    assert done.failure() == "stopped at its time limit after 1 s; last log line: said"


def place(job, rendezvous):
    return [os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MARK"], job["x"]]


def second_fails(job, rendezvous):
    """Rank 0 starts a process and waits, rank 1 raises once it is there."""
    pid = Path(job["pid"])
    if os.environ["RANK"] == "0":
        pid.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)
    wait_for(pid)
    raise ValueError("rank 1 cannot")


@pytest.fixture()
def here(monkeypatch):
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(paths), "MARK": "m"}


def test_ranks_answer_and_the_first_that_fails_ends_all_with_what_they_started(tmp_path, here):
    name = Path(__file__).stem
    assert run_ranks(2, f"{name}:place", {"x": 7}, folder=tmp_path, timeout_s=60, env=here) == [
        ["0", "2", "m", 7],
        ["1", "2", "m", 7],
    ]
    assert (tmp_path / "rank-1.log").stat().st_mode & 0o777 == 0o600
    job = {"pid": str(tmp_path / "pid")}
    with pytest.raises(RuntimeError, match="rank 1 of 2 ended with exit code 1: ValueError: rank 1 cannot"):
        run_ranks(2, f"{name}:second_fails", job, folder=tmp_path, timeout_s=60, env=here)
    assert gone(int((tmp_path / "pid").read_text()))
