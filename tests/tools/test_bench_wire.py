"""The bench prints a line a layout: real sockets, a real client, a stand-in rank in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"

ONE_LAYOUT = """
import bench_wire as bench
bench.LAYOUTS = {"one rank": (1, 1)}
bench.main(bench.parser().parse_args(["--tokens", "20000", "--completion", "1000", "--rounds", "1"]))
"""


@pytest.mark.slow
def test_a_batch_is_sent_checked_and_built():
    done = subprocess.run(
        [sys.executable, "-c", ONE_LAYOUT], env={**os.environ, "PYTHONPATH": str(TOOLS), "OMP_NUM_THREADS": "1"},
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    [line] = [json.loads(row) for row in done.stdout.splitlines()]
    assert (line["layout"], line["tokens"], line["machine"]["cores"]) == ("one rank", 20_000, os.cpu_count())
    assert 8 < line["bytes_per_token"] < 14
    assert line["seconds"] >= line["build_seconds"] > 0 and line["seconds"] >= line["loop_seconds"] > 0
    assert line["curve_over_ours"] > 0 and line["copy_seconds"] >= 0
