"""Every growing file of a run survives a crash at any byte, and a disk that is full."""

import asyncio
import contextlib
import json
import os
import resource
import shutil

import pytest
from fakes.run import attempt, recipe

from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl, recover, rewrite
from megatron_scalerl.controller.ledger import Ledger
from megatron_scalerl.controller.metrics import Metrics
from megatron_scalerl.controller.run_folder import RunFolder
from megatron_scalerl.rollouts.history import read_groups, read_history
from megatron_scalerl.rollouts.journal import Journal

FILES = (
    "journal.jsonl",
    "ledger.jsonl",
    "metrics.jsonl",
    "validation.jsonl",
    "validation_by_prompt.jsonl",
    "attempts.jsonl",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    settings = recipe(root, steps=2)
    attempt(settings, kill_at_s=16)
    return root


def open_all(root):
    """Everything that a start opens, in its order; one row more in every file."""
    folder = RunFolder(recipe(root, steps=2))
    folder.close()
    history = read_history(folder.path)
    Ledger(folder.path / "ledger.jsonl", "device_hours", incarnation="b").close()
    Metrics(folder.path, "r", step=2, batches=2, last_step=2).close()
    asyncio.run(Journal(folder.path, history).close())
    read_groups(folder.path, history, history.finished)
    for name in FILES:
        with contextlib.closing(JsonlWriter(folder.path / name)) as file:
            file.append({"step": 1, "batches": 1, "more": True})


@pytest.mark.parametrize("name", FILES)
def test_each_file_of_a_run_may_be_torn(tmp_path, whole, name):
    """Cut within its last two rows, through everything that a start opens; every byte: see below."""
    content = (whole / "r" / name).read_bytes()
    lines = content.splitlines(keepends=True)
    first = len(content) - sum(map(len, lines[-2:]))
    for cut in {*range(first, len(content), max(1, (len(content) - first) // 10)), len(content) - 1}:
        root = tmp_path / str(cut)
        shutil.copytree(whole, root)
        settings = (root / "r" / "recipe.yaml").read_text().replace(str(whole), str(root))
        (root / "r" / "recipe.yaml").write_text(settings)
        (root / "r" / name).write_bytes(content[:cut])
        open_all(root)
        rows = read_jsonl(root / "r" / name)
        assert rows[-1] == {"step": 1, "batches": 1, "more": True}, "no row is glued to the torn one"
        shutil.rmtree(root)


def test_a_file_may_be_cut_at_every_byte(tmp_path):
    path = tmp_path / "f.jsonl"
    rows = [{"n": n, "text": 'a "}\n{ é' * n} for n in range(5)]
    content = b"".join(json.dumps(r).encode() + b"\n" for r in rows)
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        kept = content[:cut].count(b"\n") + (content[cut : cut + 1] == b"\n")
        assert read_jsonl(path) == rows[:kept]
        with contextlib.closing(JsonlWriter(path)) as file:
            file.append({"n": "next"})
        assert read_jsonl(path) == [*rows[:kept], {"n": "next"}]


def test_blocks_that_a_machine_left_empty_are_cut(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"a":1}\n' + bytes(200_000))
    recover(path)
    assert path.read_bytes() == b'{"a":1}\n'


def test_a_broken_row_in_the_middle_is_named(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ValueError, match=r"f.jsonl line 2: it is not a JSON object"):
        read_jsonl(path)
    path.write_text('{"a": 1}\n7\n')
    with pytest.raises(ValueError, match=r"f.jsonl line 2: it is not a JSON object but of type int"):
        read_jsonl(path)


def test_a_pipe_in_place_of_a_file_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "validation.jsonl")
    with pytest.raises(ValueError, match=r"validation\.jsonl: it is not a file"):
        read_jsonl(tmp_path / "validation.jsonl")


def test_a_full_disk_leaves_no_half_row(tmp_path):
    """A limit on the file's size stands for the disk: the write that passes it is cut short, then fails."""
    path = tmp_path / "f.jsonl"
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        file = JsonlWriter(path)
        file.append({"text": "x" * 900})
        try:
            file.append({"text": "y" * 900})
        except OSError as error:
            os._exit(0 if error.filename == str(path) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read_jsonl(path) == [{"text": "x" * 900}]


def test_rewriting_replaces_all_or_nothing(tmp_path):
    path = tmp_path / "f.jsonl"
    rewrite(path, [{"n": 1}, {"n": 2}])
    with pytest.raises(TypeError):
        rewrite(path, [{"n": 3}, {"n": object()}])
    assert read_jsonl(path) == [{"n": 1}, {"n": 2}]


def test_numbers_that_json_has_not_become_null(tmp_path):
    with contextlib.closing(JsonlWriter(tmp_path / "f.jsonl")) as file:
        file.append({"a": float("nan"), "b": float("inf")})
    assert read_jsonl(str(tmp_path / "f.jsonl")) == [{"a": None, "b": None}]
    with pytest.raises(OSError, match=r"f\.jsonl"):
        file.append({"after": "its end"})
