"""Checks of GPUs: each fault of a host is found, on its GPU alone, and a query that a GPU lacks is no fault.

A stand-in has the faults; no GPU has been asked by these tests.
"""

import inspect
import os
import re
import sys
from pathlib import Path

import pynvml
import pytest
from fakes.nvml import HOSTS, StandInNvml

from megatron_scalerl.cluster.gpus import examine_gpus, gpus_in_process

TESTS = Path(__file__).parents[1]


def found(host, needed=8, visible=None):
    """name -> check."""
    return {check.name: check for check in examine_gpus(HOSTS[host](), needed=needed, visible=visible).checks}


def wrong(checks):
    return {name: check.status for name, check in checks.items() if check.status not in ("ok", "skipped")}


def test_a_healthy_host_passes_every_check():
    checks = found("healthy")
    assert {check.status for check in checks.values()} == {"ok"} and len(checks) == 8
    assert checks["GPUs"].found == "8 x NVIDIA H100 80GB HBM3"
    assert checks["driver"].found == "580.95.05, for CUDA up to 13.0"
    assert checks["NVLink"].found == "18 active links on every GPU"


FOUND = {
    "pending remap": ("row remapping", "failed", r"GPU 3: row remapping pending"),
    "failed remap": ("row remapping", "failed", r"GPU 3: row remapping failed"),
    "foreign memory": ("GPU memory", "failed", r"GPU 3: 70512 MiB in use by pid 4711 70000 MiB, pid 4712 512 MiB"),
    "unseen memory": ("GPU memory", "failed", r"GPU 3: 70512 MiB in use by processes that are not visible here"),
    "hot": ("GPU clocks", "failed", r"GPU 3: hardware thermal slowdown, hardware slowdown"),
    "power brake": ("GPU clocks", "failed", r"GPU 3: power brake"),
    "warm": ("GPU clocks", "warning", r"GPU 3: software thermal slowdown"),
    "link down": ("NVLink", "failed", r"GPU 3: 17 of 18 links active"),
    "no links on one": ("NVLink", "failed", r"GPU 3: 0 of 0 links active"),
    "mig": ("MIG", "failed", r"GPU 3: enabled"),
    "two models": ("GPUs", "failed", r"7 x NVIDIA H100 80GB HBM3, 1 x NVIDIA A100-SXM4-80GB"),
    "seven": ("GPUs", "failed", r"7 x NVIDIA H100 80GB HBM3"),
    "old driver": ("GPU clocks", "failed", r"GPU 3: hardware thermal slowdown"),
}


@pytest.mark.parametrize("host", FOUND)
def test_one_fault_is_one_check_that_names_the_gpu(host):
    name, status, text = FOUND[host]
    checks = found(host)
    assert wrong(checks) == {name: status}
    assert re.fullmatch(text, checks[name].found), checks[name].found
    assert checks[name].expected and checks[name].remedy


def test_uncorrected_errors_since_the_driver_was_loaded_fail():
    assert wrong(found("volatile ecc")) == {"ECC, since the driver was loaded": "failed"}


@pytest.mark.parametrize("host", ["power capped", "no nvlink", "no bridges", "old ecc", "monitoring agent"])
def test_what_is_no_fault_passes(host):
    assert wrong(found(host)) == {}


def test_queries_that_no_gpu_supports_are_skipped():
    checks = found("nothing supported")
    assert checks.pop("GPUs").status == "ok"
    assert {check.status for check in checks.values()} == {"skipped"} and len(checks) == 7
    rules = [check for name, check in checks.items() if name not in ("NVLink", "driver")]
    assert len(rules) == 5 and all("Not Supported" in check.found for check in rules)


def test_a_driver_that_went_away_fails():
    checks = found("driver gone", needed=None)
    assert {name: check.status for name, check in checks.items()} == {"GPUs": "failed"}
    assert "Driver Not Loaded" in checks["GPUs"].found


def test_a_lost_gpu_fails_and_the_others_are_still_checked():
    checks = found("lost")
    assert checks["GPUs"].found == "7 x NVIDIA H100 80GB HBM3, 1 x (unnamed: GPU is lost)"
    assert set(wrong(checks).values()) == {"failed"}
    assert {checks[name].found for name in ("GPU memory", "MIG", "NVLink")} == {"GPU 3: GPU is lost"}


@pytest.mark.parametrize("host", ["no driver", "no library", "no gpu"])
def test_a_host_without_gpus_is_skipped_unless_gpus_are_needed(host):
    for needed, status in ((None, "skipped"), (8, "failed")):
        [check] = found(host, needed=needed).values()
        assert (check.name, check.status) == ("GPUs", status)


def test_gpus_of_other_jobs_are_not_judged():
    assert wrong(found("foreign memory", needed=2, visible="0,1")) == {}
    assert wrong(found("foreign memory", needed=2, visible="2,3")) == {"GPU memory": "failed"}
    assert wrong(found("foreign memory", needed=1, visible="GPU-00000003")) == {"GPU memory": "failed"}
    assert found("healthy", needed=2, visible="0")["GPUs"].status == "failed"
    assert found("healthy", needed=None, visible="")["GPUs"].found == "no GPU: CUDA_VISIBLE_DEVICES is ''"


def test_a_visible_gpu_that_is_not_there_fails():
    check = found("seven", needed=None, visible="0,1,2,3,4,5,6,7")["GPUs"]
    assert check.status == "failed" and "no GPU is called 7" in check.found
    assert found("seven", needed=2, visible="6, 5")["GPUs"].found == "2 x NVIDIA H100 80GB HBM3"


def in_process(host, tmp_path, monkeypatch, **limits):
    """The reading of the process, in which `import pynvml` gives the stand-in."""
    lines = ["import sys", f"sys.path.insert(0, {str(TESTS)!r})", "from fakes.nvml import HOSTS"]
    (tmp_path / "pynvml.py").write_text("\n".join([*lines, f"sys.modules[__name__] = HOSTS[{host!r}]()"]) + "\n")
    root = str(Path(sys.modules["megatron_scalerl"].__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), root]))
    return gpus_in_process(8, **{"limit_s": 240, **limits})


@pytest.mark.parametrize("host", ["healthy", "nothing supported", "unknown"])
def test_the_reading_of_the_process_is_that_of_the_function(host, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert in_process(host, tmp_path, monkeypatch) == examine_gpus(HOSTS[host](), needed=8, visible=None)


def test_a_driver_that_hangs_or_crashes_fails_in_one_line(tmp_path, monkeypatch):
    hanging = in_process("hanging", tmp_path, monkeypatch, limit_s=0.2)
    crashed = in_process("crashing", tmp_path, monkeypatch)
    assert [(check.status, check.found) for report in (hanging, crashed) for check in report.checks] == [
        ("failed", "NVML did not answer within 0.2 s"),
        ("failed", "the process that queries NVML ended with code 7: no output"),
    ]


def test_the_stand_in_has_the_names_arguments_and_constants_of_the_real_module():
    public = [name for name in dir(StandInNvml) if name.startswith(("nvml", "NVML_"))]
    assert len(public) > 25
    for name in public:
        real, ours = getattr(pynvml, name), getattr(StandInNvml, name)
        if callable(ours):
            parameters = [p for p in inspect.signature(ours).parameters if p != "self"]
            assert parameters == list(inspect.signature(inspect.unwrap(real)).parameters), name
        else:
            assert real == ours, name


def test_a_machine_without_a_driver_says_so():
    """This machine, or one with GPUs: either way the real module answers in the process."""
    report = gpus_in_process(None)
    assert bool(report.driver) != report.checks[0].found.startswith("no GPU: NVML")
