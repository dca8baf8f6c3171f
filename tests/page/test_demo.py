"""The recorded run is whole: it has records, forecasts, and completions that can be read."""

import os
import signal
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest
from page_runs import write_page_run

from megatron_scalerl.page.completions import Reader
from megatron_scalerl.page.demo import RECORDED, recorded_run
from megatron_scalerl.page.groups import GroupIndex
from megatron_scalerl.page.run_data import RunData

TOOL = Path(__file__).parents[2] / "tools" / "record_demo.py"


def test_the_recorded_run_can_be_read_and_is_deleted():
    assert RECORDED.stat().st_size < 600_000
    with recorded_run() as run:
        data, index = RunData(run), GroupIndex(run)
        data.update()
        index.update()
        assert len(data.payload()["steps"]["step"]) == 100 and len(data.validations) == 26
        assert index.steps == [1, *range(10, 101, 10)]
        reader = Reader(run, data.recipe, index)
        group = reader.group(index.of_step(50)[0]["id"])
        assert len(group["completions"]) == 16 and group["prompt"].startswith("<bos>")
        assert any(each["advantage"] is not None for each in group["completions"])
        assert len(reader.completion(group["id"], 3)["pieces"]) == group["completions"][3]["tokens"]
    assert not run.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watch_ends_at_a_signal_and_leaves_nothing(tmp_path, number):
    command = [sys.executable, "-m", "megatron_scalerl", "watch", "--demo"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    address = watch.stdout.readline().strip()
    with urllib.request.urlopen(address) as answer:
        assert b"quickstart_11" in answer.read()
    assert list(tmp_path.glob("megatron-scalerl-demo-*"))
    watch.send_signal(number)
    out, error = watch.communicate(timeout=240)
    assert (watch.returncode, out, error) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_recorded_with_the_batches_of_some_steps(tmp_path):
    run, out = write_page_run(tmp_path / "run", validations=6), tmp_path / "out" / "run.zip"
    subprocess.run([sys.executable, TOOL, run, "--steps", "1,3", "--out", out], check=True, capture_output=True)
    with zipfile.ZipFile(out) as archive:
        archive.extractall(tmp_path / "recorded")
    index = GroupIndex(tmp_path / "recorded")
    index.update()
    assert index.steps == [1, 3] and index.read(4).fields["rollouts"][0]["token_ids"] == (0, 2, 3, 4)
    assert (tmp_path / "recorded" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert (tmp_path / "recorded" / "policy" / "tokenizer.json").is_file()
