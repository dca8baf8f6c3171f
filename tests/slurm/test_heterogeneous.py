"""Heterogeneous jobs on a real Slurm: trainer nodes in one component, engine nodes of another partition in a second.

The program is a stand-in; its `doctor` is the real one with stand-in GPUs (tests/slurm/stand_in_program.py).
"""

import subprocess

import pytest
from slurm_runs import output_of, starts, status, submitted, wait_for, wait_for_end

from megatron_scalerl.__main__ import main
from megatron_scalerl.cluster import cluster as slurm

pytestmark = pytest.mark.slow
ONE_EACH = ["--gpus-per-node", "4", "--engine-nodes", "1", "--engine-partition", "others"]
ONE_EACH += ["--engine-gpus-per-node", "4", "--any-file-system", "trainer.world_size=4", "engine.count=4"]
ONE_EACH += ["--max-requeues", "1"]
TWO_AND_TWO = ["--nodes", "2", "--gpus-per-node", "8", "--engine-nodes", "2", "--engine-gpus-per-node", "2"]
TWO_AND_TWO += ["trainer.world_size=16"]
"""With ONE_EACH: two nodes each."""


def components_of(start):
    """Nodes of both components in which the stand-in started."""
    lists = [start["environment"][f"SLURM_JOB_NODELIST_HET_GROUP_{number}"] for number in (0, 1)]
    return [slurm.hostnames(nodes) for nodes in lists]


def test_saved_and_gone_on_with_in_the_next_job(stand_in, capsys):
    words, run = stand_in("wait finish", *ONE_EACH)
    [job, later] = submitted(words, capsys)
    [start] = wait_for(lambda: starts(run), "the start of the program")
    assert components_of(start) == [["node1"], ["node3"]] and start["node"] == "node1"
    assert start["argv"][3:10] == ["3", "--hosts", "slurm", "--slots", "4", "--engine-slots", "4"]
    assert {file.name for file in (run / "slurm" / f"{job}.0" / "nodes").glob("n*.json")} == {
        "node1.json",
        "node3.json",
    }
    said = status(run, capsys)
    assert f"job {job}: RUNNING (node1, node3)" in said and "has left the job" not in said
    assert f"job {later}: PENDING (" in said
    assert main(words) == 2
    assert f"has job {job} already, RUNNING; scancel {job} ends it" in capsys.readouterr().err
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    assert wait_for_end(slurm.last_state, later) == "COMPLETED", output_of(run, later)
    assert len(starts(run)) == 2 and "saved; the next job of the chain goes on" in output_of(run, job)


def test_an_engine_node_that_is_unfit_is_named(stand_in, capsys):
    words, run = stand_in("finish", *ONE_EACH, "--max-requeues", "0")
    (run / "slurm" / "gpus-node3").write_text("pending remap")
    [job] = submitted(words, capsys)
    assert wait_for_end(slurm.last_state, job) == "FAILED"
    assert "unfit node3: row remapping" in output_of(run, job) and starts(run) == []


def test_what_slurm_or_the_cluster_cannot_do_is_refused(stand_in, tmp_path, capsys):
    """What the nodes do not hold: test_allocation.py has all of it."""
    words, run = stand_in("finish", *ONE_EACH)
    for more, said in (
        (["--engine-partition", "other"], "--engine-partition: "),
        (["--engine-nodes", "3"], "--engine-nodes: 3 is out of range: partition others has 2 nodes"),
        (["--engine-nodes", "0"], "--engine-partition requires --engine-nodes"),
    ):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "r.yaml").write_bytes((tmp_path / "r.yaml").read_bytes())
    options = [word for word in words[2:] if "=" not in word]
    assert main(["submit", "--array", str(tmp_path / "folder"), *options]) == 2
    assert "--engine-nodes: does not work with --array" in capsys.readouterr().err
    assert slurm.queued() == [] and not (run / "slurm" / "jobs.jsonl").exists()
    assert main([*words, "--dry-run"]) == 0
    assert "nothing is submitted" in capsys.readouterr().out and slurm.queued() == []


class TestNodesThatFail:
    """On clusters of their own, which give up a silent node after 5 s."""

    pytestmark = pytest.mark.full

    @pytest.fixture
    def cluster(self, new_cluster):
        with new_cluster("node1", "node2", "node3", "node4", silence_s=5) as made:
            yield made

    @pytest.mark.parametrize("lost", ["node1", "node3", "node4"])
    def test_the_next_job_goes_on_after_the_loss_of_a_node(self, lost, stand_in, cluster, capsys):
        """With one trainer node Slurm ends that component; the rest of the job is canceled by its other nodes."""
        more, run = stand_in("steps finish", *ONE_EACH, "--engine-nodes", "2", "--engine-gpus-per-node", "2")
        [job, later] = submitted(more, capsys)
        wait_for(lambda: len(list((run / "slurm").glob("beats-*"))) == 3, "the steps on three nodes")
        cluster.kill_daemon(lost)
        state = wait_for(lambda: (now := slurm.last_state(job)) != "RUNNING" and now, "the end of the job")
        assert state in ("NODE_FAIL", "CANCELLED", "COMPLETING")
        if lost != "node1":
            cluster.start_daemon(lost)  # there are no other nodes for engines
        assert wait_for_end(slurm.last_state, later, 180) == "COMPLETED", output_of(run, later)
        assert components_of(starts(run)[1]) == [["node2" if lost == "node1" else "node1"], ["node3", "node4"]]
        if lost == "node1":
            assert f"attempt {job}.0: the first node, node1, was lost" in status(run, capsys)

    @pytest.fixture
    def two_and_two(self, stand_in, cluster, capsys):
        """The run, its job and the next one of the chain, once steps run on all four nodes."""
        words, run = stand_in("steps finish", *ONE_EACH, *TWO_AND_TWO)
        [job, later] = submitted(words, capsys)
        wait_for(lambda: len(list((run / "slurm").glob("beats-*"))) == 4, "the steps on four nodes")
        return run, job, later

    @pytest.mark.parametrize("lost", ["node1", "node2"])
    def test_the_next_job_goes_on_after_the_loss_of_one_of_two_trainer_nodes(
        self, lost, two_and_two, cluster, capsys
    ):
        """Slurm takes the node out of the job, which runs on: without its script if that was the first one."""
        run, job, later = two_and_two
        cluster.kill_daemon(lost)
        if lost == "node2":
            wait_for(
                lambda: cluster.ask("squeue", "-h", "-j", job, "-t", "RUNNING", "-o", "%N") == "node1\nnode[3-4]\n",
                "node2 to leave",
            )
            (run / "slurm" / "broken").touch()  # as a trainer does whose ranks are lost
        expected = "CANCELLED" if lost == "node1" else "FAILED"
        assert wait_for_end(slurm.last_state, job) == expected, output_of(run, job)
        if lost == "node2":
            assert "nodes were lost: node2; the next job of the chain goes on" in output_of(run, job)
        cluster.start_daemon(lost)
        assert wait_for_end(slurm.last_state, later, 180) == "COMPLETED", output_of(run, later)
        assert components_of(starts(run)[1]) == [["node1", "node2"], ["node3", "node4"]]

    def test_the_run_goes_on_without_one_of_two_engine_nodes(self, two_and_two, cluster, capsys):
        run, job, _ = two_and_two
        cluster.kill_daemon("node3")
        wait_for(lambda: "node3 failed and has left the job" in status(run, capsys), "node3 to leave")
        assert slurm.last_state(job) == "RUNNING"
        (run / "slurm" / "enough").touch()
        assert wait_for_end(slurm.last_state, job) == "COMPLETED", output_of(run, job)
