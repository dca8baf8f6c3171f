"""The bench prints one line with both sides and the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_step.py"


@pytest.mark.slow
def test_one_json_line_with_both_sides():
    command = [sys.executable, str(TOOL), "--rounds", "1", "--samples", "8", "--micro-batch-tokens", "256"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout
    result = json.loads(output.strip().splitlines()[-1])
    assert result["bench"] == "step"
    assert result["ratio"] == pytest.approx(result["ours_seconds"] / result["bare_seconds"], rel=0.05)
    assert result["padded_tokens"] >= result["tokens"] >= 8 * 24
    assert result["micro_batches"] >= 2 and result["threads"] == 1
    assert result["machine"]["cores"] == os.cpu_count()
