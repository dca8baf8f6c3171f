"""A conversion that is killed or interrupted leaves nothing that looks finished; the same command starts again."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from random_policies import make

from megatron_scalerl.checkpoints.conversion import result_folder
from megatron_scalerl.checkpoints.to_hf import to_hf
from megatron_scalerl.checkpoints.to_megatron import to_megatron

ROOT = Path(__file__).parent.parent.parent
# Stalls once the first of Megatron's files, or the only safetensors file, is on the disk.
STALLING = """
import os, sys, time
from pathlib import Path
from megatron_scalerl.checkpoints import conversion
from megatron_scalerl.checkpoints.{module} import {module}

advise = os.posix_fadvise

def stall(*arguments):
    advise(*arguments)
    print("stalled", flush=True)
    time.sleep(600)

conversion.os.posix_fadvise = stall
{module}(*map(Path, sys.argv[1:]))
"""
CONVERSIONS = {"to_megatron": to_megatron, "to_hf": to_hf}


@pytest.fixture(scope="module")
def origins(tmp_path_factory):
    """Conversion -> a folder to convert."""
    place = tmp_path_factory.mktemp("policy")
    make("llama", place / "hf")
    to_megatron(place / "hf", place / "megatron")
    return {"to_megatron": place / "hf", "to_hf": place / "megatron"}


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("module", CONVERSIONS)
def test_a_killed_conversion_leaves_nothing_that_counts(module, origins, tmp_path):
    CONVERSIONS[module](origins[module], tmp_path / "whole")
    argv = [sys.executable, "-c", STALLING.format(module=module), origins[module], tmp_path / "out"]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "stalled\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    partial = tmp_path / ".out.partial"
    assert partial.is_dir() and not {p.name for p in partial.rglob("*")} & {"COMMIT", "conversion.json", ".metadata"}

    CONVERSIONS[module](origins[module], tmp_path / "out")

    assert not partial.exists()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("module", CONVERSIONS)
def test_an_interrupted_conversion_removes_its_work(module, origins, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"megatron_scalerl.checkpoints.{module}.copy_side_files", interrupt)
    with pytest.raises(KeyboardInterrupt):
        CONVERSIONS[module](origins[module], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_two_conversions_to_one_output_exclude_each_other(tmp_path):
    with result_folder(tmp_path / "out", 0) as first:
        again = result_folder(tmp_path / "out", 0)
        with pytest.raises(ValueError, match="another conversion to this path is running"), again:
            pass
        assert first.is_dir(), "the first one's work was removed"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
