"""Only regular files inside the folder are opened."""

import os

import pytest

from megatron_scalerl.checkpoints.plain_files import open_plain


def test_only_regular_files_of_the_folder_are_opened(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    folder.mkdir()
    outside.write_text("secret")
    (folder / "link").symlink_to(outside)
    (folder / "inner").symlink_to("plain")
    (folder / "plain").write_text("text")
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe")
    with open_plain(folder, "plain") as file:
        assert file.read() == b"text"
    for name, found in {
        "link": "this path is a symbolic link",
        "inner": "this path is a symbolic link",
        "pipe": "this path is not a regular file",
        "sub": "this path is not a regular file",
        "none": "this file of the checkpoint is missing",
        "../outside": "is not a plain file name",
        str(outside): "is not a plain file name",
        "..": "is not a plain file name",
        "": "is not a plain file name",
        "a\0b": "is not a plain file name",
    }.items():
        with pytest.raises(ValueError, match=found):
            open_plain(folder, name)
