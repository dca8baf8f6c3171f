"""What sites ask for, on a real Slurm: other options, several partitions, preemption, an allocation of one's own."""

import re
import sys

import pytest
from programs import printed
from slurm_runs import (
    JOB,
    ROOT,
    STAND_IN_PROGRAM,
    WITH_STAND_INS,
    check_completed,
    output_of,
    starts,
    steps,
    submitted,
    wait_for,
    wait_for_end,
    write_recipe,
    write_site,
)

from megatron_scalerl.cluster import cluster as slurm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(new_cluster):
    """Jobs in `high` take the place of others, which get Slurm's signal and 60 s."""
    with new_cluster("node1", "node2", preemption="preempt_send_user_signal") as made:
        yield made


@pytest.fixture
def at_a_site(stand_in, tmp_path):
    """As `stand_in`, with options of sbatch in the site file."""

    def made(ends, *options, sbatch):
        words, run = stand_in(ends, *options)
        variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        write_site(tmp_path / "site.yaml", STAND_IN_PROGRAM, environment=variables, sbatch=sbatch)
        return words, run

    return made


def test_typed_gpus_with_memory_for_each_on_shared_nodes_of_either_partition(at_a_site, capsys, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    sbatch = {"gres": "gpu:h100", "mem-per-gpu": "20M", "exclusive": False, "comment": "two words"}
    words, run = at_a_site("finish", "--gpus", "8", sbatch=sbatch)
    words[words.index("--partition") + 1] = "others,high"
    [job] = submitted(words, capsys)
    check_completed(run, job)
    [start] = starts(run)
    found = start["environment"]
    assert found["SLURM_GPUS_ON_NODE"] == "8" and found["https_proxy"] == "http://proxy:3128"
    shown = slurm._ask("scontrol", "show", "job", "--oneliner", job)
    assert (
        "MemPerTres=gres:gpu:20 " in shown and "TresPerNode=gres:gpu:h100:8" in shown and "Comment=two words" in shown
    )
    assert "OverSubscribe=OK" in shown and re.search(" Partition=(others|high) ", shown)
    assert found["SLURM_CPUS_ON_NODE"] == "16", "all of the node, which nothing else keeps to the job"


def test_a_preempted_run_saves_within_the_grace_time_and_goes_on(at_a_site, tmp_path, capsys):
    words, run = at_a_site("wait finish", sbatch={"nodelist": "node1", "exclusive": True})
    [job] = submitted(words, capsys)
    wait_for(lambda: starts(run))
    script = tmp_path / "high.sbatch"
    script.write_text("#!/bin/bash\nsleep 3\n")
    high = slurm.submit(script, ["--partition=high", "--exclusive", "--nodelist=node1", "--output=/dev/null"])
    assert wait_for_end(high) == "COMPLETED"
    check_completed(run, job)
    assert (run / f"slurm/{job}.0/controller.exit").read_text() == "75\n", "saved"
    assert len(starts(run)) == 2 and "saved; queued again" in output_of(run, job)


@pytest.mark.full
def test_a_run_in_an_allocation_of_ones_own(tmp_path, tiny, on_login_node):
    """Real trainer ranks on two nodes, stand-in engines; the controller is on the node that asks."""
    run = write_recipe(tmp_path / "r.yaml", tiny, output_dir=tmp_path, steps=2, validation={"every_steps": 0})
    words = [sys.executable, WITH_STAND_INS, "train", tmp_path / "r.yaml", "--hosts", "slurm", "--slots", "2"]
    argv = ["salloc", *JOB[:4], "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8", *words, "engine.count=2"]
    printed(*argv, timeout=600, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert steps(run) == 2
