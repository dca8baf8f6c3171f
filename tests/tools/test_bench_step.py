"""The bench prints one line with both sides and the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_step.py"


SET_CLOCK = """
import sys
sys.path.insert(0, "tools")
import bench_step as bench

readings = {"ours": [(90, 9), (90, 9), (1, 1), (2, 1), (6, 5)], "bare": [(80, 9), (80, 9), (3, 4), (4, 4), (9, 8)]}
turns = iter([turn for pair in zip(*readings.values()) for turn in pair])
timed = bench._timed

def on_a_set_clock(work):
    assert min(timed(work)) > 0
    return next(turns)

bench._timed = on_a_set_clock
bench.main(bench.parser().parse_args(["--rounds", "3", "--samples", "8", "--micro-batch-tokens", "256"]))
"""


@pytest.mark.slow
def test_medians_of_the_rounds_after_two_that_warm_up():
    """Real steps on both sides; the seconds are set: medians 2 and 4, of processor time 1 and 4."""
    done = subprocess.run(
        [sys.executable, "-c", SET_CLOCK], cwd=TOOL.parents[1], env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["bench"] == "step"
    assert (result["ratio"], result["cpu_ratio"]) == (0.5, 0.25)
    assert result["ours_tokens_per_second"] == round(result["tokens"] / 2)
    assert result["bare_tokens_per_second"] == round(result["tokens"] / 4)
    assert result["padded_tokens"] >= result["tokens"] >= 8 * 24
    assert result["micro_batches"] >= 2 and result["threads"] == 1
    assert result["machine"]["cores"] == os.cpu_count()
