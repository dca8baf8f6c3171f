"""Jobs of several nodes on a real Slurm: the check of the nodes, nodes that fail, the budget.

The program is a stand-in; its `doctor` is the real one with stand-in GPUs (tests/slurm/stand_in_program.py).
"""

import contextlib

import pytest
from slurm_runs import (
    FLEET,
    TWO,
    check_completed,
    nodes_of,
    output_of,
    starts,
    status,
    submitted,
    wait_for,
    wait_for_end,
)

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def link_down(cluster):
    cluster.link("node2", "down")
    try:
        yield
    finally:
        cluster.link("node2", "up")


def test_an_unfit_node_is_named_and_excluded(stand_in, capsys):
    words, run = stand_in("finish", *TWO, *FLEET)
    (run / "slurm/gpus-node2").write_text("pending remap")
    [job] = submitted(words, capsys)
    check_completed(run, job)
    [start] = starts(run)
    assert nodes_of(start) == ["node1", "node3"] and start["node"] == "node1"
    train = f"train --supervise --max-failures 3 --hosts slurm --slots 4 {run}/slurm/recipe.yaml"
    assert start["argv"] == train.split()
    folders = [run / f"slurm/{job}.{attempt}" for attempt in (0, 1)]
    assert [(folder / "preflight.exit").read_text() for folder in folders] == ["1\n", "0\n"]
    assert not (folders[0] / "controller.exit").exists()
    assert {file.name for file in (folders[1] / "nodes").glob("*.json")} == {"node1.json", "node3.json"}
    why = "node2 was unfit: GPU health: GPU 3: row remapping is pending or has failed; "
    assert f"attempt {job}.0: {why}" in status(run, capsys)
    assert "1 of 2 nodes are unfit: node2 (GPU health: GPU 3: row remapping" in output_of(run, job)
    assert "unfit nodes are excluded: node2; queued again" in output_of(run, job)


def test_where_all_nodes_are_unfit_none_is_excluded(stand_in, capsys):
    words, run = stand_in("finish", *TWO, *FLEET)
    (run / "slurm/gpus-node1").write_text("volatile ecc")
    (run / "slurm/gpus-node2").write_text("foreign memory")
    [job] = submitted(words, capsys)
    assert wait_for_end(job) == "FAILED"
    assert starts(run) == [] and not (run / "slurm/requeues").exists()
    assert "2 of 2 nodes are unfit: " in output_of(run, job)
    assert "last error: preflight: exit code 1: 2 of 2 nodes are unfit: " in status(run, capsys)


def test_a_node_on_which_the_check_never_starts_is_named(stand_in, on_login_node, capsys):
    words, run = stand_in("finish", *TWO, "--check-seconds", "60", *FLEET)
    with link_down(on_login_node):
        [job] = submitted(words, capsys)
        wait_for(lambda: "queued again" in output_of(run, job))
    assert "1 of 2 nodes are unfit: node2 (no report (" in output_of(run, job)
    check_completed(run, job)
    assert nodes_of(starts(run)[0]) == ["node1", "node3"]


def test_a_short_outage_of_a_nodes_network_ends_nothing(stand_in, on_login_node, capsys):
    words, run = stand_in("steps", *TWO, *FLEET)
    [job] = submitted(words, capsys)
    beats = run / "slurm/beats-node2"
    wait_for(beats.exists)
    with link_down(on_login_node):
        before = len(beats.read_text())
        wait_for(lambda: len(beats.read_text()) > before + 10)
    assert f"job {job}: RUNNING" in status(run, capsys)
    (run / "slurm/enough").touch()
    assert wait_for_end(job) == "COMPLETED"
    assert len(starts(run)) == 1


def test_a_budget_that_is_spent_ends_the_requeues(stand_in, capsys):
    """Also: the job asks for a save where a start would spend it, and a job without a budget left starts nothing."""
    words, run = stand_in("wait spend=0.5", "--gpus", "0", "--startup-seconds", "1")
    for hours in ("0.004", "0.4"):  # the first is 4 s of three devices
        [job] = submitted([*words, "--gpu-hours", hours], capsys)
        check_completed(run, job)
        assert len(starts(run)) == 2 and f"the budget of {hours} hours is spent" in output_of(run, job)
    assert "0.5 device-hours spent, 0 left of 0.4" in status(run, capsys)
