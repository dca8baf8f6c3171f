"""A run of episodes with the calculator that is killed, resumed, shown, and evaluated."""

import os
import signal
import subprocess
import sys

import pytest
from evaluation_files import read_result
from whole_runs import ROOT, overrides, product

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.environments.response import Response
from megatron_scalerl.rollouts.group_files import listed_groups, spans
from megatron_scalerl.rollouts.history import read_history
from megatron_scalerl.rollouts.plans import TRAINING_PRIORITY, VALIDATION_PRIORITY
from megatron_scalerl.rollouts.run_text import load_tokenizer, raw_text

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "examples"))
    from calculator import Calculator

pytestmark = pytest.mark.slow

RECIPE = ("recipes/tiny_cpu.yaml", "overlay=examples/calculator.yaml")
KILLED = """
import os, signal, sys, threading
from megatron_scalerl.__main__ import main
from megatron_scalerl.controller.metrics import Metrics

def and_kill(self, step, record):
    write(self, step, record)
    if step == 2:
        threading.Timer(0.05, os.killpg, (0, signal.SIGKILL)).start()

write, Metrics.step = Metrics.step, and_kill
sys.exit(main(sys.argv[1:]))
"""
"""A controller whose process group gets SIGKILL soon after its second step."""


@pytest.fixture(scope="module")
def asking(tiny_dense, tmp_path_factory):
    """The policy after a warm start in which half of the problems are answered with the calculator."""
    tiny = tiny_dense
    folder = tmp_path_factory.mktemp("asking")
    examples = folder / "calculator_sft.jsonl"
    with (tiny / "sft.jsonl").open() as rows, examples.open("w") as file:
        subprocess.run([sys.executable, "examples/calculator.py"], cwd=ROOT, stdin=rows, stdout=file, check=True)
    settings = (f"policy.path={tiny / 'base_policy'}", f"sft.path={examples}", "sft.steps=80", "sft.threads=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "examples"))
        product("sft", *RECIPE, "--out", folder / "policy", *settings)
    return folder / "policy"


def read(listed):
    return listed.read()


def check_episodes(folder, task=""):
    """Check what the calculator says between the turns of each stored episode of a task; how often it is asked."""
    tokenizer = load_tokenizer(folder)
    answered = 0
    for listed in listed_groups(folder):
        group = listed.read()
        if group["prompt"]["task"] != task:
            continue
        for rollout, score in zip(group["rollouts"], group["scores"], strict=True):
            calculator = Calculator()
            calculator.reset(group["prompt"])
            said = ""
            for first, end, _, _, origin in spans(rollout):
                text = raw_text(tokenizer, rollout["token_ids"][first:end])
                if origin == "environment":
                    result, _, _ = calculator.step(answer(said))
                    assert text == f"{result}<think>"
                    said = ""
                    answered += 1
                else:
                    said += text
            _, reward, done = calculator.step(answer(said))
            assert rollout["truncated"] or (done and score["correct"] == reward)
    return answered


def check_evaluation(tiny, policy, folder, out):
    """`evaluate` lets the policy ask the same calculator."""
    rows = (tiny / "held_out.jsonl").read_text().splitlines()[:10]
    (out / "ten.jsonl").write_text("\n".join(rows) + "\n")
    options = ("--recipe", folder / "recipe.yaml", "--data", f"{out / 'ten.jsonl'}:prompt,answer", "--k", 4)
    printed = product("evaluate", policy, *options, "--out", out / "evaluation").stdout
    assert "mean@4" in printed
    _, completions = read_result(out / "evaluation")
    assert len(completions) == 40 and not any(row.lost for row in completions)
    asked = [row.text.split("<eos>") for row in completions if row.text.count("<eos>") > 1]
    assert asked
    for turn, after, *_ in asked:
        calculator = Calculator()
        calculator.reset({"text": "", "answer": ""})
        assert after.startswith(f"{calculator.step(answer(turn))[0]}<think>")


def answer(said):
    """The response of a turn: without its end, and empty if thinking has not ended."""
    return Response(text=said.partition("</think>")[2].removesuffix("<eos>"))


def test_an_agent_and_single_turns_train_in_one_run_each_with_its_validation(
    tiny_dense, asking, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"))
    overlay = tmp_path / "mixture.yaml"
    overlay.write_text((ROOT / "examples" / "mixture.yaml").read_text().replace("runs/tiny_1", str(tiny_dense)))
    settings = [f"policy.path={asking}", "environment.workers=1", "rollouts.decoders=1", "steps=2"]
    common = [word for word in overrides(tiny_dense, tmp_path, "mixture") if not word.startswith("prompts.")]
    product("train", "recipes/tiny_cpu.yaml", *common, f"overlay={overlay}", *settings, "name=mixture")
    folder = tmp_path / "mixture"
    assert check_episodes(folder, "asked") > 3
    groups = [listed.read() for listed in listed_groups(folder)]
    for task, turns, cuts in (("asked", {1, 2, 3}, range(8, 13)), ("sums", {1}, range(44, 53))):
        rollouts = [r for group in groups if group["prompt"]["task"] == task for r in group["rollouts"]]
        assert rollouts and {len(rollout["parts"]) for rollout in rollouts} == {1}
        assert {rollout["turns"] for rollout in rollouts} <= turns
        assert {rollout["thinking_cut"] for rollout in rollouts} <= set(cuts)
    metrics = [row for row in read_jsonl(folder / "metrics.jsonl") if "skipped" not in row]
    assert [row["step"] for row in metrics] == [1, 2] and max(row.get("turns_mean", 1) for row in metrics) > 1
    [first, last] = read_jsonl(folder / "validation.jsonl")
    assert first["step"] == 0 and last["step"] == 2 and last["pass_rate/sums"] >= 0 <= last["pass_rate/asked"]


def test_a_killed_run_of_episodes_is_resumed_shown_and_evaluated(tiny_dense, asking, tmp_path, monkeypatch):
    requests = tmp_path / "requests.jsonl"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "examples"), str(ROOT / "tests/e2e")]))
    monkeypatch.setenv("REQUEST_LOG", str(requests))
    settings = [
        *RECIPE,
        *overrides(tiny_dense, tmp_path, "asks", "checkpoint.every_steps=1"),
        f"policy.path={asking}",
        "engine.vllm.middleware=request_log.RequestLog",
        "environment.workers=1",
        "rollouts.decoders=1",
        "validation.prompts=10",
        "optimizer.lr=1e-4",
    ]
    folder = tmp_path / "asks"
    argv = [sys.executable, "-c", KILLED, "train", *settings]
    killed = subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=1800, start_new_session=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert [r["step"] for r in read_jsonl(folder / "metrics.jsonl") if "skipped" not in r] == [1, 2]
    assert "all 3 steps are made" in product("train", *settings).stdout
    assert [r["step"] for r in read_jsonl(folder / "metrics.jsonl") if "skipped" not in r] == [1, 2, 3]
    assert [v["step"] for v in read_jsonl(folder / "validation.jsonl")] == [0, 3]

    finished = [row["group_id"] for row in read_jsonl(folder / "journal.jsonl") if row.get("event") == "finish"]
    trained = [group for batch in read_history(folder).batches for group in batch.group_ids]
    assert len(set(finished)) == len(finished) >= 12 and len(set(trained)) == len(trained) == 12
    assert set(trained) <= set(finished)
    assert check_episodes(folder) > 3

    # version of the salt, of the first token; an update may come between the request and this token
    generations = [
        (int(row["salt"].partition("-")[0]), row["versions"][0], row["priority"]) for row in read_jsonl(requests)
    ]
    assert all(version - 1 <= salt <= version for salt, version, _ in generations)
    assert {version for _, version, priority in generations if priority == TRAINING_PRIORITY} >= {0, 1}
    assert {version for _, version, priority in generations if priority == VALIDATION_PRIORITY} >= {0, 3}
    assert all(salt == version for salt, version, priority in generations if priority == VALIDATION_PRIORITY)

    longest = max((g for g in map(read, listed_groups(folder))), key=lambda group: group["rollouts"][0]["turns"])
    shown = product("show", folder, "--group", longest["group_id"]).stdout
    assert longest["rollouts"][0]["turns"] > 1 and f"turns      {longest['rollouts'][0]['turns']}, " in shown
    check_evaluation(tiny_dense, asking, folder, tmp_path)
