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
        "link": "it is a link",
        "inner": "it is a link",
        "pipe": "it is not a regular file",
        "sub": "it is not a regular file",
        "none": "this file of the checkpoint is missing",
        "../outside": "is not the name of a file",
        str(outside): "is not the name of a file",
        "..": "is not the name of a file",
        "": "is not the name of a file",
        "a\0b": "is not the name of a file",
    }.items():
        with pytest.raises(ValueError, match=found):
            open_plain(folder, name)
