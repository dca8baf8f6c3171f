"""The node of one of two vLLM engines is cut off, on a real Slurm: the run goes on, for a while and for good."""

import json

import pytest
from e2e.whole_runs import overrides, words
from slurm_runs import held_by, rows, steps, submitted, wait_for, wait_for_end

from megatron_scalerl.cluster import cluster as slurm

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(3600)]
LIMIT_S = 600


@pytest.fixture
def cluster(new_cluster):
    """Gives up a silent node after 20 s."""
    with new_cluster("node1", "node2", "node3", silence_s=20) as made:
        yield made


@pytest.fixture
def run(policy, tmp_path, cluster, on_login_node, capsys):
    """A run with ranks on node1 and engines on node2 and node3 that has made a step: its folder and its job."""
    # at a larger rate, what the coin teaches would carry the policy to where two implementations differ
    more = """steps=100000 engine.count=2 engine.stall_timeout_s=10 engine.first_token_timeout_s=10
        engine.max_restarts=2 weights.timeout_s=15 rollouts.max_staleness_steps=4 rewards.verifier=tests.e2e.coin:toss
        optimizer.lr=1e-6 weights.probe_every=0 validation.every_steps=0 checkpoint.every_steps=5"""
    job_words = words("--partition gpu --time 120 --nodes 3 --gpus-per-node 0 --slots 1")
    settings = overrides(policy, tmp_path, "r", *words(more))
    [job] = submitted(["submit", "recipes/tiny_cpu.yaml", *settings, *job_words], capsys)
    folder = tmp_path / "r"
    wait_for(lambda: steps(folder) >= 2, LIMIT_S)
    assert states(folder) == {"engine-0": "serving", "engine-1": "serving"}
    yield folder, job
    slurm.cancel([job])
    wait_for_end(job, 120)


def states(folder):
    """Engine -> its last state."""
    return {row["name"]: row["state"] for row in rows(folder / "engines.jsonl")}


def last(folder, name):
    return [row for row in rows(folder / "engines.jsonl") if row["name"] == name][-1]


def charged(folder):
    """Devices of each heartbeat of the ledger."""
    text = (folder / "ledger.jsonl").read_text().splitlines()
    return [json.loads(line)["devices"] for line in text if '"heartbeat"' in line]


def test_an_engine_that_is_cut_off_for_a_while_rejoins(run, cluster):
    folder, job = run
    cluster.link("node3", "down")
    wait_for(lambda: states(folder)["engine-1"] != "serving", LIMIT_S)
    cluster.link("node3", "up")
    reached = steps(folder)
    wait_for(lambda: steps(folder) >= reached + 2, LIMIT_S)
    wait_for(lambda: states(folder)["engine-1"] == "serving", LIMIT_S)
    assert last(folder, "engine-1")["restarts"] >= 1
    assert held_by(job) == ["node1", "node2", "node3"]
    assert all(row["devices"] == 1 for row in rows(folder / "engines.jsonl")), "held, and charged, throughout"


def test_a_run_goes_on_without_an_engine_whose_node_is_gone_and_pays_no_longer_for_it(run, cluster):
    folder, job = run
    cluster.link("node3", "down")
    wait_for(lambda: held_by(job) == ["node1", "node2"], LIMIT_S)
    wait_for(lambda: last(folder, "engine-1")["given_up"], LIMIT_S)
    assert last(folder, "engine-1")["devices"] == 0
    reached = steps(folder)
    wait_for(lambda: steps(folder) >= reached + 3, LIMIT_S)
    assert states(folder)["engine-0"] == "serving"
    before = len(charged(folder))
    wait_for(lambda: len(charged(folder)) >= before + 2, LIMIT_S)
    assert charged(folder)[-1] == pytest.approx(2.0)
