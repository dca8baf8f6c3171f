"""The bench writes a real store and reads it in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "bench_store.py"


def test_a_store_is_written_and_read(tmp_path):
    small = ["--batches", "2", "--groups", "2", "--group-size", "4", "--tokens", "1000", "--ready", "1"]
    done = subprocess.run(
        [sys.executable, TOOL, *small, "--folder", tmp_path], env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    line = json.loads(done.stdout)
    assert 8 < line["bytes_per_token"] <= 9
    assert line["ready_groups"] == 2 and line["batch_bytes"] > 8 * 2 * 4 * 1000
    assert line["tokens_per_second"] > 0 and line["replay_ready_seconds"] > 0 <= line["lag_p99_seconds"]
    assert list(tmp_path.iterdir()) == []
