"""The bench measures every contender, and judges targets by what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from logit_contenders import NAIVE

TOOL = Path(__file__).parents[2] / "tools" / "bench_logits.py"


def line(contender, **figures):
    return {"contender": contender, "status": "measured", **figures}


def test_targets_are_judged_by_the_lines(bench):
    """Half of naive's time meets 1.15; 40 % of its memory does not meet a third; what is missing is neither."""
    lines = [
        line(NAIVE, total_seconds=10.0, extra_mib=1000.0),
        line("torch, 512 MiB", total_seconds=5.0, extra_mib=400.0, error=6e-5),
        {"contender": "torch, 96 MiB", "status": "failed: out of memory"},
    ]
    found = {(t["contender"], t["what"].split()[0]): t for t in bench.targets(lines, "cpu")}
    assert found["torch, 512 MiB", "total_seconds"] == {
        "contender": "torch, 512 MiB",
        "what": f"total_seconds over {NAIVE}",
        "target": "<= 1.15",
        "found": 0.5,
        "met": True,
    }
    assert [found["torch, 512 MiB", what]["met"] for what in ("extra_mib", "error")] == [False, False]
    assert found["torch, 96 MiB", "total_seconds"]["met"] is None


def test_a_share_of_the_gemm_rate_has_to_be_reached(bench):
    figures = {"gemm_share_forward": 0.76, "gemm_share": 0.77, "extra_mib_forward": 512.0, "block_mib": 1025.0}
    lines = [line("cuda", total_seconds=1.0, error=1e-6, **figures), line("Liger", total_seconds=2.5)]
    found = {t["what"]: (t["target"], t["met"]) for t in bench.targets(lines, "gpu") if t["contender"] == "cuda"}
    assert found["gemm_share_forward"] == (">= 0.75", True) and found["gemm_share"] == (">= 0.78", False)
    assert found["extra_mib_forward"][1] is True and found["block_mib"][1] is False
    assert found["total_seconds over Liger"] == ("<= 0.5", True)
    assert found["total_seconds over cut_cross_entropy, no filter"] == ("<= 1", None)


PEERS_THAT_FAIL = """
import os, signal, sys
sys.path.insert(0, "tools")
import bench_logits as bench
import torch

class CompilationErrorStandIn(Exception):
    'What Triton raises is no RuntimeError.'

def raising(error):
    def run(h, w, y):
        raise error
    return run

def late(h, w, y):
    late.calls += 1
    if late.calls == 3:
        raise AssertionError("in the second round")
    return (h @ w.t()).sum(), None
late.calls = 0

def working(h, w, y):
    return bench.contenders_on("cpu")[3].run(h, w, y)

stand_ins = {
    "compiler": raising(CompilationErrorStandIn("at 12:8:\\n  tl.dot(a, b)\\n  ^")),
    "exit": raising(SystemExit(0)),
    "memory": raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")),
    "crash": lambda h, w, y: os.kill(os.getpid(), signal.SIGSEGV),
    "gone": lambda h, w, y: os._exit(0),
    "late": late,
    "well": working,
}
real = bench.contenders
def contenders(options):
    found = [c for c in real(options) if not c.peer]
    found.insert(1, bench.Contender(name="ours, broken", run=raising(TypeError("no such argument"))))
    return found + [bench.Contender(name=name, run=run, peer=True) for name, run in stand_ins.items()]
bench.contenders = contenders
bench.main(bench.parser().parse_args(["--tokens=64", "--hidden=32", "--vocab=512", "--rounds=1", "--threads=1"]))
"""


def test_whoever_fails_ends_only_its_own_line():
    """Stand-ins for fault injection: an exception of any class, an exit, a crash, before the first round or in it."""
    found = subprocess.run(
        [sys.executable, "-c", PEERS_THAT_FAIL],
        cwd=TOOL.parents[1],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    head, *lines, last = [json.loads(text) for text in found.stdout.strip().splitlines()]
    assert [line["contender"] for line in lines][:2] == ["torch, 512 MiB", "ours, broken"]  # ours first
    status = {line["contender"]: line["status"] for line in lines}
    assert {name: said for name, said in status.items() if said != "measured"} == {
        "ours, broken": "failed: TypeError: no such argument",
        "compiler": "failed: CompilationErrorStandIn: at 12:8:",
        "exit": "failed: SystemExit: 0",
        "memory": "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 8 GiB",
        "crash": "failed: its process ended with SIGSEGV",
        "gone": "failed: it ended without a result",
        "late": "failed: AssertionError: in the second round",
    }
    assert status["well"] == status["torch, 96 MiB"] == "measured" and head["gemm_tflops"] > 0
    assert all(line["extra_mib"] >= 0 for line in lines if line["status"] == "measured")
    assert len(last["targets"]) == 7 and last["targets"][0]["found"] is not None


@pytest.mark.slow
def test_a_line_for_the_run_each_contender_and_the_targets():
    shape = {"tokens": 2048, "hidden": 32, "vocab": 8192, "threads": 1}
    flags = [f"--{name}={value}" for name, value in shape.items()]
    command = [sys.executable, str(TOOL), *flags, "--rounds=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout
    head, *lines, last = [json.loads(text) for text in output.strip().splitlines()]
    assert {name: head[name] for name in shape} == shape and head["gemm_tflops"] > 0
    by_name = {found["contender"]: found for found in lines}
    assert len(by_name) == 6 and all(found["status"] == "measured" for found in lines)
    naive, ours = by_name["naive, fp32 logits"], by_name["torch, 512 MiB"]
    # The naive path keeps [2048, 8192] in fp32, 64 MiB, and more than once.
    assert naive["extra_mib"] > 128 and naive["error"] < 5e-5 and ours["error"] < 5e-5
    assert by_name["torch linear_cross_entropy"]["error"] > 1e-3  # bf16
    assert naive["total_seconds"] > 0 and naive["total_cpu_seconds"] > naive["forward_cpu_seconds"] > 0
    assert ours["gemm_share"] == pytest.approx(
        4 * 2 * 2048 * 32 * 8192 / (head["gemm_tflops"] * 1e12) / ours["total_seconds"], rel=2e-3
    )
    assert len(last["targets"]) == 7
