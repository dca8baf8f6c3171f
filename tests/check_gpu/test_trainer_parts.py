"""The parts trainer, families and shapes at toy size: they report their declared checks and detect faults."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_scalerl.check_gpu import device_memory, step_checks
from megatron_scalerl.check_gpu.cases import case_of
from megatron_scalerl.check_gpu.device_memory import DeviceMemory, peak_since, used_by_driver
from megatron_scalerl.check_gpu.findings import Recorder, read_findings
from megatron_scalerl.check_gpu.part import PartSetting
from megatron_scalerl.check_gpu.parts import families, shapes
from megatron_scalerl.check_gpu.parts.trainer import Outcome
from megatron_scalerl.check_gpu.shape_run import SHAPES, fitting, toy
from megatron_scalerl.check_gpu.table import KINDS, part_named
from megatron_scalerl.plan.hardware import GIB

HERE = Path(__file__).parent


def setting(name, tmp_path):
    part = part_named(name)
    return PartSetting(
        part=name,
        module=part.module,
        on_gpu=False,
        size="toy",
        layers=part.layers,
        folder=str(tmp_path),
        findings=str(tmp_path / "findings.jsonl"),
        limit_s=240,
        gpus=0,
    )


def run_python(argv):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-m", *argv], env=env, check=True)


def with_faults(name, given, tmp_path):
    """Findings of the part, and of the same with faults."""
    faulty = tmp_path / "faulty.jsonl"
    run_python(["faulty_parts", name, given.to_json(), str(faulty)])
    return read_findings(Path(given.findings)), {f.check.split("/")[1]: f for f in read_findings(faulty)}


def declared(*parts):
    return [f"{name}/{check}" for name in parts for check in part_named(name).checks]


def failed(findings):
    return {name for name, finding in findings.items() if finding.status == "failed"}


@pytest.mark.slow
def test_the_trainer_part_reports_its_checks_and_detects_faults(tmp_path):
    found, faulty = with_faults("trainer", setting("trainer", tmp_path), tmp_path)
    assert sorted(f.check for f in found) == sorted(declared("trainer"))
    assert {f.check: f.status for f in found if f.status != "passed"} == {"trainer/memory after steps": "measured"}
    assert failed(faulty) == {"losses", "packing", "step fp32", "step bf16", "checkpoint"}
    assert "found_and_bound" in faulty["step fp32"].data  # the CPU's process did its part
    assert "dapo" in faulty["losses"].detail and faulty["losses"].value > 10
    assert faulty["packing"].data["found_and_bound"]["log-probs"][0] > 0.1
    assert faulty["checkpoint"].detail == (
        "1 of 135 tensors differ, first ['weight embedding.word_embeddings.weight']"
    )


@pytest.mark.slow
def test_the_families_part_reports_what_it_declares_and_feels_another_rope(tmp_path):
    given = setting("families-plain", tmp_path)
    found, faulty = with_faults("families", given, tmp_path)
    assert sorted(f.check for f in found) == sorted(declared("families-plain", "families-te"))
    assert [f.check for f in found if f.status != "passed"] == []
    assert failed(faulty) == set(part_named("families-te").checks)


def test_another_layers_step_is_not_run_without_that_of_plain_ones(tmp_path):
    record = Recorder("families-te", tmp_path / "findings.jsonl")
    families.same_step({"llama": {}}, tmp_path / families.RECORD, record)
    found = read_findings(tmp_path / "findings.jsonl")
    assert [(f.check, f.status) for f in found] == [(f"families-te/{k} same step as plain", "not run") for k in KINDS]


def outcome(seed, **changes):
    rng = np.random.default_rng(seed)
    values = dict(
        logprobs=-rng.random(100) * 8,
        loss=np.asarray(1.0),
        grad_norm=np.asarray(2.0),
        gradient=rng.standard_normal(1000),
        weights=rng.standard_normal(1000),
    )
    return Outcome(**{name: changes.get(name, lambda value: value)(value) for name, value in values.items()})


def over(distances):
    return [d.name for d in distances if d.of_bound > 1]


@pytest.mark.parametrize(
    "fault, felt",
    [
        ({"gradient": lambda g: 1.001 * g, "grad_norm": lambda n: 1.001 * n}, ["gradient norm", "gradient"]),
        ({"loss": lambda x: x / 2}, ["loss"]),
        ({"weights": lambda w: w * 1.0001}, ["weights"]),
        ({"logprobs": lambda x: x + 2e-4}, ["log-probs"]),
        ({"logprobs": lambda x: x * np.nan}, ["log-probs"]),
        ({}, []),
    ],
)
def test_a_step_in_fp32_must_equal_the_cpus(fault, felt):
    assert over(step_checks.compare_fp32(outcome(1, **fault), {"float32": outcome(1)})) == felt


@pytest.mark.parametrize("scale, felt", [(1.0, []), (1.4, []), (2.0, ["logprobs", "gradient", "weights"])])
def test_a_step_in_bf16_may_differ_as_much_as_the_cpus(scale, felt):
    def rounded(seed, scale):
        rng = np.random.default_rng(seed)
        names = ("logprobs", "gradient", "weights")
        noise = {name: lambda x: x * (1 + scale * 1e-2 * rng.standard_normal(x.shape)) for name in names}
        return outcome(1, **noise)

    cpu = {"float32": outcome(1), "bfloat16": rounded(2, 1.0)}
    assert over(step_checks.compare_bf16(rounded(3, scale), cpu)) == felt


@pytest.mark.slow
@pytest.mark.parametrize("leak, status", [(0, "passed"), (20_000, "failed")])
def test_a_memory_leak_in_the_trainer_is_detected(leak, status, tmp_path, monkeypatch):
    class StandInTrainer:
        kept = 0

        def step(self, batch):
            self.kept += leak

    trainer = StandInTrainer()
    zero = DeviceMemory(allocated=0, reserved=0, peak_allocated=0, peak_reserved=0, used=0, total=0)
    monkeypatch.setattr(step_checks, "memory", lambda: replace(zero, allocated=trainer.kept))
    record = Recorder("trainer", tmp_path / "findings.jsonl")
    step_checks.memory_after_steps(trainer, case_of("llama", toy=True), judged=True, record=record)
    [found] = read_findings(tmp_path / "findings.jsonl")
    assert found.status == status and len(found.data["allocated_bytes"]) == 5


@pytest.mark.slow
def test_the_shapes_part_reports_what_it_declares(tmp_path):
    given = setting("shapes-plain", tmp_path)
    run_python(["megatron_scalerl.check_gpu.part", given.to_json()])
    found = read_findings(Path(given.findings))
    assert sorted(f.check for f in found) == sorted(declared("shapes-plain"))
    assert {f.status for f in found} == {"measured"}
    for finding in found:
        if finding.check.endswith("MFU"):
            assert finding.data["tokens"] == 512 and 0 < finding.value < 1
        else:
            assert 0.5 < finding.data["ratio"] < 2
    # what a GPU's process would have left: the same, judged
    left = json.loads((tmp_path / "shapes-plain" / "8b.json").read_text())
    total, moving = left["predicted"]["total_bytes"], left["predicted"]["moving_bytes"]
    assert 0 < moving < total
    on_gpu = replace(given, on_gpu=True, findings=str(tmp_path / "gpu.jsonl"))
    shape = replace(SHAPES["8b"], layers=2)
    for factor, status in ((1.0, "passed"), (1.1, "passed"), (1.3, "missed"), (0.8, "missed")):
        gpu = {
            "gpu": "NVIDIA H100 80GB HBM3",
            "seconds": [9.0, 9.0, 1e-6, 2e-6, 3e-6],
            "peak": {
                "total": total * factor,
                "runtime": GIB,
                "allocated": GIB,
                "reserved": GIB + moving / 4,
                "others_known": True,
            },
        }
        path = tmp_path / f"gpu {factor}.jsonl"
        shapes.report(shape, left | gpu, "", on_gpu, Recorder("shapes-plain", path))
        speed, memory = read_findings(path)
        assert (memory.status, memory.data["ratio"]) == (status, pytest.approx(1 / factor))
        assert speed.unit == "of NVIDIA H100 SXM 80 GB's bf16 peak" and speed.data["step_seconds"] == 2e-6
        assert speed.value == pytest.approx(left["predicted"]["model_flops_per_token"] * 512 / 2e-6 / 989.4e12)
        assert speed.data["dense_utilization"] >= speed.value
        assert (speed.data["runtime_gib"], speed.data["fragmentation"]) == (1.0, pytest.approx(0.25))


def test_a_shape_without_room_gets_fewer_layers_or_is_not_run(tmp_path):
    shape = replace(toy(SHAPES["8b"]), layers=8)
    whole, need, fits = fitting(shape, tmp_path / "8", 2**50, te=False, gpu=False)
    assert (whole.layers, fits) == (8, True)
    fewer, less, fits = fitting(shape, tmp_path / "8", int(need.total_bytes), te=False, gpu=False)
    assert fewer.layers < 8 and fits and less.total_bytes * 1.1 <= need.total_bytes
    one, _, fits = fitting(shape, tmp_path / "8", 1000, te=False, gpu=False)
    assert (one.layers, fits) == (1, False)
    path = tmp_path / "findings.jsonl"
    left = {"fits": False, "free": GIB, "predicted": {"total_bytes": 2 * GIB}}
    shapes.report(one, left, "", setting("shapes-plain", tmp_path), Recorder("shapes-plain", path))
    assert [f.status for f in read_findings(path)] == ["not run"] * 2
    assert "one layer needs 2.2 GiB" in read_findings(path)[0].detail


@pytest.mark.slow
def test_a_shape_that_dies_or_hangs_says_so_and_ends(tmp_path):
    given = setting("shapes-plain", tmp_path)
    wrong = replace(toy(SHAPES["8b"]), name="wrong", dtype="float33")
    began = time.monotonic()
    problem = shapes.run_process([wrong], tmp_path, given, 0.5)
    assert problem.startswith("stopped at its time limit after 0 s") and time.monotonic() - began < 60
    problem = shapes.run_process([wrong], tmp_path, given, 120)
    assert problem.startswith("exit code 1: ") and "float33" in (tmp_path / "wrong.log").read_text()
    path = tmp_path / "findings.jsonl"
    shapes.report(wrong, None, problem, given, Recorder("shapes-plain", path))
    assert [f.status for f in read_findings(path)] == ["failed"] * 2


@pytest.mark.parametrize(
    "answer, rank, found",
    [
        ("echo 1024", "0", 2**30),
        ("echo '[N/A]'", "0", None),
        ("exit 9", "0", None),
        ('test "$2" = GPU-7 && echo 1', "0", 2**20),
        ('test "$2" = GPU-3 && echo 1', "1", 2**20),
    ],
)
def test_memory_of_other_processes_is_queried_from_the_driver(answer, rank, found, tmp_path, monkeypatch):
    """nvidia-smi is a stand-in that answers in its place."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7,GPU-3")
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert used_by_driver() == found
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert used_by_driver() is None


def test_a_peak_on_a_gpu_includes_the_runtime_and_not_other_processes(monkeypatch):
    """5 GiB on the device: 1 of others, 3 of the allocator now (3.5 at its peak), so 1 of CUDA and NCCL."""
    now = DeviceMemory(
        allocated=2 * GIB,
        reserved=3 * GIB,
        peak_allocated=3 * GIB,
        peak_reserved=7 * GIB // 2,
        used=5 * GIB,
        total=80 * GIB,
    )
    monkeypatch.setattr(device_memory, "memory", lambda: now)
    monkeypatch.setattr(device_memory.device, "HAVE_GPU", True)
    found = peak_since(GIB)
    assert (found.runtime, found.total, found.others_known) == (GIB, 9 * GIB // 2, True)
    unknown = peak_since(None)
    assert (unknown.runtime, unknown.others_known) == (2 * GIB, False)


@pytest.mark.parametrize("size, run", [("quick", ["8b"]), ("full", list(SHAPES))])
def test_each_shape_has_a_process_and_time_of_its_own(size, run, tmp_path, monkeypatch):
    """Processes are left out; what is asked of them is looked at."""
    asked = []

    def stand_in_process(group, folder, given, limit):
        asked.append(([shape.name for shape in group], group[0].layers, limit))
        return "left out"

    monkeypatch.setattr(shapes, "run_process", stand_in_process)
    given = replace(setting("shapes-plain", tmp_path), size=size, on_gpu=True, limit_s=203.0)
    shapes.run(given, Recorder("shapes-plain", Path(given.findings)))
    assert [names for names, _, _ in asked] == [[name] for name in run]
    assert asked[0][1] == (2 if size == "quick" else 4)
    assert asked[0][2] == pytest.approx(200 if size == "quick" else 75, rel=0.01)
    found = read_findings(Path(given.findings))
    assert sorted(f.check for f in found) == sorted(declared("shapes-plain"))
    assert {f.status for f in found if f.check.split("/")[1].split()[0] not in run} <= {"not run"}
