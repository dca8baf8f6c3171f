"""The journal survives a torn line and returns exactly the groups that were written."""

import pytest

from megatron_scalerl.rollouts.journal import BatchRecord, Journal, read_batch, read_groups, read_history
from megatron_scalerl.types import ExpertChoices, Prompt, Rollout, RolloutGroup, Score


def group(group_id, version=3, correct=(True, False)):
    rollouts = tuple(
        Rollout(
            token_ids=(5, 6, 7 + i),
            rollout_logprobs=(-0.1, 0.0, -1.5e-7),
            policy_versions=(version, version, version + 1),
            loss_mask=(True, False, True),
            interrupted=True,
            truncated=False,
            thinking_cut=44,
            seed=11 + i,
            expert_choices=ExpertChoices(layers=2, topk=1, width=1, data=bytes(range(8))) if i else None,
        )
        for i in range(len(correct))
    )
    return RolloutGroup(
        group_id=group_id,
        prompt=Prompt(prompt_id=f"p{group_id}", text="1;+2=", answer="3", token_ids=(1, 2), extra={"level": 1}),
        rollouts=rollouts,
        scores=tuple(Score(correct=c, reward=1.0 if c else -1.0) for c in correct),
        first_token_version=version,
        epoch=0,
    )


def write(run_dir, finished=(0, 2), batches=((0, 1, (0,)),)):
    journal = Journal(run_dir)
    for group_id in (0, 1, 2):
        journal.admit(group_id, f"p{group_id}", 0)
    for group_id in finished:
        journal.finish(group(group_id))
    for batch, step, ids in batches:
        journal.batch(BatchRecord(batch=batch, step=step, policy_version=step - 1, group_ids=ids))
    journal.close()


def test_round_trip(tmp_path):
    write(tmp_path)
    history = read_history(tmp_path)
    assert [e["event"] for e in history.events] == ["admit"] * 3 + ["finish"] * 2 + ["batch"]
    assert [e["group_id"] for e in history.to_reissue({2})] == [1]
    assert history.unbatched() == (2,)
    assert history.batches == (BatchRecord(batch=0, step=1, policy_version=0, group_ids=(0,)),)
    assert read_groups(tmp_path, history, [2, 0]) == {0: group(0), 2: group(2)}


def test_torn_lines_are_removed_and_the_journal_continues(tmp_path):
    write(tmp_path, batches=())
    for name in ("journal.jsonl", "rollouts/groups-00000.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-9])
    history = read_history(tmp_path)
    assert [e["group_id"] for e in history.to_reissue({0})] == [1, 2]
    journal = Journal(tmp_path)
    journal.finish(group(2, correct=(True, True)))
    journal.close()
    again = read_history(tmp_path)
    assert read_groups(tmp_path, again, [2])[2].pass_rate == 1.0
    assert [e["event"] for e in again.events] == ["admit"] * 3 + ["finish"] * 2


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    write(tmp_path)
    path = tmp_path / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b'{"event": \n'
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=r"journal.jsonl line 2: expected a JSON object"):
        read_history(tmp_path)


def test_a_missing_group_of_a_batch_is_named(tmp_path):
    write(tmp_path)
    history = read_history(tmp_path)
    assert read_batch(tmp_path, history, history.batches[0]) == [group(0)]
    (tmp_path / "rollouts/groups-00000.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match=r"groups-00000.jsonl: expected group 0 of batch 0, found none"):
        read_batch(tmp_path, history, history.batches[0])


def test_a_finished_group_missing_on_disk_is_reissued(tmp_path):
    write(tmp_path)
    history = read_history(tmp_path)
    (tmp_path / "rollouts/groups-00000.jsonl").unlink()
    ready = read_groups(tmp_path, history, history.unbatched())
    assert ready == {} and [e["group_id"] for e in history.to_reissue(ready)] == [1, 2]


def test_of_two_lines_of_a_group_the_later_counts(tmp_path):
    write(tmp_path)
    journal = Journal(tmp_path)
    journal.finish(group(2, correct=(True, True)))
    journal.close()
    assert read_groups(tmp_path, read_history(tmp_path), [2])[2].pass_rate == 1.0
