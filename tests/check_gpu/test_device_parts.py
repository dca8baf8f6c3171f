"""The parts logits, wire, parallel and environment: a benchmark cut off, a reader that dies, too little time."""

import json
import os
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stand_in_parts import dies, refuses

from megatron_scalerl.check_gpu.findings import Recorder, read_findings
from megatron_scalerl.check_gpu.part import Deadline, PartSetting
from megatron_scalerl.check_gpu.parts import environment, logits, parallel, wire
from megatron_scalerl.check_gpu.parts.parallel import case_for
from megatron_scalerl.check_gpu.table import PARALLEL, part_named
from megatron_scalerl.distributed import rendezvous


@pytest.fixture()
def record(tmp_path):
    return Recorder("part", tmp_path / "findings.jsonl")


def found(tmp_path):
    return {f.check.split("/")[1]: f for f in read_findings(tmp_path / "findings.jsonl")}


def setting(tmp_path, **changes):
    values = dict(part="part", module="m", on_gpu=False, size="toy", layers=None, limit_s=60.0, gpus=0)
    return PartSetting(folder=str(tmp_path), findings=str(tmp_path / "findings.jsonl"), **{**values, **changes})


OURS = ["cuda", "triton", "torch"]
HEAD = {"bench": "logits", "gemm_tflops": 600.0}
FIGURES = {"gemm_share_forward": 0.8, "gemm_share": 0.7, "extra_mib_forward": 9.0, "block_mib": 9.0}


def line(name, status="measured", **figures):
    return {"contender": name, "status": status, "total_seconds": 1.0, "error": 1e-6, **figures}


def test_a_benchmark_that_was_killed_keeps_its_results(record, tmp_path):
    lines = [HEAD, line("cuda", **FIGURES), line("triton"), line("torch")]
    output = "\n".join(map(json.dumps, lines)) + '\n{"contender": "Liger", "sta'
    logits.report_benchmark(record, logits.whole_lines(output), "ended at its limit of 9 s", OURS)
    said = found(tmp_path)
    assert said["benchmark"].status == "failed" and said["benchmark"].detail.startswith("ended at its limit of 9 s")
    assert (said["forward GEMM share"].status, said["GEMM share"].status) == ("passed", "missed")
    assert said["over Liger"].detail == "Liger: ended at its limit of 9 s"


@pytest.mark.parametrize("status", ["failed: CompilationError", None])
def test_each_of_our_backends_has_to_be_measured(status, record, tmp_path):
    lines = [HEAD, line("torch"), line("triton"), *([line("cuda", status)] if status else [])]
    logits.report_benchmark(record, lines, "", OURS)
    said = found(tmp_path)
    assert said["benchmark"].status == "failed" and f"cuda: {status or 'no line'}" in said["benchmark"].detail
    logits.report_benchmark(Recorder("part", tmp_path / "two.jsonl"), [*lines, line("cuda", **FIGURES)], "", OURS)
    assert read_findings(tmp_path / "two.jsonl")[0].status == "passed"


def test_the_benchmark_has_the_remaining_time_of_the_part(record, tmp_path):
    class StandInDeadline:
        def left(self):
            return 0.3

    begun = time.monotonic()
    logits._benchmark(setting(tmp_path), record, StandInDeadline())
    assert time.monotonic() - begun < 60
    assert found(tmp_path)["benchmark"].detail.startswith("stopped at its time limit after 0 s; last log line: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "read, why",
    [(dies, "its process ended with exit code 3"), (refuses, "RuntimeError: CUDA error: invalid resource handle")],
)
def test_a_reader_that_dies_is_reported_at_once(read, why, record, tmp_path):
    """Its exit is noticed: no event within the time limit would be another detail. Stand-ins for a driver's error."""
    wire._shared(record, torch.device("cpu"), read)
    [one] = found(tmp_path).values()
    assert one.status == "failed" and one.detail == f"cpu: expected the sum 2.14745e+09, found None; {why}"


@pytest.mark.slow
def test_a_tensor_is_read_by_another_process_and_sending_listens_on_loopback_only(record, tmp_path, monkeypatch):
    for name in rendezvous.listen_only_at("x"):
        monkeypatch.setenv(name, "of another test")
    wire._shared(record, torch.device("cpu"))
    wire._send(record, torch.device("cpu"), matrices=1, width=8)
    said = found(tmp_path)
    assert said["tensor between processes"].status == "passed" and said["send"].status == "measured"
    assert {os.environ[name] for name in rendezvous.listen_only_at("x")} == {rendezvous.LOOPBACK}


def test_launches_of_layouts_have_time_to_import_and_leave_some_for_the_broadcast(tmp_path, record, monkeypatch):
    """Ranks are left out; what is asked of them is looked at."""
    asked = []

    def stand_in_ranks(count, target, job, *, folder, timeout_s, env):
        asked.append((count, [run["layout"] for run in job["runs"]], timeout_s))
        answer = {"before": [-1.0], "after": [-1.0], "loss": 1.0, "grad_norm": 1.0}
        return [{run["layout"]: answer for run in job["runs"]}]

    monkeypatch.setattr(parallel, "run_ranks", stand_in_ranks)
    policies = {kind: parallel.Policy(kind=kind, path=Path("p"), seed=1, own=0.1) for kind in ("llama", "qwen3_moe")}
    limit = part_named("parallel").limit_s
    given = setting(tmp_path, on_gpu=True, size="full", gpus=2, limit_s=limit)
    for layers, dtype in (("plain", "float32"), ("te", "bfloat16")):
        parallel._steps(given, record, Deadline(limit), policies, layers, dtype)
    assert len(asked) == 2 * (1 + len(PARALLEL)) and {timeout for _, _, timeout in asked} == {60.0}
    assert limit >= 30 * len(asked) + 90
    monkeypatch.setattr("megatron_scalerl.check_gpu.part.time", SimpleNamespace(monotonic=lambda: 0.0))
    late = Recorder("part", tmp_path / "late.jsonl")
    parallel._steps(replace(given, limit_s=100.0), late, Deadline(100.0), policies, "plain", "float32")
    assert len(asked) == 12  # 2 s are left beside the broadcast: nothing is started
    unmade = read_findings(tmp_path / "late.jsonl")
    assert [f.status for f in unmade] == ["not run"] * len(PARALLEL)
    assert all("2 s were left" in f.detail for f in unmade)


def test_the_widths_of_a_gpu_and_of_families_are_the_same():
    case = case_for("llama", toy=False)
    assert (case.std, case.settings["hidden_size"]) == (0.08, 512)
    assert sum(case.lengths) > 2 * case.micro_batch_tokens > 2 * max(case.lengths)


@pytest.mark.parametrize(
    "dtype, apart, failed",
    [
        ("float32", 2e-5, []),
        ("float32", 2e-4, ["after the step", "fp32 log-probs, max"]),
        ("bfloat16", 0.03, []),
        ("bfloat16", 0.2, ["after the step", "bf16 log-probs, mean"]),
    ],
)
def test_layouts_in_bf16_may_differ_by_rounding(dtype, apart, failed):
    one = {"before": [-1.0, -2.0], "after": [-1.5, -2.5], "loss": 1.0, "grad_norm": 2.0}
    other = one | {key: [value + apart for value in one[key]] for key in ("before", "after")}
    judged = parallel.distances("llama", other, one, dtype, own=0.05)
    assert sorted(d.name for d in judged if d.of_bound > 1) == failed


@pytest.mark.parametrize("lacks", [None, "gcc", "Python.h", "c++"])
def test_the_tools_that_triton_compiles_with_are_checked(lacks, record, tmp_path, monkeypatch):
    """Programs and header are stand-ins."""
    for name in ("gcc", "c++"):
        if name != lacks:
            (tmp_path / name).touch(mode=0o755)
    if lacks != "Python.h":
        (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    environment._compiler(setting(tmp_path), record)
    said = found(tmp_path)["compiler"]
    assert said.status == ("failed" if lacks else "passed")
    assert lacks is None or f"{'C compiler' if lacks == 'gcc' else lacks} absent" in said.detail
    monkeypatch.setenv("CC", "no-such-compiler")
    assert environment.c_compiler() is None
