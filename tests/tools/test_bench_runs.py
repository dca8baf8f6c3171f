"""tools/bench_runs.py at a small size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_runs.py"


@pytest.mark.slow
def test_the_figures_of_two_runs():
    done = subprocess.run(
        [sys.executable, str(TOOL), "--runs", "2", "--steps", "60"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": str(TOOL.parents[1])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["runs"] == 2 and found["page_bytes"] > 50_000 and found["whole_bytes"] > 1000
    assert 0 < found["start_seconds"] < found["all_forecasts_seconds"] and found["peak_mib"] > 10
