"""The bench prints one line: real Megatron and vLLM models, all arms, equal digests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.slow
def test_every_arm_is_measured():
    small = ["--rounds", "1", "--layers", "1", "--hidden", "256", "--vocab", "512", "--bucket-mib", "1"]
    done = subprocess.run(
        [sys.executable, TOOLS / "bench_weights.py", *small], env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    line = json.loads(done.stdout)
    assert list(line["seconds"]) == [
        "gloo",
        "pack and wire",
        "update, no digests",
        "update",
        "packed copies",
        "update by the loader",
        "vLLM's reload alone",
        "changes",
        "staged",
        "pack and wire, shm",
        "update, shm",
        "update, stored",
        "from the store",
        "staged, paused",
        "optimizer's write",
        "optimizer's write, counted",
        "optimizer's write, recorded",
    ]
    assert 0 < line["staged_pause_share"] < 1
    assert 3 < line["bytes_of_a_change"] < 3.5
    assert line["mib"] == pytest.approx(
        2 * (2 * 512 * 256 + 256 * (2 * 256 + 2 * 64) + 3 * 4 * 256 * 256) / 2**20, 0.05
    )
    assert line["over_gloo"]["gloo"] == 1 and line["gb_s"] > 0
    assert all(low <= line["seconds"][arm] <= high for arm, (low, high) in line["spread"].items())
