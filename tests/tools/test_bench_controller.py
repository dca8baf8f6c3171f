"""The controller's benchmark: the real client, decoders, stream and trainer socket on stand-in engines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_controller.py"


@pytest.mark.slow
def test_completions_reach_the_trainer_and_every_figure_is_there(tmp_path):
    out = tmp_path / "found.json"
    options = "--engines 2 --in-flight 64 --tokens 2400 --delay 0.5 --warm-up 2 --seconds 4 --groups-per-batch 2"
    argv = [sys.executable, str(TOOL), *options.split(), "--decoders", "1", "--json", str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["tokens_per_s"] > 0 and found["steps"] > 0
    assert found["lag_ms"]["p50"] <= found["lag_ms"]["p99"] <= found["lag_ms"]["max"]
    assert found["sockets"] > found["options"]["engines"]
    assert min(found["peak_mib"].values()) > 10
    assert found["processor_us_per_token"]["decoders"] > 0
    assert f"{found['tokens_per_s']:,}" in done.stdout
