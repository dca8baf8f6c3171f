"""What a checkpoint makes unnecessary goes; what a resume needs stays."""

import asyncio
import os
import shutil

import pytest
from fakes.run import attempt, recipe
from journal_groups import found, found_batch, group, record
from journals import finish, write_journal

from megatron_scalerl.checkpoints.commit import committed, discard, read_commit
from megatron_scalerl.controller.run_folder import check_history, resume_point
from megatron_scalerl.rollouts.history import read_batch, read_groups, read_history
from megatron_scalerl.rollouts.journal import Journal
from megatron_scalerl.rollouts.retention import Retention

BATCHES = [record(0, 1, 0), record(1, 2), record(2, 4)]


def names(run_dir):
    return sorted(path.name for path in (run_dir / "rollouts").iterdir())


def retained(run_dir, batches, policy, **options):
    """Groups 0 to 5, one in each segment; 3 and 5 are in no batch."""
    groups = [group(n) for n in range(6)]
    options = {"policy": policy, "segment_bytes": 1} | options
    write_journal(run_dir, admitted=range(6), groups=groups, batches=BATCHES, retain=batches, **options)


@pytest.mark.parametrize(
    "batches, policy, segments",
    [
        (0, "resume", [0, 1, 2, 3, 4, 5]),
        (1, "resume", [2, 3, 4, 5]),
        (2, "resume", [3, 4, 5]),
        (3, "resume", [3, 5]),
        (3, "keep", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_groups_of_later_batches_and_of_none_stay(tmp_path, batches, policy, segments):
    retained(tmp_path, batches, policy)
    assert [n for n in names(tmp_path) if n.endswith("bin")] == [f"segment-{n:05d}.bin" for n in segments]
    history = read_history(tmp_path)
    for later in history.batches[batches:]:
        assert found_batch(tmp_path, read_batch(tmp_path, history, later)) == [group(n) for n in later.group_ids]
    assert found(tmp_path, read_groups(tmp_path, history, history.unbatched())) == {3: group(3), 5: group(5)}


def test_a_restart_knows_what_the_attempts_before_it_stored(tmp_path):
    retained(tmp_path, 0, "resume")
    write_journal(tmp_path, retain=2, policy="resume")
    assert names(tmp_path) == [f"segment-{n:05d}.bin" for n in (3, 4, 5)]


def test_a_restart_keeps_nothing_of_segments_that_are_gone(tmp_path):
    """A run of a month would carry every group that it ever trained on."""
    retained(tmp_path, 2, "resume")
    kept = Retention("resume", tmp_path / "rollouts", read_history(tmp_path))
    assert sorted(kept._unbatched) == [3, 5] and sorted(kept._last_batches) == [4]


async def test_a_group_that_is_written_and_not_recorded_yet_holds_its_segment(tmp_path):
    """The thread has synced its block; the event loop has not heard of it when the checkpoint is committed."""

    journal = Journal(tmp_path, policy="resume", segment_bytes=1)
    await finish(journal, *group(0))
    await journal.batch(record(0, 0))
    rest = [asyncio.create_task(finish(journal, *group(n))) for n in (1, 2, 3)]
    while len(names(tmp_path)) < 4:
        await asyncio.sleep(0)
        await journal.retain(1)
    await asyncio.gather(*rest)
    await journal.close()
    history = read_history(tmp_path)
    assert set(read_groups(tmp_path, history, history.unbatched())) == {1, 2, 3}


async def test_a_removal_that_fails_is_raised_and_the_next_one_deletes_the_segment(tmp_path, monkeypatch):
    unlink = os.unlink

    def stand_in(path, *arguments, **options):
        if str(path).endswith(".bin"):
            raise OSError(5, "Input/output error")
        unlink(path, *arguments, **options)

    journal = Journal(tmp_path, policy="resume", segment_bytes=1)
    await finish(journal, *group(0))
    await finish(journal, *group(1))
    await journal.batch(record(0, 0))
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", stand_in)
        with pytest.raises(OSError, match="Input/output"):
            await journal.retain(1)
    await journal.retain(1)
    await journal.close()
    assert names(tmp_path) == ["segment-00001.bin"]


@pytest.mark.slow
def test_every_kept_checkpoint_can_be_resumed(tmp_path):
    """Twelve steps, a checkpoint every second one; then from the newest, and from the one before it."""
    settings = recipe(tmp_path, steps=12, checkpoint={"every_steps": 2, "keep": 2, "rollouts": "resume"})
    assert attempt(settings, kill_at_s=42).reason is None
    folder = tmp_path / "r"
    kept = [path for _, path in committed(folder / "checkpoints")]
    assert len(kept) == 2 and read_commit(kept[0])["step"] >= 4
    gone = [n for n in range(4) if f"segment-{n:05d}.bin" not in names(folder)]
    assert gone, "the segments before the first checkpoint are removed"
    for older in (False, True):
        again = tmp_path / f"older{older}"
        again.mkdir()
        shutil.copytree(folder, again / "r")
        recipe_file = again / "r" / "recipe.yaml"
        recipe_file.write_text(recipe_file.read_text().replace(str(tmp_path), str(again)))
        if older:
            discard(again / "r" / "checkpoints" / kept[1].name)
        resumed = recipe(again, steps=12, checkpoint={"every_steps": 2, "keep": 2, "rollouts": "resume"})
        outcome = attempt(resumed)
        assert outcome.reason == "all 12 steps are made"
        assert outcome.trained[0] == read_commit(kept[0 if older else 1])["step"] + 1
        groups = [g for b in read_history(again / "r").batches for g in b.group_ids]
        assert len(groups) == len(set(groups)) == 24


def test_nothing_goes_before_as_many_checkpoints_as_are_kept(tmp_path):
    settings = recipe(tmp_path, steps=4, checkpoint={"every_steps": 2, "keep": 3, "rollouts": "resume"})
    attempt(settings)
    history = read_history(tmp_path / "r")
    assert sum(len(read_batch(tmp_path / "r", history, b)) for b in history.batches) == 8


def test_the_journal_must_reach_as_far_as_the_checkpoint(tmp_path):
    settings = recipe(tmp_path, rollouts={"max_staleness_steps": 0})
    attempt(settings, kill_at_s=40)
    folder = tmp_path / "r"
    start = resume_point(folder)
    assert start.position is not None
    journal = folder / "journal.jsonl"
    check_history(folder, read_history(folder), start)
    rows = journal.read_bytes()[: start.position.journal_bytes].splitlines(keepends=True)
    journal.write_bytes(b"".join(row for row in rows if b'"admit"' not in row))
    with pytest.raises(RuntimeError, match=rf"journal.jsonl: .* had {start.position.journal_bytes} "):
        check_history(folder, read_history(folder), start)
