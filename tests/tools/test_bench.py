"""The benchmarks that users run: each ends at a small size, with figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import sampled

TOOLS = Path(__file__).parents[2] / "tools"
SMALL = {
    "bench_controller": (
        "--engines 2 --in-flight 64 --tokens 2400 --delay 0.5 --warm-up 2 --seconds 4 --groups-per-batch 2 "
        "--decoders 1 --json {out}",
        ("tokens_per_s", "steps", "sockets"),
    ),
    "bench_convert": (
        "--kind moe --gib 0.5 --rounds 1 --folder {folder} --json {out}",
        ("largest_tensor", "nbytes", "promised_anonymous"),
    ),
    "bench_logits": ("--tokens=256 --hidden=32 --vocab=2048 --threads=1 --rounds=1", ("targets",)),
    "bench_step": ("--rounds 1 --samples 8 --micro-batch-tokens 256", ("ratio", "ratio_packed", "tokens")),
    "bench_store": (
        "--batches 2 --groups 2 --group-size 4 --tokens 1000 --ready 1 --folder {folder}",
        ("bytes_per_token", "tokens_per_second", "replay_ready_seconds"),
    ),
    "bench_weights": (
        "--rounds 1 --layers 1 --hidden 256 --vocab 512 --bucket-mib 1",
        ("mib", "seconds", "bytes_of_a_change"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("tool", sampled("bench", SMALL, 3))
def test_figures_of_a_small_run(tool, tmp_path):
    words, figures = SMALL[tool]
    out = tmp_path / "out.json"
    (folder := tmp_path / "folder").mkdir()
    argv = [sys.executable, str(TOOLS / f"{tool}.py"), *words.format(out=out, folder=folder).split()]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TOOLS.parent)}
    done = subprocess.run(argv, cwd=TOOLS.parent, env=env, capture_output=True, text=True, timeout=500, check=False)
    # 1: slower than a target, which other work on the machine may do
    assert done.returncode in (0, 1), done.stderr[-2000:]
    found = json.loads(out.read_text() if out.exists() else done.stdout.strip().splitlines()[-1])
    assert all(found[name] for name in figures)
    assert list(folder.iterdir()) == []
    for peak in found.get("peak_anonymous", {}).values():  # of a conversion: no process holds a tensor
        assert peak < found["promised_anonymous"] / 2
