"""Nodes that fail under a job of several nodes, on a real Slurm that gives up a silent node after 5 s.

The program is a stand-in that has a step on each node (tests/slurm/stand_in_program.py).
"""

import pytest
from slurm_runs import (
    FLEET,
    TWO,
    check_completed,
    held_by,
    nodes_of,
    output_of,
    starts,
    status,
    submitted,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture
def cluster(new_cluster):
    """One for each test, since the nodes of a test before may still be down. Its own names come first on the path."""
    with new_cluster("node1", "node2", "node3", silence_s=5) as made:
        yield made


def started(stand_in, capsys):
    """(id, run folder) of a job of two nodes with a step on each."""
    words, run = stand_in("steps finish", *TWO, *FLEET)
    [job] = submitted(words, capsys)
    wait_for((run / "slurm/beats-node2").exists)
    return job, run


def test_a_run_that_needs_the_lost_node_is_queued_again(stand_in, cluster, capsys):
    job, run = started(stand_in, capsys)
    cluster.kill_daemon("node2")
    wait_for(lambda: held_by(job) == ["node1"])
    (run / "slurm/broken").touch()  # srun says that the node failed, and waits for its task all the same
    check_completed(run, job, 120)
    assert "nodes were lost: node2; queued again" in output_of(run, job)
    assert nodes_of(starts(run)[1]) == ["node1", "node3"]


def test_the_loss_of_the_first_node_queues_the_job_again(stand_in, cluster, capsys):
    job, run = started(stand_in, capsys)
    cluster.kill_daemon("node1")
    check_completed(run, job, 120)
    assert nodes_of(starts(run)[1]) == ["node2", "node3"]
    assert f"attempt {job}.0: the first node, node1, was lost" in status(run, capsys)
