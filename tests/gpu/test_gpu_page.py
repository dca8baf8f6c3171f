"""The page of a session with GPU tests, and the planner's constants in it. PyTorch's GPU is a stand-in."""

import os
import sys
from pathlib import Path

import pytest
from programs import ended

from megatron_scalerl.plan.assumptions_file import read_assumptions

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STAND_IN = """
import harness, torch
from megatron_scalerl.cluster import probe
torch.accelerator.is_available, torch.accelerator.device_count = lambda: True, lambda: 1
harness.gpu_names = lambda: ["NVIDIA H100 80GB HBM3"]
probe.probe = lambda: probe.Installed(packages={"torch": "2.13.0"}, cuda_version="13.0", nccl=None)
from conftest import *
"""
TESTS = """
import pytest
def test_elsewhere(): pass
@pytest.mark.gpu
def test_measures(record_property):
    for name, value in (("layers", "te"), ("dense_utilization", 0.4), ("runtime_gib", -1.0), ("nats", 0.25)):
        record_property(name, value)
@pytest.mark.gpu
def test_fails(): assert 1 == 2, "a | b"
@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_needs_two(): pass
@pytest.mark.gpu
@pytest.mark.te
def test_needs_te(): pass
"""


def test_a_session_leaves_a_page_and_the_planners_constants(tmp_path):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "test_some.py").write_text(TESTS)
    argv = ["-c", str(ROOT / "setup.cfg"), "--rootdir", str(tmp_path), "-p", "stand_in", "-p", "no:cacheprovider"]
    paths = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "tests", ROOT / "tools")))
    argv = ["-m", "pytest", "-q", *argv, "--gpu-report", "report", "gpu/test_some.py"]
    done = ended(sys.executable, *argv, cwd=tmp_path, PYTHONPATH=paths)
    assert "1 failed, 2 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
    page = (tmp_path / "report" / "gpu_report.md").read_text()
    rows = {line.split(" | ")[0].split("::")[1]: line for line in page.splitlines() if "::" in line}
    assert page.startswith("# Checks on 1 x NVIDIA H100 80GB HBM3, 2") and "* packages: torch 2.13.0" in page
    assert rows.keys() == {"test_measures", "test_fails", "test_needs_two", "test_needs_te"}
    assert "| passed |" in rows["test_measures"] and "nats 0.25" in rows["test_measures"]
    assert "| failed |" in rows["test_fails"] and "a \\| b" in rows["test_fails"]
    assert "needs 2 GPUs, found 1" in rows["test_needs_two"] and "is not installed" in rows["test_needs_te"]
    found = read_assumptions(tmp_path / "report" / "assumptions.yaml")
    assert (found.gpu, found.layers, {n: m.value for n, m in found.assumptions.items()}) == (
        "h100-80g",
        "te",
        {"dense_utilization": 0.4},
    )
