"""The journal and its groups: round trip, order on the disk, damage."""

import asyncio
import os
import threading

import pytest
from journal_groups import found, found_batch, group, record
from journals import finish, write_journal
from json_lines import lines
from waiting import passes, until

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.rollouts.history import check_groups, read_batch, read_groups, read_history
from megatron_scalerl.rollouts.journal import Journal


def write(run_dir, finished=(0, 2), batches=None, **options):
    batches = (record(0, 0),) if batches is None else batches
    write_journal(run_dir, admitted=(0, 1, 2), groups=map(group, finished), batches=batches, **options)


def test_round_trip(tmp_path):
    write(tmp_path)
    history = read_history(tmp_path)
    assert [e["event"] for e in read_jsonl(tmp_path / "journal.jsonl")] == ["admit"] * 3 + ["finish"] * 2 + ["batch"]
    assert history.admitted == 3 and [e.group_id for e in history.to_reissue({2})] == [1]
    assert history.unbatched() == (2,)
    assert history.batches == (record(0, 0),)
    assert found(tmp_path, read_groups(tmp_path, history, [2, 0])) == {0: group(0), 2: group(2)}
    assert found_batch(tmp_path, read_batch(tmp_path, history, history.batches[0])) == [group(0)]


def test_a_torn_last_event_is_removed_and_the_journal_continues(tmp_path):
    write(tmp_path, batches=())
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    history = read_history(tmp_path)
    assert [e.group_id for e in history.to_reissue({0})] == [1, 2]
    write_journal(tmp_path, groups=[group(2, correct=(True, True))])
    again = read_history(tmp_path)
    assert found(tmp_path, read_groups(tmp_path, again, [0, 2])) == {0: group(0), 2: group(2, correct=(True, True))}
    assert [type(e).__name__ for e in again.events] == ["Admit"] * 3 + ["Finish"] * 2


@pytest.mark.parametrize(
    "line, found",
    [
        ('{"event": \n', "Input data was truncated"),
        (
            '{"event": "finish", "group_id": 1, "prompt_id": "p", "pass_rate": 1, "first_token_version": 0}\n',
            "segment",
        ),
        ('{"event": "admit", "more": ' + "[" * 100_000 + "\n", "recursion"),
    ],
)
def test_a_broken_event_in_the_middle_is_named(tmp_path, line, found):
    write(tmp_path)
    path = tmp_path / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = line
    path.write_text("".join(lines))
    with pytest.raises(ValueError, match=rf"journal.jsonl line 2: .*{found}") as error:
        read_history(tmp_path)
    assert "\n" not in str(error.value)


def test_a_batch_whose_group_did_not_finish_is_named(tmp_path):
    write(tmp_path, batches=(record(0, 0), record(1, 1)))
    with pytest.raises(ValueError, match=r"journal.jsonl: batch 1 has group 1"):
        read_history(tmp_path)


def test_a_group_that_a_resume_needs_and_the_store_lacks_is_named(tmp_path):
    write(tmp_path)
    history = read_history(tmp_path)
    segment = tmp_path / "rollouts" / "segment-00000.bin"
    os.truncate(segment, segment.stat().st_size - 1)
    assert read_groups(tmp_path, history, [0])
    with pytest.raises(ValueError, match=r"0.bin: byte \d+: the file is too short: \d+ of \d+ bytes are left"):
        check_groups(tmp_path, history, 1)
    os.truncate(segment, 9)
    with pytest.raises(ValueError, match=r"segment-00000.bin: byte 0: .* too short: 9 of \d+ bytes are left"):
        check_groups(tmp_path, history, 0)
    segment.unlink()
    with pytest.raises(ValueError, match=r"segment-00000.bin: .* does not exist"):
        check_groups(tmp_path, history, 1)


def test_a_block_of_another_group_is_named(tmp_path):
    write(tmp_path)
    path = tmp_path / "journal.jsonl"
    rows = read_jsonl(path)
    rows[4]["group_id"] = 1
    path.write_text(lines(rows))
    with pytest.raises(ValueError, match=r"segment-00000.bin: byte \d+: .* group 2; .* 1"):
        read_groups(tmp_path, read_history(tmp_path), [1])


def test_only_the_bytes_of_a_batch_are_read(tmp_path):
    """The block of every other group is overwritten."""
    write(tmp_path, finished=(0, 1, 2), batches=(record(0, 0, 2),))
    history = read_history(tmp_path)
    other = history.finished[1].stored
    with open(tmp_path / "rollouts" / "segment-00000.bin", "rb+") as file:
        file.seek(other.offset)
        file.write(bytes(other.nbytes))
    assert found_batch(tmp_path, read_batch(tmp_path, history, history.batches[0])) == [group(0), group(2)]
    with pytest.raises(ValueError, match=rf"segment-00000.bin: byte {other.offset}: .* begin no block"):
        read_groups(tmp_path, history, [1])


def test_an_event_is_written_only_once_its_group_is_on_the_disk(tmp_path, monkeypatch):
    """Groups that wait while the disk is busy share one sync, and the event loop does not wait for it."""
    busy, syncs = threading.Event(), []
    fsync = os.fsync

    def slow_stand_in(handle):
        if "segment" in os.readlink(f"/proc/self/fd/{handle}"):
            syncs.append(handle)
            assert threading.current_thread() is not threading.main_thread()
            busy.wait(120)
        fsync(handle)

    async def run():
        journal = Journal(tmp_path)
        monkeypatch.setattr(os, "fsync", slow_stand_in)
        first = asyncio.create_task(finish(journal, *group(0)))
        await until(lambda: syncs)
        rest = [asyncio.create_task(finish(journal, *group(n))) for n in range(1, 6)]
        given_up = asyncio.create_task(finish(journal, *group(6)))
        await passes()
        assert read_jsonl(tmp_path / "journal.jsonl") == []
        given_up.cancel()
        busy.set()
        await asyncio.gather(first, *rest)
        await journal.close()

    asyncio.run(run())
    assert len(syncs) == 2
    history = read_history(tmp_path)
    assert sorted(history.finished) == list(range(6))
    assert found(tmp_path, read_groups(tmp_path, history, range(6))) == {n: group(n) for n in range(6)}


async def test_a_cancelled_caller_leaves_no_file_to_a_running_thread(tmp_path, monkeypatch):
    """The batch's sync goes on when its caller is cancelled; the journal closes its file only after it."""
    begun, busy, fsync, synced = threading.Event(), threading.Event(), os.fsync, []

    def slow_stand_in(handle):
        begun.set()
        busy.wait(120)
        fsync(handle)
        synced.append(handle)

    journal = Journal(tmp_path)
    await finish(journal, *group(0))
    monkeypatch.setattr(os, "fsync", slow_stand_in)
    batch = asyncio.create_task(journal.batch(record(0, 0)))
    await until(begun.is_set)
    batch.cancel()
    closing = asyncio.create_task(journal.close())
    await passes()
    assert not closing.done()
    busy.set()
    await closing
    assert len(synced) == 1
