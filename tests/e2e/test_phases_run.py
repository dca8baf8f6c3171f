"""The schedule ppo_off_policy with a trainer rank and an engine: generation and training alternate."""

import shutil

import pytest
from whole_runs import overrides, run

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.rollouts.history import read_groups, read_history

pytestmark = pytest.mark.full


def test_phases_of_three_batches(tiny_dense, tmp_path):
    settings = overrides(
        tiny_dense,
        tmp_path,
        "phases",
        "rollouts.schedule=ppo_off_policy",
        "rollouts.updates_per_phase=3",
        "steps=6",
        "validation.every_steps=2",
        "rewards.verifier=tests.e2e.coin:toss",  # every batch makes a step
        "optimizer.lr=1e-4",
        "checkpoint.every_steps=1",
        "checkpoint.keep=9",
    )
    run("-m", "megatron_scalerl", "train", "recipes/tiny_cpu.yaml", *settings)
    folder = tmp_path / "phases"
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert [r["staleness_mean"] for r in rows] == [r["staleness_max"] for r in rows] == [0, 1, 2, 0, 1, 2]
    assert all(r["mixed_version_share"] == 0 and r["grad_norm"] > 0 for r in rows)

    events = [e["event"] for e in read_jsonl(folder / "journal.jsonl")]
    assert sorted(events[:24]) == ["admit"] * 12 + ["finish"] * 12 and events[24:27] == ["batch"] * 3
    assert sorted(events[27:51]) == ["admit"] * 12 + ["finish"] * 12 and events[51:54] == ["batch"] * 3
    history = read_history(folder)
    assert [g for b in history.batches for g in b.group_ids] == list(range(24))
    groups = read_groups(folder, history, history.finished)
    versions = [
        {v for c in groups[g].completions for v in (c.first_version, c.last_version)} for g in range(len(groups))
    ]
    assert versions == [{0}] * 12 + [{3}] * 12

    # the engine gets the weights of steps 3 and 6 only, and computes the trainer's log-probs with them
    updated = [r["step"] for r in rows if "weight_digest" in r]
    assert updated == [r["step"] for r in rows if "probe_mismatch_max" in r] == [3, 6]
    assert all(r["probe_mismatch_max"] <= 1e-4 for r in rows if r["step"] in updated)
    # of completions as old as the weights of the first batch of a phase the trainer finds the engine's log-probs
    assert rows[0]["mismatch_max"] <= 1e-4 and rows[3]["mismatch_max"] <= 1e-4
    assert min(rows[i]["mismatch_max"] for i in (1, 2, 4, 5)) > max(rows[i]["mismatch_max"] for i in (0, 3))
    validations = [(r["step"], r["policy_version"]) for r in read_jsonl(folder / "validation.jsonl")]
    assert validations == [(0, 0), (3, 3), (6, 6)]

    # resumed within the second phase: the rest of it is trained on again, from the journal, to the same bits
    for step in (5, 6):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:06d}")
    journal = (folder / "journal.jsonl").read_bytes()
    run("-m", "megatron_scalerl", "train", "recipes/tiny_cpu.yaml", *settings)
    again = read_jsonl(folder / "metrics.jsonl")
    keys = ("step", "batches", "loss", "grad_norm", "staleness_max", "weight_digest")
    assert [[r.get(key) for key in keys] for r in again] == [[r.get(key) for key in keys] for r in rows]
    assert (folder / "journal.jsonl").read_bytes() == journal
    assert (folder / "checkpoints" / "step_000006" / "COMMIT").is_file()
