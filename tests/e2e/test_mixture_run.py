"""A mixture with a real engine: batches by weight, a verifier each, validation by task, and a restart."""

import json
import random
from pathlib import Path

import pytest
import random_policies
from whole_runs import run

from megatron_scalerl.checkpoints.jsonl import read_jsonl

pytestmark = pytest.mark.full
TESTS = json.dumps([{"input": "", "output": "7"}])


def make(folder):
    """A random policy, prompts of random digits for a coin, and others for the verifier code."""
    from megatron_scalerl.tiny.tokenizer import save_tokenizer

    random_policies.make("llama_biased", folder / "policy", **random_policies.FOR_ENGINES)
    save_tokenizer(folder / "policy")
    rng = random.Random(1)
    for name, answer in (("coin", "0"), ("code", TESTS)):
        rows = [{"prompt": "".join(rng.choices("0123456789+-", k=9)), "answer": answer} for _ in range(40)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(folder, *more):
    code = f"{{path: {folder / 'code.jsonl'}, weight: 1, verifier: code, held_out: 3}}"
    coin = f"{{path: {folder / 'coin.jsonl'}, weight: 3, verifier: 'coin:toss', held_out: 5}}"
    return run(
        "-m",
        "megatron_scalerl",
        "train",
        "recipes/tiny_cpu.yaml",
        "name=run",
        f"output_dir={folder}",
        f"policy.path={folder / 'policy'}",
        "prompts.path=null",
        "prompts.held_out_path=null",
        f"prompts.tasks={{code: {code}, coin: {coin}}}",
        "rewards.truncated=wrong",
        "interruption.answer_tokens=40",
        "rollouts.groups_per_batch=4",
        "rollouts.group_size=8",
        "rollouts.max_in_flight=64",
        "rollouts.max_staleness_steps=1",
        "validation.every_steps=1",
        "checkpoint.every_steps=1",
        "optimizer.warmup_steps=1",
        "trainer.micro_batch_tokens=1024",
        *more,
    )


def test_a_mixture_trains_validates_by_task_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    make(tmp_path)
    shown = train(tmp_path, "steps=2").stdout
    assert "prompts.tasks.code: 40 rows, 37 to train on, 3 held out" in shown
    train(tmp_path, "steps=3")
    folder = tmp_path / "run"
    admitted = [e["prompt_id"] for e in read_jsonl(folder / "journal.jsonl") if e["event"] == "admit"]
    assert len(set(admitted)) == len(admitted), "no prompt twice in an epoch, across the restart"
    steps = [row for row in read_jsonl(folder / "metrics.jsonl") if "skipped" not in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert sum(row.get("batch/groups/code", 0) + row["batch/groups/coin"] for row in steps) == 12
    assert all(row.get("train_pass_rate/code", 0.0) == 0.0 < row["train_pass_rate/coin"] for row in steps)
    rows = read_jsonl(folder / "validation.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert {(row["prompts/code"], row["prompts/coin"], row["prompts"]) for row in rows} == {(3, 5, 8)}
    assert all(row["pass_rate/code"] == 0.0 < row["pass_rate/coin"] for row in rows)
    assert rows[0]["pass_rate"] == pytest.approx(rows[0]["pass_rate/coin"] * 5 / 8)
