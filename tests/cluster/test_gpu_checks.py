"""Checks of GPUs: each fault of a host is found, on its GPU alone, and a query that a GPU lacks is no fault.

A stand-in has the faults; no GPU has been asked by these tests.
"""

import inspect
import os
import sys
from pathlib import Path

import pynvml
import pytest
from fakes.nvml import HOSTS, StandInNvml

from megatron_scalerl.cluster.gpus import examine_gpus, gpus_in_process

TESTS = Path(__file__).parents[1]


def found(host, needed=8, visible=None):
    """name -> check."""
    return {check.name: check for check in examine_gpus(HOSTS[host](), needed_gpus=needed, visible=visible).checks}


def wrong(checks):
    return {name: check.status for name, check in checks.items() if check.status not in ("ok", "skipped")}


def test_a_healthy_host_passes_every_check():
    checks = found("healthy")
    assert {name: (check.status, check.found) for name, check in checks.items()} == {
        "GPUs": ("ok", "8 x NVIDIA H100 80GB HBM3"),
        "GPU health": ("ok", "no memory in use, no errors"),
        "driver": ("ok", "580.95.05, for CUDA up to 13.0"),
    }


FOUND = {
    "pending remap": ("GPU health", "GPU 3: row remapping is pending or has failed; "),
    "failed remap": ("GPU health", "GPU 3: row remapping is pending or has failed; "),
    "foreign memory": ("GPU health", "GPU 3: 70512 MiB in use by pid 4711, pid 4712; "),
    "unseen memory": ("GPU health", "GPU 3: 70512 MiB in use by processes that are not visible here; "),
    "volatile ecc": ("GPU health", "GPU 3: 2 uncorrected memory errors since the driver was loaded; "),
    "two models": ("GPUs", "7 x NVIDIA H100 80GB HBM3, 1 x NVIDIA A100-SXM4-80GB; "),
    "seven": ("GPUs", "7 x NVIDIA H100 80GB HBM3; the run takes 8: "),
}


@pytest.mark.parametrize("host", FOUND)
def test_one_fault_is_one_check_that_names_the_gpu(host):
    name, text = FOUND[host]
    checks = found(host)
    assert wrong(checks) == {name: "failed"}
    assert checks[name].found.startswith(text)


@pytest.mark.parametrize("host", ["old ecc", "monitoring agent", "nothing supported"])
def test_what_is_no_fault_passes(host):
    assert wrong(found(host)) == {}


def test_a_driver_that_went_away_fails():
    checks = found("driver gone", needed=None)
    assert {name: check.status for name, check in checks.items()} == {"GPUs": "failed"}
    assert "Driver Not Loaded" in checks["GPUs"].found


def test_a_lost_gpu_fails_and_the_others_are_still_checked():
    checks = found("lost")
    assert wrong(checks) == {"GPUs": "failed", "GPU health": "failed"}
    assert checks["GPUs"].found.startswith("7 x NVIDIA H100 80GB HBM3, 1 x (GPU is lost); ")
    assert checks["GPU health"].found.startswith("GPU 3: GPU is lost; ")


@pytest.mark.parametrize("host", ["no driver", "no library", "no gpu"])
def test_a_host_without_gpus_is_skipped_unless_gpus_are_needed(host):
    for needed, status in ((None, "skipped"), (8, "failed")):
        [check] = found(host, needed=needed).values()
        assert (check.name, check.status) == ("GPUs", status)


def test_gpus_of_other_jobs_are_not_judged():
    assert wrong(found("foreign memory", needed=2, visible="0,1")) == {}
    assert wrong(found("foreign memory", needed=2, visible="2,3")) == {"GPU health": "failed"}
    assert wrong(found("foreign memory", needed=1, visible="GPU-00000003")) == {"GPU health": "failed"}
    assert found("healthy", needed=2, visible="0")["GPUs"].status == "failed"
    assert found("healthy", needed=None, visible="")["GPUs"].found == "no GPU: CUDA_VISIBLE_DEVICES is ''"


def test_a_visible_gpu_that_is_not_there_fails():
    check = found("seven", needed=None, visible="0,1,2,3,4,5,6,7")["GPUs"]
    assert check.status == "failed" and "names 7, not found: lost" in check.found
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
    assert in_process(host, tmp_path, monkeypatch) == examine_gpus(HOSTS[host](), needed_gpus=8, visible=None)


def test_a_driver_that_hangs_or_crashes_fails_in_one_line(tmp_path, monkeypatch):
    hanging = in_process("hanging", tmp_path, monkeypatch, limit_s=0.2)
    crashed = in_process("crashing", tmp_path, monkeypatch)
    assert [check.status for report in (hanging, crashed) for check in report.checks] == ["failed"] * 2
    assert hanging.checks[0].found.startswith("megatron_scalerl.cluster.gpus did not answer within 0.2 s; ")
    assert "megatron_scalerl.cluster.gpus ended with code 7: no output; " in crashed.checks[0].found


def test_the_stand_in_has_the_names_arguments_and_constants_of_the_real_module():
    public = [name for name in dir(StandInNvml) if name.startswith(("nvml", "NVML_"))]
    assert len(public) >= 20
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
    assert (report.checks[-1].name == "driver") != report.checks[0].found.startswith("no GPU: NVML")
