"""A real run that is scraped while it goes on."""

import json
import time
import urllib.error
import urllib.request

import open_doors
import pytest
from prometheus_client.parser import text_string_to_metric_families
from whole_runs import overrides, start

pytestmark = pytest.mark.full


def get(address, path, token=None):
    request = urllib.request.Request(f"http://{address}{path}")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=240) as answer:
        return answer.read().decode()


def numbers(page):
    families = text_string_to_metric_families(page)
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def watched(controller, folder):
    """(the run's last page with a finished step, the doors of the controller's processes)."""
    files, ours, doors = folder / "metrics", {}, []
    deadline = time.monotonic() + 600
    while controller.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        if not (files / "targets.json").is_file():
            continue
        targets = json.loads((files / "targets.json").read_text())
        if not targets:  # it ends: nothing is left to scrape
            continue
        [address], token = targets[0]["targets"], (files / "token").read_text()
        try:
            found = numbers(get(address, "/metrics", token))
            if found["scalerl_step",] < 1 or found["scalerl_engines", "serving"] != 1:
                continue
            if not ours:
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    get(address, "/metrics")
            ours, doors = found, doors or open_doors.listening([controller.pid])
        except (urllib.error.URLError, ConnectionError, TimeoutError):  # it ends
            continue
    return ours, doors


def test_a_run_is_scraped(tiny_dense, tmp_path):
    settings = overrides(
        tiny_dense,
        tmp_path,
        "watched",
        "steps=6",
        "trainer.world_size=2",
        "telemetry.metrics_port=0",
        "rollouts.max_staleness_steps=2",
    )
    folder = tmp_path / "watched"
    controller = start("-m", "megatron_scalerl", "train", "recipes/tiny_cpu.yaml", *settings)
    try:
        ours, doors = watched(controller, folder)
    finally:
        controller.kill()
    assert controller.wait() == 0
    assert ours["scalerl_engines", "serving"] == 1 and ours["scalerl_planned_steps",] == 6
    assert 1 <= ours["scalerl_step",] <= 6 and ours["scalerl_weight_updates_total",] >= 1
    assert ours["scalerl_device_seconds_total", "trainer"] > 0 < ours["scalerl_sum_total", "tokens"]
    assert ours["scalerl_sum_total", "weight_update_seconds"] > 0
    assert doors and all(door.loopback for door in doors)
