"""The check of several nodes: which node is to blame, steps that do not report."""

import os
import sys
import time
from types import SimpleNamespace

import pytest

from megatron_scalerl.__main__ import main
from megatron_scalerl.cluster import doctor_nodes
from megatron_scalerl.cluster.check import failed, ok, warning
from megatron_scalerl.cluster.doctor_nodes import examine_nodes, unfit, verdict
from megatron_scalerl.cluster.node import NodeReport

FACTS = {"GPUs": "8 x H100", "driver": "580", "recipe": "ab"}


def report(node, *checks, **facts):
    return NodeReport(format=1, host=node, time="", facts=FACTS | facts, checks=[ok("x", "y"), *checks])


def bad(name, found="wrong"):
    return failed(name, expected="right", found=found, remedy="r")


def judged(*reports, silent=None):
    return unfit({each.host: each for each in reports}, silent or {}, head=reports[0].host)


def test_nodes_that_agree_are_fit():
    assert judged(*(report(name, warning("w", expected="e", found="f", remedy="r")) for name in "abc")) == {}


def test_failed_checks_and_missing_reports_name_their_node():
    found = judged(report("a"), report("b", bad("GPUs"), bad("memory")), silent={"c": "no report"})
    assert found == {"b": "GPUs: expected right, found wrong; memory: expected right, found wrong", "c": "no report"}


def test_the_few_that_differ_are_unfit():
    found = judged(report("a", driver="570"), report("b"), report("c"), report("d", GPUs=""))
    assert found == {
        "a": "driver: 570, where 3 of 4 nodes have 580",
        "d": "GPUs: none, where 3 of 4 nodes have 8 x H100",
    }


def test_of_two_that_differ_the_head_is_right():
    assert set(judged(report("a"), report("b", recipe="cd"))) == {"b"}
    assert set(judged(report("b", recipe="cd"), report("a"))) == {"a"}
    assert set(judged(report("a"), report("b", recipe="c"), report("c"), report("d", recipe="c"))) == {"b", "d"}


def test_what_a_node_says_stays_in_one_line():
    [why] = judged(report("a"), report("b", bad("GPUs", "\x1b[2J\tx\ny")), report("c")).values()
    assert why.isprintable()


STAND_IN_STEP = """
import json, os, sys, time
options = dict(word[2:].split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
node = options["json"].rsplit("/", 1)[1].removesuffix(".json")
if node == "hangs":
    time.sleep(600)
if node == "fails":
    print("some output"); print("megatron-scalerl: --json: no folder"); sys.exit(2)
if node == "half":
    open(options["json"], "w").write('{"format": 1'); sys.exit(0)
checks = [{"name": "GPUs", "status": "failed", "found": "7", "expected": "8", "remedy": "r"}] * (node == "seven")
facts = {"words": " ".join(sys.argv[2:4])}
report = {"format": 1, "host": node, "time": "", "facts": facts, "checks": checks}
open(options["json"], "w").write(json.dumps(report)); sys.exit(bool(checks))
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Steps that are processes of this machine, and stand-ins for what they run."""
    (tmp_path / "step.py").write_text(STAND_IN_STEP)
    monkeypatch.setattr(doctor_nodes, "PROGRAM", (sys.executable, str(tmp_path / "step.py")))
    monkeypatch.setattr(doctor_nodes, "step_words", lambda node: ["env"])
    return tmp_path / "nodes"


@pytest.mark.slow
def test_every_node_is_asked_at_once_and_the_silent_ones_are_named(steps, monkeypatch):
    """By a clock of which almost all has passed where the last one, which hangs, is waited for."""
    clock = iter([0.0] * 6 + [599.5])
    monkeypatch.setattr(doctor_nodes, "time", SimpleNamespace(monotonic=lambda: next(clock, time.monotonic())))
    names = ["a", "b", "seven", "fails", "half", "hangs"]
    found = examine_nodes(names, steps, ["recipe.yaml", "--gpus"], within_s=600.0)
    assert found == {
        "seven": "GPUs: expected 8, found 7",
        "fails": "no report (its step ended with exit code 2): --json: no folder",
        "half": "no report (its step ended with exit code 0): no output",
        "hangs": "no report (within 600 s): no output",
    }
    lines = verdict(steps, names, found)
    assert f"unfit fails: {found['fails']}" in lines and len(lines) == len(found)
    assert {line.split("\t")[0] for line in (steps / "bad").read_text().splitlines()} == set(found)


def test_nodes_that_are_all_unfit_are_not_listed_for_exclusion(tmp_path):
    assert verdict(tmp_path, ["a", "b"], {"a": "x", "b": "y"})[-1].startswith("all 2 nodes are unfit")
    assert list(tmp_path.iterdir()) == []
    assert verdict(tmp_path, ["a", "b"], {}) == ["2 nodes are fit and agree: a, b"]


def test_the_nodes_of_an_allocation_begin_with_this_one(monkeypatch, tmp_path):
    (tmp_path / "scontrol").write_text('#!/bin/sh\nprintf "n1\\nn2\\nn3\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    assert doctor_nodes.allocated() == ["n2", "n1", "n3"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "slurm"], "--hosts requires --reports"),
        (["--hosts", "slurm", "--reports", "f"], "--hosts slurm: this process is in no allocation"),
    ],
)
def test_wrong_options_are_one_line(words, said, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err
