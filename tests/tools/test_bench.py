"""The benchmarks that users run: each ends at a toy size, with figures that fit each other."""

import json
import sys

import pytest
from programs import ROOT, ended

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(tmp_path):
    """Words of a command line, with {folder} for an empty folder that stays empty -> the lines of figures."""
    folder, out = tmp_path / "folder", tmp_path / "out.jsonl"
    folder.mkdir()
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}

    def run(words):
        name, *options = words.format(folder=folder).split()
        argv = [sys.executable, f"tools/bench_{name}.py", *options, "--json", out]
        done = ended(*argv, timeout=500, **variables)
        # 1: slower than a target, which other work on the machine may do
        assert done.returncode in (0, 1) and out.exists(), done.stderr[-2000:]
        assert list(folder.iterdir()) == []
        return [json.loads(line) for line in out.read_text().splitlines()]

    return run


@pytest.fixture
def warm(tiny, tmp_path):
    """The tiny task with a policy where a warm one would be."""
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm/policy").symlink_to(tiny / "base_policy")
    for name in ("prompts.jsonl", "held_out.jsonl"):
        (tmp_path / "warm" / name).symlink_to(tiny / name)
    return tmp_path / "warm"


def ratio(over, under):
    """Of two rounded figures."""
    return pytest.approx(over / under, rel=0.02, abs=1e-3)


@pytest.mark.full
def test_async(bench, warm):
    """One run of each kind."""
    [found] = bench(f"async --tiny {warm} --rounds 1 --steps 3 --skip 1 --arms 2")
    asynchronous, synchronous = found["steps_per_hour"].values()
    assert [arm[:2] for arm in found["steps_per_hour"]] == ["k8", "k0"]
    assert found["ratio"]["median"] == ratio(asynchronous["median"], synchronous["median"])


def test_checkpoint(bench):
    [found] = bench("checkpoint --toy --rounds 1 --folder {folder}")
    assert found["stopped_over_at_once"] == ratio(found["stopped"], found["at_once"])
    assert 0 < found["copied"] <= found["stopped"] and found["steps"] >= 1
    # bf16 weights, fp32 main weights and two moments of the embedding and the head alone
    assert found["bytes"] > 2 * 32_000 * 96 * 14


def test_controller(bench):
    words = "--engines 2 --in-flight 64 --tokens 2400 --delay 0.2 --warm-up 1 --seconds 1 --groups-per-batch 2"
    [found] = bench(f"controller {words} --decoders 1")
    tokens = found["steps"] * 2 * 16 * 2400
    assert tokens > 0 and found["tokens_per_s"] == pytest.approx(tokens / found["seconds"], rel=0.1)
    assert 0 < found["requests"] <= 64 and found["sockets"] >= found["requests"]
    assert 0 <= found["lag_ms"]["p50"] <= found["lag_ms"]["p99"] <= found["lag_ms"]["max"]
    assert found["processors"].keys() == {"controller", "engines", "trainer", "decoders"}


def test_convert(bench):
    """No process holds a tensor."""
    [found] = bench("convert --kind moe --gib 0.5 --rounds 1 --folder {folder}")
    assert 0 < found["largest_tensor"] < found["nbytes"]
    assert len(found["peak_anonymous"]) == 2
    assert all(0 < peak < found["promised_anonymous"] / 2 for peak in found["peak_anonymous"].values())


@pytest.mark.full
def test_decode(bench):
    [found] = bench("decode --toy")
    assert found["step_ms"].keys() == {"tiny", "1b"}
    for steps in found["step_ms"].values():
        assert steps.keys() == {"1", "64"} and steps["64"] > 0
    assert found["engine_step_ms"] == found["step_ms"]["tiny"]["1"] > 0


@pytest.mark.full
def test_episodes(bench):
    """Both arms sample as many tokens. A single episode at a time leaves the engine idle while its tool works."""
    [found] = bench("episodes --rounds 1 --episodes 4 --in-flight 1 --turn-tokens 16 --tool-seconds 0.2")
    episodes, single, slow = (found[name] for name in ("episodes", "single", "slow_tools"))
    assert found["ratio_of_each_round"] == [found["ratio"]]
    assert found["ratio"] == ratio(episodes["tokens_per_s"], single["tokens_per_s"])
    assert episodes["sampled_tokens"] == single["sampled_tokens"] == slow["sampled_tokens"] == 202
    assert (episodes["environment_tokens"], single["environment_tokens"]) == (656, 0)
    assert 0 < slow["engine_idle"] < 1 and episodes["engine_us_per_token"] > 0


def test_logits(bench):
    head, *lines = bench("logits --tokens=256 --hidden=32 --vocab=2048 --threads=1 --rounds=1 --peers none")
    ours = ["torch, 512 MiB", "torch, 96 MiB", "torch, loss in the chunk, 512 MiB"]
    assert [line["contender"] for line in lines] == [*ours, "naive, fp32 logits"]
    for line in lines:
        assert line["status"] == "measured" and 0 < line["error"] < 5e-5 and head["gemm_tflops"] > 0
        assert line["total_seconds"] > 0 and 0 < line["necessary_share"] <= line["gemm_share"]


def test_peer(bench, warm):
    """The product's arm: TRL is in none of the locks."""
    files = {"policy.path": "policy", "prompts.path": "prompts.jsonl", "prompts.held_out_path": "held_out.jsonl"}
    paths = " ".join(f"{key}={warm / file}" for key, file in files.items())
    [found] = bench(f"peer recipes/tiny_cpu.yaml {paths} --rounds 1 --steps 3")
    product = found["product"]
    assert product["tokens_per_s"] * product["step_s"] == pytest.approx(16 * 16 * 50, rel=0.3)
    assert product["step_processor_s"] > 0 and 0.5 < product["peak_gib"] < 8


def test_rollouts(bench):
    [found] = bench("rollouts --rounds 1 --requests 4 --in-flight 4")
    assert found["ratio"] == ratio(found["tokens_per_s"]["ours"], found["tokens_per_s"]["offline"])
    assert found["tokens_per_s"]["ours"] > 0 and found["ratio_of_each_round"] == [found["ratio"]]


def test_shapes(bench):
    [found] = bench("shapes --toy --shapes 1b")
    assert len(found["losses"]) == len(found["seconds"]) == 7 and found["tokens"] == 2 * 256
    assert found["losses"][-1] < found["losses"][0] and found["tokens_per_second"] > 0
    total = sum(found["terms"].values())
    assert total == pytest.approx(found["predicted"])
    assert found["predicted_over_measured"] == ratio(total, found["peak"]["total"])


def test_step(bench):
    """The three sides train on the same tokens."""
    [found] = bench("step --rounds 1 --samples 8 --micro-batch-tokens 256")
    assert found["ratio"] == ratio(found["seconds"]["ours"], found["seconds"]["bare"])
    assert found["ratio_packed"] == ratio(found["seconds"]["ours"], found["seconds"]["packed"])
    assert 0 < found["loss_tokens"] < found["tokens"] < found["padded_tokens"] and found["micro_batches"] == 3


def test_store(bench):
    words = "store --batches 2 --groups 2 --group-size 4 --tokens 1000 --ready 1 --folder {folder}"
    [found] = bench(words)
    assert 8 < found["bytes_per_token"] < 9 and found["ready_groups"] == 2
    assert found["batch_bytes"] >= 2 * 4 * 1000 * 8 and found["tokens_per_second"] > 0 < found["replay_ready_seconds"]


def test_weights(bench):
    [found] = bench("weights --rounds 1 --layers 1 --hidden 256 --vocab 512 --bucket-mib 1")
    assert {"gloo", "update", "changes"} <= found["seconds"].keys()
    assert all(over > 0 for over in found["over_gloo"].values()) and found["over_gloo"]["gloo"] == 1
    assert found["mib"] > 0 and 0 < found["bytes_of_a_change"] < 100  # of one changed element
