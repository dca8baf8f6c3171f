"""The whole check at toy size on the CPU, by its command. Checks that cannot run there are listed here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_scalerl.check_gpu.table import KINDS, PARALLEL, PARTS

ROOT = Path(__file__).parents[2]
SHAPES = ("1b", "8b", "8b_long", "8b_recompute")
NOT_ON_A_CPU = {
    "environment": ("driver", "nccl", "transformer-engine", "apex", "flash-attn", "idle"),
    "logits": (
        "parity cuda",
        "parity triton",
        "workspace bound",
        "forward GEMM share",
        "GEMM share",
        "forward extra memory",
        "block memory",
        "over Liger",
        "over cut-cross-entropy",
        "over naive bf16",
    ),
    "families-te": (*KINDS, *(f"{kind} same step as plain" for kind in KINDS)),
    "shapes-te": tuple(f"{shape} {figure}" for shape in SHAPES for figure in ("MFU", "memory")),
    "engine": ("routed experts", "decode rate"),
    "loop": ("graphs", "model logits", "mismatch fp32 below model"),
    "parallel": (*(f"{name} te" for name in PARALLEL), "broadcast"),
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_part_runs_on_the_cpu_or_says_why_not(tmp_path):
    command = [sys.executable, "-m", "megatron_scalerl", "check-gpu", "--rehearse", "--out", str(tmp_path / "out")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1450)
    body = json.loads((tmp_path / "out" / "gpu_report.json").read_text())
    print(done.stdout)
    print({part["name"]: part["seconds"] for part in body["parts"]})
    found = {finding["check"]: finding for part in body["parts"] for finding in part["findings"]}
    assert [f for f in found.values() if f["status"] == "failed"] == []
    assert {part["name"]: part["end"] for part in body["parts"] if part["end"]} == {}
    assert done.returncode == 0, done.stderr
    assert set(found) == {f"{part.name}/{check}" for part in PARTS for check in part.checks}
    skipped = {check for check, finding in found.items() if finding["status"] == "not run"}
    assert skipped == {f"{part}/{check}" for part, checks in NOT_ON_A_CPU.items() for check in checks}
    assert all(found[check]["detail"] for check in skipped)
    assert not any(row["proved"] for row in body["rows"]) and body["gpus"] == []
