"""The check of several nodes: which node is to blame, steps that do not report."""

import os
import sys

import pytest
from command_line import refusal

from megatron_scalerl.__main__ import main
from megatron_scalerl.cluster import doctor_nodes
from megatron_scalerl.cluster.check import Check
from megatron_scalerl.cluster.doctor_nodes import examine_nodes, unfit_nodes

RESULTS = {"GPUs": "8 x H100", "driver": "580", "shared memory": "9 GiB"}


def report(*failed, **changed):
    checks = [Check(name, "ok", found) for name, found in (RESULTS | changed).items()]
    return [*checks, *(Check(name, "failed", "wrong") for name in failed)]


def test_failed_checks_and_missing_reports_name_their_node():
    assert unfit_nodes(
        {"a": report(), "b": report("inputs", "disk"), "d": [Check("w", "warning", "x")]}, {"c": "silent"}
    ) == {
        "b": "inputs: wrong; disk: wrong",
        "c": "silent",
    }


def test_the_few_that_differ_are_unfit():
    reports = {"a": report(driver="570"), "b": report(), "c": report(), "d": report(GPUs="none")}
    assert unfit_nodes(reports, {}) == {
        "a": "driver: 570, but 3 of 4 nodes have driver: 580",
        "d": "GPUs: none, but 3 of 4 nodes have GPUs: 8 x H100",
    }


def test_of_two_that_differ_the_first_is_right():
    assert set(unfit_nodes({"a": report(), "b": report(driver="570")}, {})) == {"b"}
    assert set(unfit_nodes({"b": report(driver="570"), "a": report()}, {})) == {"a"}


def test_space_may_differ_and_what_a_node_says_stays_in_one_line():
    changed = {"shared memory": "8 GiB"}
    assert unfit_nodes({"a": report(), "b": report(**changed)}, {}) == {}
    [why] = unfit_nodes({"a": report(), "b": [Check("GPUs", "failed", "\x1b[2J\tx\ny")]}, {}).values()
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
    open(options["json"], "w").write('[{"name": 1'); sys.exit(0)
checks = [{"name": "words", "status": "ok", "found": " ".join(sys.argv[2:4])}]
checks += [{"name": "GPUs", "status": "failed", "found": "7"}] * (node == "seven")
open(options["json"], "w").write(json.dumps(checks))
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Steps that are processes of this machine, and stand-ins for what they run."""
    (tmp_path / "step.py").write_text(STAND_IN_STEP)
    monkeypatch.setattr(doctor_nodes, "PROGRAM", (sys.executable, str(tmp_path / "step.py")))
    monkeypatch.setattr(doctor_nodes, "step_words", lambda node: ["env"])
    return tmp_path / "nodes"


@pytest.mark.slow
def test_every_node_is_asked_and_the_silent_ones_are_named(steps):
    found = examine_nodes(["a", "b", "seven", "fails", "half"], steps, ["recipe.yaml", "--gpus"], within_s=600.0)
    assert found == {
        "seven": "GPUs: 7",
        "fails": "no report (exit code 2; 124 means longer than 600 s): --json: no folder",
        "half": "no report (exit code 0; 124 means longer than 600 s): no output",
    }
    assert {line.split("\t")[0] for line in (steps / "bad").read_text().splitlines()} == set(found)


@pytest.mark.slow
def test_a_node_that_hangs_is_given_up_and_where_all_are_unfit_none_is_to_be_excluded(steps):
    found = examine_nodes(["hangs"], steps, [], within_s=0.5)
    assert found == {"hangs": "no report (exit code 124; 124 means longer than 0.5 s): no output"}
    assert not (steps / "bad").exists()


@pytest.mark.parametrize(
    "bad, line",
    [({}, "2 nodes are fit and agree: a, b"), ({"b": "x", "a": "y"}, "2 of 2 nodes are unfit: b (x); a (y)")],
)
def test_one_line_names_the_nodes_that_are_unfit(bad, line, monkeypatch, capsys):
    monkeypatch.setattr(doctor_nodes, "allocated_nodes", lambda: ["a", "b"])
    monkeypatch.setattr(doctor_nodes, "examine_nodes", lambda *_, within_s: bad)
    assert main(["doctor", "--hosts", "slurm", "--reports", "f"]) == bool(bad)
    assert capsys.readouterr().out == f"{line}\n"


def test_the_nodes_of_an_allocation_begin_with_this_one(monkeypatch, tmp_path):
    (tmp_path / "scontrol").write_text('#!/bin/sh\nprintf "n1\\nn2\\nn3\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    assert doctor_nodes.allocated_nodes() == ["n2", "n1", "n3"]


@pytest.mark.parametrize(
    "words, said",
    [
        ("--hosts slurm", "give --hosts and --reports together"),
        ("--hosts slurm --reports f", "--hosts slurm: this process is in no allocation"),
    ],
)
def test_wrong_options_are_one_line(words, said, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert said in refusal(["doctor", *words.split()], capsys)
