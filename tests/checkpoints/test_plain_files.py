"""Only regular files inside the folder are opened."""

import os

import pytest

from megatron_scalerl.checkpoints.plain_files import PlainFile


def test_only_regular_files_of_the_folder_are_opened(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    folder.mkdir()
    outside.write_text("secret")
    (folder / "link").symlink_to(outside)
    (folder / "inner").symlink_to("plain")
    (folder / "plain").write_text("text")
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe")
    with PlainFile(folder, "plain") as file:
        assert file.read(10) == b"text"
        with pytest.raises(ValueError, match="expected at most 2 bytes, found 4"):
            file.read(2)
        with pytest.raises(ValueError, match=r"plain: expected 9 bytes at byte 2, found 2 \(truncated"):
            file.read_into(2, memoryview(bytearray(9)))
    for name, found in {
        "link": "expected a file, found a link",
        "inner": "expected a file, found a link",
        "pipe": "expected a regular file",
        "sub": "expected a regular file",
        "none": "expected a file of the checkpoint, found none",
        "../outside": "expected names of files in the folder",
        str(outside): "expected names of files in the folder",
        "..": "expected names of files in the folder",
        "": "expected names of files in the folder",
        "a\0b": "expected names of files in the folder",
    }.items():
        with pytest.raises(ValueError, match=found):
            PlainFile(folder, name)
