"""Batches that are sent while the trainer steps: what a kill at any moment leaves, in virtual time.

`fakes.run` asserts that nothing is sent beside a weight update or a checkpoint, and one batch at a time.
"""

import pytest
from fakes.run import attempt, recipe
from fakes.trainer import TRAIN_S
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.rollouts.history import read_history

STEPS = 6


def check(folder, k, outcomes):
    """Every step once, on the batch of the journal, within the bound; no group twice; no group gone."""
    history, records = read_history(folder), read_jsonl(folder / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert max(r["staleness_max"] for r in records) <= k
    groups = [g for batch in history.batches for g in batch.group_ids]
    assert len(set(groups)) == len(groups) == 2 * STEPS
    assert set(groups) <= set(history.finished)
    for batch in history.batches:
        for group in batch.group_ids:
            assert batch.policy_version - history.finished[group].first_token_version <= k
    sent = {step: each for outcome in outcomes for step, each in outcome.completions.items()}
    assert sent == {b.step: {(g, i) for g in b.group_ids for i in range(4)} for b in history.batches}


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_a_run_sends_batches_ahead_and_waits_for_none_of_them(tmp_path, k):
    outcome = attempt(recipe(tmp_path, rollouts={"max_staleness_steps": k}), send_s=0.5)
    check(tmp_path / "r", k, [outcome])
    assert bool(outcome.sent_ahead) == (k > 0) and set(outcome.sent_ahead) <= set(range(2, STEPS + 1))
    for row in read_jsonl(tmp_path / "r/metrics.jsonl"):
        ahead = row["step"] in outcome.sent_ahead
        assert not ahead or row["wait_for_batch_seconds"] == 0.0
        assert ahead or row["send_seconds"] >= 0.5 - 1e-9


def test_a_sending_that_outlasts_the_step_is_waited_for(tmp_path):
    """The rest of it counts as waiting for the sending, not for a batch."""
    outcome = attempt(recipe(tmp_path, rollouts={"max_staleness_steps": 8}), send_s=TRAIN_S + 1)
    check(tmp_path / "r", 8, [outcome])
    assert outcome.sent_ahead
    rows = {row["step"]: row for row in read_jsonl(tmp_path / "r/metrics.jsonl")}
    for step in outcome.sent_ahead:
        assert rows[step]["wait_for_batch_seconds"] == 0.0
        assert rows[step - 1]["send_seconds"] - (TRAIN_S + 1) * (step - 1 not in outcome.sent_ahead) >= 1.0 - 1e-9


def test_a_batch_sent_ahead_without_anything_to_train_on_is_skipped_in_its_turn(tmp_path):
    """Nothing was sent; the batch is counted after the step of the one before it, and the next one is composed."""
    settings = recipe(tmp_path, rollouts={"max_staleness_steps": 8})
    outcome = attempt(settings, flat_groups=set(range(4, 9)))
    assert outcome.reason == "all 6 steps are made"
    rows = read_jsonl(tmp_path / "r/metrics.jsonl")
    assert [r["batches"] for r in rows] == list(range(1, len(rows) + 1))
    assert [r["step"] for r in rows if "skipped" not in r] == list(range(1, STEPS + 1))
    skipped = [r for r in rows if "skipped" in r]
    assert skipped and any(r["wait_for_batch_seconds"] == 0.0 for r in skipped), "one was taken ahead"
    groups = [g for batch in read_history(tmp_path / "r").batches for g in batch.group_ids]
    assert len(set(groups)) == len(groups) == 2 * len(rows)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    k=st.sampled_from([0, 1, 3, 8]),
    seed=st.integers(0, 1000),
    send_s=st.sampled_from([0.0, 0.7, TRAIN_S + 1]),
    kills=st.lists(st.floats(0.1, 45.0), min_size=1, max_size=3),
    power_loss=st.booleans(),
)
@example(k=8, seed=1, send_s=TRAIN_S + 1, kills=[16.0, 17.0, 18.0], power_loss=True)
def test_a_kill_at_any_moment_loses_no_group_and_keeps_the_bound(
    tmp_path_factory, k, seed, send_s, kills, power_loss
):
    folder = tmp_path_factory.mktemp("run")
    made = recipe(folder, seed=seed, rollouts={"max_staleness_steps": k}, validation={"every_steps": 0})
    outcomes = [attempt(made, kill_at_s=kills[0], power_loss=power_loss, send_s=send_s)]
    outcomes += [attempt(made, kill_at_s=at, send_s=send_s) for at in kills[1:]]
    outcomes.append(attempt(made, send_s=send_s))
    assert outcomes[-1].reason == "all 6 steps are made"
    check(folder / "r", k, outcomes)
