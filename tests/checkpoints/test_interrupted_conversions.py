"""A killed conversion leaves nothing that looks finished, and the same command resumes it."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from random_policies import make

from megatron_scalerl.checkpoints.conversion import Options, work_folder
from megatron_scalerl.checkpoints.to_hf import to_hf
from megatron_scalerl.checkpoints.to_megatron import to_megatron

ROOT = Path(__file__).parent.parent.parent
# Stalls in the sync of the third job's file, so that the file is written and its result is never recorded.
STALLING = """
import sys, time
from megatron_scalerl.checkpoints import jobs
from megatron_scalerl.checkpoints.conversion import Options
from megatron_scalerl.checkpoints.{module} import {function}

flush, files = jobs._flush_to_disk, []

def stall(file):
    flush(file)
    files.append(file)
    if len(files) == 3:
        print("stalled", flush=True)
        time.sleep(600)

jobs._flush_to_disk = stall
{function}(sys.argv[1], sys.argv[2], Options(job_bytes=60_000))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "hf"
    make("llama", folder)
    return folder


def killed(module, source, out):
    """Starts a conversion that stalls in its third file, and kills it there."""
    program = STALLING.format(module=module, function=module)
    process = subprocess.Popen(
        [sys.executable, "-c", program, source, out], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "stalled\n"
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["to_megatron", "to_hf"])
def test_a_killed_conversion_resumes_with_its_finished_jobs(module, source, tmp_path):
    convert = {"to_megatron": to_megatron, "to_hf": to_hf}[module]
    options = Options(job_bytes=60_000, verify=True)
    origin = source
    if module == "to_hf":
        origin = tmp_path / "origin"
        to_megatron(source, origin, options)
    convert(origin, tmp_path / "whole", options)
    killed(module, origin, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    partial = tmp_path / ".out.partial"
    assert not list(partial.rglob("metadata.json")) and not list(partial.rglob("COMMIT"))
    done = [json.loads(p.read_text()) for p in sorted((partial / "records").iterdir())]
    assert len(done) == 2
    kept = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (partial / "result").rglob("*.distcp")}

    summary = convert(origin, tmp_path / "out", options)

    assert 0 < summary.resumed_bytes < summary.nbytes
    assert not partial.exists()
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file() and path.name not in (".metadata", "COMMIT", "common.pt"):
            assert (tmp_path / "out" / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes()
    if module == "to_megatron":
        for record in done:  # finished files were not written again
            stat = (tmp_path / "out" / record["file"]).stat()
            assert kept[record["file"]] == (stat.st_ino, stat.st_mtime_ns)


@pytest.mark.slow
def test_another_source_or_option_starts_over(source, tmp_path):
    killed("to_megatron", source, tmp_path / "out")
    summary = to_megatron(source, tmp_path / "out", Options(job_bytes=60_000, dtype="BF16", verify=True))
    assert summary.resumed_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parent", "worker"])
def test_all_processes_exit_when_one_is_killed(victim):
    program = """
from pathlib import Path
from stalling_job import StallingJob
from megatron_scalerl.checkpoints.jobs import Setting
from megatron_scalerl.checkpoints.workers import run_jobs
if __name__ == "__main__":
    run_jobs([StallingJob(name="a"), StallingJob(name="b")],
             Setting(sources=[], folder=Path("."), allow_nonfinite=False), processes=2,
             on_bytes=lambda pid: print(pid, flush=True), on_done=print)
"""
    paths = os.pathsep.join(map(str, [ROOT, Path(__file__).parent]))
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    handles = [os.pidfd_open(pid) for pid in workers]
    os.kill(parent.pid if victim == "parent" else workers[0], signal.SIGKILL)
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(240_000), "a worker outlived the others"
        os.close(handle)
    said = parent.communicate()[1]
    if victim == "worker":
        # either of the two may have printed first and been killed
        assert re.search(r"RuntimeError: conversion: worker [01] exited before its work was done", said)
        assert parent.returncode == 1


def test_two_conversions_to_one_output_exclude_each_other(tmp_path):
    with work_folder(tmp_path / "out", {"a": 1}, []):
        again = work_folder(tmp_path / "out", {"a": 1}, [])
        with pytest.raises(ValueError, match="one conversion to it at a time, found another running"), again:
            pass
        assert (tmp_path / ".out.partial" / "result").is_dir(), "the first one's work was removed"
