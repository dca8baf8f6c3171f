"""The secret's file: its owner reads it, and nobody else could."""

import os

import pytest

from megatron_scalerl.processes.secret_file import read_secret, write_secret


def test_what_is_written_is_read_and_private(tmp_path):
    path = tmp_path / "control/secret"
    path.parent.mkdir(mode=0o755)
    path.write_text("of an earlier start")
    path.chmod(0o644)
    write_secret(path, "s" * 64)
    assert read_secret(path) == "s" * 64
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


def test_a_link_in_its_place_is_replaced_and_never_followed(tmp_path):
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "control/secret"
    path.parent.mkdir()
    elsewhere.write_text("kept")
    path.symlink_to(elsewhere)
    with pytest.raises(OSError):
        read_secret(path)
    write_secret(path, "new")
    assert elsewhere.read_text() == "kept" and read_secret(path) == "new"


def test_a_file_that_others_read_or_that_is_empty_is_refused(tmp_path):
    path = tmp_path / "control/secret"
    write_secret(path, "s")
    path.chmod(0o640)
    with pytest.raises(ValueError, match=f"secret belongs to user .* a file of user {os.geteuid()} with mode 0600"):
        read_secret(path)
    path.chmod(0o600)
    path.write_text("")
    with pytest.raises(ValueError, match="secret is empty"):
        read_secret(path)
