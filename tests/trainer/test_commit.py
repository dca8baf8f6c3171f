"""Which checkpoint folders count, and the one line that names what is wrong with one."""

from __future__ import annotations

import pytest

from megatron_scalerl.trainer.commit import (
    COMMIT,
    checkpoint_path,
    discard,
    latest,
    prune,
    read_commit,
    write_commit,
)


def make(folder, step, *, commit=True):
    path = checkpoint_path(folder, step)
    (path / "shards").mkdir(parents=True)
    (path / "shards" / "a.distcp").write_bytes(b"x" * 10)
    (path / "extra.json").write_text("{}")
    if commit:
        write_commit(path, {"step": step})
    return path


def test_a_committed_folder_reads_back(tmp_path):
    path = make(tmp_path, 3)
    assert path.name == "step_000003"
    facts = read_commit(path)
    assert facts == {"step": 3, "files": {"extra.json": 2, "shards/a.distcp": 10}}
    assert sorted(f.name for f in path.iterdir()) == [COMMIT, "extra.json", "shards"]


def test_without_commit_it_is_refused(tmp_path):
    path = make(tmp_path, 3, commit=False)
    with pytest.raises(ValueError, match=r"step_000003/COMMIT: expected .* found a folder without it"):
        read_commit(path)
    with pytest.raises(ValueError, match="found no folder"):
        read_commit(tmp_path / "nowhere")


def test_a_missing_or_short_shard_is_named(tmp_path):
    path = make(tmp_path, 3)
    (path / "shards" / "a.distcp").write_bytes(b"x" * 9)
    with pytest.raises(ValueError, match=r"step_000003/shards/a.distcp: expected 10 bytes, found 9"):
        read_commit(path)
    (path / "shards" / "a.distcp").unlink()
    with pytest.raises(ValueError, match=r"step_000003/shards/a.distcp: expected a file of 10 bytes, found none"):
        read_commit(path)


def test_a_broken_commit_is_named(tmp_path):
    path = make(tmp_path, 3)
    (path / COMMIT).write_text('{"step": 3')
    with pytest.raises(ValueError, match=r"step_000003/COMMIT: expected JSON"):
        read_commit(path)


def test_latest_and_prune_go_by_step_and_pass_over_the_uncommitted(tmp_path):
    for step in (2, 10, 9):
        make(tmp_path, step)
    unfinished = make(tmp_path, 11, commit=False)
    (tmp_path / "step_x").mkdir()
    assert latest(tmp_path) == checkpoint_path(tmp_path, 10)
    assert [p.name for p in prune(tmp_path, 2)] == ["step_000002"]
    assert not checkpoint_path(tmp_path, 2).exists()
    assert unfinished.exists() and latest(tmp_path) == checkpoint_path(tmp_path, 10)


def test_latest_of_nothing(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None


def test_discard_is_quiet_about_nothing(tmp_path):
    discard(tmp_path / "nowhere")
    path = make(tmp_path, 1)
    discard(path)
    assert not path.exists()
