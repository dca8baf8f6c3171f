"""Committed checkpoint folders, and the one-line message about a damaged one."""

import hashlib
import os

import pytest
from refusals import refused

from megatron_scalerl.checkpoints.commit import (
    COMMIT,
    checkpoint_path,
    latest,
    latest_whole,
    prune,
    read_commit,
    write_commit,
)


def make(folder, step, *, commit=True):
    path = checkpoint_path(folder, step)
    (path / "shards").mkdir(parents=True)
    (path / "shards/a.distcp").write_bytes(b"x" * 10)
    (path / "extra.json").write_text("{}")
    if commit:
        write_commit(path, {"step": step})
    return path


def test_a_committed_folder_reads_back(tmp_path):
    path = make(tmp_path, 3)
    assert path.name == "step_000003"
    facts = read_commit(path)
    assert (facts["step"], facts["files"]) == (3, {"extra.json": 2, "shards/a.distcp": 10})
    assert facts["sha256"]["extra.json"] == hashlib.sha256(b"{}").hexdigest()
    assert sorted(f.name for f in path.iterdir()) == [COMMIT, "extra.json", "shards"]


def test_without_commit_it_is_refused(tmp_path):
    path = make(tmp_path, 3, commit=False)
    with refused(r"step_000003/COMMIT: this file does not exist"):
        read_commit(path)
    with refused("COMMIT: this file does not exist"):
        read_commit(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content, found",
    [
        ("[" * 200_000, "array"),
        ('{"files": ' + '{"a":' * 200_000, "recursion"),
        ('{"files": {}', "truncated"),
        ("[]", "array"),
        ("\xff", "malformed"),
        ("{}", "missing required field `files`"),
        ('{"files": [["a", 1]]}', "array` - at `$.files`"),
        ('{"files": {"a": "10"}}', "str` - at `$.files[...]`"),
        ('{"files": {"a": 1e400}}', "out of range"),
        ('{"files": {"a": -1}}', ">= 0 - at `$.files[...]`"),
        ('{"files": {"a": ' + "9" * 5000 + "}}", "out of range"),
        ('{"files": {"../../outside": 6}}', "'../../outside' is not the path"),
        ('{"files": {"/etc/passwd": 6}}', "'/etc/passwd' is not the path"),
        ('{"files": {"a\\u0000": 6}}', r"'a\x00' is not the path"),
        ('{"files": {"' + "a" * 300 + '": 6}}', "aaa' is not the path"),
        ('{"files": {}, "sha256": {"a": 3}}', "int` - at `$.sha256[...]`"),
        ('{"files": {}, "step": 1e400}', "out of range"),
        ('{"files": {}, "step": -3}', ">= 0 - at `$.step`"),
    ],
    ids=lambda v: v[:24],
)
def test_a_commit_of_other_content_is_one_error(content, found, tmp_path):
    path = make(tmp_path, 3)
    (tmp_path / "outside").write_text("secret")
    (path / COMMIT).write_text(content, encoding="latin1")
    with pytest.raises(ValueError) as refused:
        read_commit(path)
    said = str(refused.value)
    assert said.startswith(f"{path / COMMIT}: ") and found in said
    assert "\n" not in said and len(said) < 1000


@pytest.mark.parametrize(
    "name, content, line",
    [
        ("shards/a.distcp", b"x" * 9, "the file has 9 bytes, but COMMIT lists 10"),
        ("shards/a.distcp", None, ".* is missing"),
        ("extra.json", b"[]", "the content has changed"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, line):
    file = make(tmp_path, 3) / name
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with refused(rf"step_000003/{name}: {line}"):
        read_commit(tmp_path / "step_000003")


def test_a_commit_without_the_newer_fields_is_read(tmp_path):
    path = make(tmp_path, 3)
    (path / COMMIT).write_text('{"files": {"extra.json": 2}}')
    assert read_commit(path) == {"files": {"extra.json": 2}, "sha256": {}}


def test_a_very_large_commit_is_not_read(tmp_path):
    path = make(tmp_path, 3)
    os.truncate(path / COMMIT, 1 << 40)
    with refused(r"COMMIT: the file has 1099511627776 bytes"):
        read_commit(path)


def test_latest_and_prune_use_the_step_and_delete_the_uncommitted(tmp_path):
    assert latest(tmp_path) is latest(tmp_path / "nowhere") is None
    for step in (2, 10, 9):
        make(tmp_path, step)
    unfinished = make(tmp_path, 11, commit=False)
    (tmp_path / "step_x").mkdir()
    assert latest(tmp_path) == checkpoint_path(tmp_path, 10)
    assert [p.name for p in prune(tmp_path, 2, newest=10)] == ["step_000002", "step_000011"]
    assert not checkpoint_path(tmp_path, 2).exists() and not unfinished.exists()
    assert latest(tmp_path) == checkpoint_path(tmp_path, 10) and (tmp_path / "step_x").exists()


def test_a_commit_covers_only_synced_files(tmp_path, monkeypatch):
    """Every file and folder is synced before COMMIT gets its name."""
    synced, real = [], os.fsync

    def fsync(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    path = make(tmp_path, 3)
    before_commit = synced[: synced.index(str(path / f".{COMMIT}.draft"))]
    vouched = (path, path / "shards", path / "shards/a.distcp", path / "extra.json", tmp_path)
    assert {str(p) for p in vouched} <= set(before_commit)
    assert synced[-1] == str(path), "the name of COMMIT"


def test_the_newest_undamaged_checkpoint_with_a_line_about_each_damaged_one(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    (checkpoint_path(tmp_path, 3) / COMMIT).write_text("{}")
    (checkpoint_path(tmp_path, 2) / "extra.json").unlink()
    path, damaged = latest_whole(tmp_path)
    assert path == checkpoint_path(tmp_path, 1)
    assert len(damaged) == 2 and "step_000003/COMMIT: the file is not a JSON list of " in damaged[0]
    (checkpoint_path(tmp_path, 1) / COMMIT).write_text("")
    with pytest.raises(RuntimeError, match="every checkpoint is damaged"):
        latest_whole(tmp_path)
    assert latest_whole(tmp_path / "nowhere") == (None, [])


def test_a_damaged_later_checkpoint_does_not_displace_an_undamaged_one(tmp_path):
    """A start resumed from step 3, because step 6 is damaged, and has just written step 4."""
    for step in (3, 4, 6):
        make(tmp_path, step)
    (checkpoint_path(tmp_path, 6) / "extra.json").unlink()
    assert [p.name for p in prune(tmp_path, 1, newest=4)] == ["step_000003"]
    assert latest_whole(tmp_path)[0] == checkpoint_path(tmp_path, 4)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RecursionError("deep"), OverflowError("inf")])
def test_an_unreadable_checkpoint_is_skipped(tmp_path, error):
    for step in (3, 6):
        make(tmp_path, step)

    def check(path):
        if path.name == "step_000006":
            raise error

    path, damaged = latest_whole(tmp_path, check)
    assert path == checkpoint_path(tmp_path, 3)
    assert damaged == [f"{checkpoint_path(tmp_path, 6)}: {error}"]
