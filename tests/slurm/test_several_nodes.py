"""Megatron ranks on two nodes and vLLM engines on two others, on a real Slurm: the run equals one on one host."""

import pytest
from e2e.whole_runs import overrides, run
from slurm_runs import status, submitted, wait_for_end

from megatron_scalerl.checkpoints.jsonl import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(3600)]
RECIPE = "recipes/tiny_cpu.yaml"
STEPS = 20


def settings(policy, out, name):
    # a weak policy's groups have both rewards, too, by a coin, and at a larger rate it would teach one answer alone
    more = f"""steps={STEPS} trainer.world_size=2 megatron.parallel.tensor_model_parallel_size=2 engine.count=2
        rollouts.deterministic=true rewards.verifier=tests.e2e.coin:toss optimizer.lr=1e-6
        rollouts.max_staleness_steps=0 rollouts.max_in_flight=16 validation.every_steps=5 checkpoint.every_steps=10"""
    return overrides(policy, out, name, *more.split())


def curve(folder):
    """What has to be equal, step by step and validation by validation."""
    steps = [
        (row["step"], row["train_pass_rate"], row["weight_digest"]) for row in read_jsonl(folder / "metrics.jsonl")
    ]
    return steps, [(row["step"], row["pass_rate"]) for row in read_jsonl(folder / "validation.jsonl")]


@pytest.fixture(scope="module")
def one_host(policy, tmp_path_factory):
    """The curve of the same run on one host."""
    folder = tmp_path_factory.mktemp("one")
    run("-m", "megatron_scalerl", "train", RECIPE, *settings(policy, folder, "one"), timeout=2400)
    return curve(folder / "one")


def test_a_run_on_four_nodes_equals_the_same_run_on_one_host(policy, one_host, tmp_path, on_login_node, capsys):
    words = ["submit", RECIPE, *settings(policy, tmp_path, "four"), "--partition", "gpu", "--time", "120"]
    words += ["--nodes", "4", "--slots", "1", "--gpus-per-node", "0"]
    [job] = submitted(words, capsys)
    state = wait_for_end(job, 2400)
    output = (tmp_path / f"four/slurm/{job}.out").read_text()
    assert state == "COMPLETED", output + status(tmp_path / "four", capsys)
    reports = {file.stem for file in (tmp_path / f"four/slurm/{job}.0/nodes").glob("node*.json")}
    assert reports == {f"node{number}" for number in (1, 2, 3, 4)}
    logs = sorted(file.name for file in (tmp_path / "four/logs").iterdir())
    assert {"engine-0.log", "engine-1.log"} <= set(logs)

    steps, validations = curve(tmp_path / "four")
    assert len(steps) == STEPS and len({digest for _, _, digest in steps}) == STEPS
    assert (steps, validations) == one_host
