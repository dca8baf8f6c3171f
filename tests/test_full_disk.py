"""A disk that is full at any moment ends the run in one line that names the path; with space, it loses nothing."""

import os
import subprocess
import traceback

import pytest
from fakes.run import attempt, check_records, recipe

from megatron_scalerl.rollouts.history import read_history
from megatron_scalerl.rollouts.store import read_block, segment_path


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, and how to give it another size (KiB)."""

    def resize(kib):
        return subprocess.run(["mount", "-o", f"remount,size={kib}k", tmp_path]).returncode == 0

    mount = f"mount -t tmpfs -o size=64k none {tmp_path}".split()
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield tmp_path, resize
    subprocess.run(["umount", "-l", tmp_path], check=True)


def check_whole(folder):
    """Every group of the journal is whole, and every row ends with its line end."""
    for event in read_history(folder).finished.values():
        read_block(segment_path(folder / "rollouts", event.segment), event.stored)
    for path in folder.glob("*.jsonl"):
        assert path.stat().st_size == 0 or path.read_bytes().endswith(b"\n")
    assert not list(folder.rglob("*.draft"))


def in_a_process(settings):
    """Why an attempt ended, or its OSError; its open files end with its process, as a run's do."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            text = str(attempt(settings).reason)
        except BaseException as error:
            text = str(error) if getattr(error, "filename", None) else traceback.format_exc()
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_it_goes_on_with_space(small_disk):
    """The disk grows by a page after each end, so that it is full at another moment of the run each time."""
    folder, resize = small_disk
    settings = recipe(folder)
    ends, kib = [], 12
    while True:
        assert resize(kib)
        end = in_a_process(settings)
        if end == "all 6 steps are made":
            break
        assert end.startswith(f"[Errno 28] No space left on device: '{folder}/") and "\n" not in end, end
        ends.append(end.removeprefix(f"[Errno 28] No space left on device: '{folder}/r/"))
        check_whole(folder / "r")
        kib += 4
    check_records(folder / "r")
    kinds = {name for end in ends for name in ("segment", "jsonl", "checkpoints") if name in end}
    assert kinds >= {"segment", "jsonl"}, ends
