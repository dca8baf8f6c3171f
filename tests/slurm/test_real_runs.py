"""Real trainer ranks and vLLM engines on a real Slurm: lost nodes and time limits end attempts, not runs."""

import shlex
import sys

import pytest
from e2e.whole_runs import overrides
from slurm_runs import check_completed, output_of, rows, steps, submitted, wait_for, wait_for_end

from megatron_scalerl.cluster import cluster as slurm
from megatron_scalerl.rollouts.history import read_history

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(3600)]
RECIPE = "recipes/tiny_cpu.yaml"
STEPS = 12


@pytest.fixture
def cluster(new_cluster):
    """One for each test. Gives up a silent node after 10 s."""
    with new_cluster("node1", "node2", "node3", "node4", silence_s=10) as made:
        yield made


def settings(policy, folder, name, *more):
    # a weak policy's groups have both rewards, too, by a coin, and at a larger rate it would teach one answer alone
    own = f"""steps={STEPS} rollouts.deterministic=true rollouts.max_staleness_steps=0 rollouts.max_in_flight=16
        rewards.verifier=tests.e2e.coin:toss validation.every_steps=0 optimizer.lr=1e-6 trainer.start_timeout_s=120"""
    return overrides(policy, folder, name, *own.split(), *more)


def check_whole(folder):
    """Every step was made, and every batch is in the lineage once."""
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))
    groups = [group for batch in read_history(folder).batches for group in batch.group_ids]
    assert len(groups) == len(set(groups)) and len(read_history(folder).batches) >= STEPS


@pytest.mark.parametrize("lost", ["node1", "node2"], ids=["the controller's node", "a trainer rank's node"])
def test_a_run_resumes_on_the_nodes_that_are_left(policy, tmp_path, cluster, on_login_node, capsys, lost):
    """Two data-parallel ranks on node1 and node2, an engine on node3; node4 takes the place of the lost one."""
    words = settings(policy, tmp_path, "r", "trainer.world_size=2", "engine.count=1", "checkpoint.every_steps=2")
    job_words = ["--nodes", "3", "--gpus-per-node", "0", "--slots", "1", "--max-requeues", "3"]
    [job] = submitted(["submit", RECIPE, *words, "--partition", "gpu", "--time", "120", *job_words], capsys)
    folder = tmp_path / "r"
    wait_for(lambda: steps(folder) >= 4, 600)
    cluster.link(lost, "down")
    reached = steps(folder)
    wait_for(lambda: steps(folder) > reached + 2 or slurm.last_state(job) == "FAILED", 1500)
    check_completed(folder, job, 1500)
    check_whole(folder)
    attempts = [row["incarnation"] for row in rows(folder / "attempts.jsonl")]
    assert attempts[0] == f"{job}.0" and attempts[-1].startswith(f"{job}.1")


def test_a_run_that_its_time_limit_ends_twice_completes_as_one_without_a_limit(
    policy, tmp_path, on_login_node, capsys
):
    """Slurm's own signals, one to two minutes before the limit of four; all attempts together equal one."""
    steps_of = {}
    limits = ["--startup-seconds", "1", "--save-seconds", "1", "--max-requeues", "20"]
    for name, time_limit in (("whole", "120"), ("limited", "4")):
        words = settings(policy, tmp_path, name, "rewards.verifier=tests.slurm.slow_coin:toss")
        job_words = ["--partition", "gpu", "--time", time_limit, "--gpus", "0", *limits]
        [job] = submitted(["submit", RECIPE, *words, *job_words], capsys)
        assert wait_for_end(job, 1500) == "COMPLETED", output_of(tmp_path / name, job)
        check_whole(tmp_path / name)
        metrics = rows(tmp_path / name / "metrics.jsonl")
        steps_of[name] = [(row["step"], row["train_pass_rate"], row["weight_digest"]) for row in metrics]
    attempts = [row["incarnation"] for row in rows(tmp_path / "limited/attempts.jsonl")]
    assert len(attempts) >= 3, attempts
    assert steps_of["limited"] == steps_of["whole"]


def test_an_engine_of_another_job_serves_while_that_job_lasts(policy, tmp_path, on_login_node, capsys):
    words = settings(policy, tmp_path, "r", "steps=100000", "engine.count=1", "checkpoint.every_steps=0")
    words += ["rollouts.deterministic=false", "rollouts.max_staleness_steps=4"]
    words += ["--partition", "gpu", "--time", "120", "--nodes", "2", "--gpus-per-node", "0", "--slots", "1"]
    [job] = submitted(["submit", RECIPE, *words], capsys)
    folder = tmp_path / "r"
    wait_for(lambda: steps(folder) >= 2, 600)
    join = shlex.join([sys.executable, "-m", "megatron_scalerl", "engine", "--join", str(folder)])
    script = tmp_path / "engines.sbatch"
    script.write_text(f"#!/bin/bash\nsrun {join}\n")
    added = slurm.submit(script, ["--partition=gpu", "--time=60", "--gpus-per-node=1"])

    def joined(*states):
        found = [row for row in rows(folder / "engines.jsonl") if row["name"].startswith(f"extra-{added}-")]
        return bool(found) and found[-1]["state"] in states

    wait_for(lambda: joined("serving"), 600)
    reached = steps(folder)
    wait_for(lambda: steps(folder) >= reached + 3, 300)
    assert joined("serving")
    slurm.cancel([added])
    wait_for(lambda: joined("lost"), 120)
    reached = steps(folder)
    wait_for(lambda: steps(folder) >= reached + 2, 300)
    slurm.cancel([job])
    wait_for_end(job, 120)
