"""The bench writes a run with the real writers, serves it, and reads it as a browser does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_page.py"


@pytest.mark.slow
def test_a_small_run_is_served(tmp_path):
    small = ["--steps", "20", "--groups", "2", "--group-size", "3", "--tokens", "50", "--keep", tmp_path / "run"]
    done = subprocess.run(
        [sys.executable, TOOL, *small], env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    line = json.loads(done.stdout)
    assert line["page_bytes"] > 100_000 and line["group_bytes"] > 500 and line["completion_bytes"] > 500
    assert line["store_bytes"] > 20 * 2 * 3 * 50 * 8 and line["file_bytes"] > line["page_bytes"]
    assert line["page_seconds"] > 0 < line["peak_mib"]
    assert (tmp_path / "run" / "page.html").is_file()
