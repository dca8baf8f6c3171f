"""The recorded run is whole: it has records, forecasts, and completions that can be read."""

import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from megatron_scalerl.page.completions import Reader
from megatron_scalerl.page.demo import RECORDED, recorded_run
from megatron_scalerl.page.groups import GroupIndex
from megatron_scalerl.page.run_data import RunData


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
