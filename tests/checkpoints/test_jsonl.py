"""Every growing file of a run survives a crash at any byte, and a disk that is full."""

import contextlib
import json
import os
import resource

import pytest
from refusals import refused

from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl, recover, rewrite


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
    with refused(r"f.jsonl line 2: the line is not a JSON object"):
        read_jsonl(path)
    path.write_text('{"a": 1}\n7\n')
    with refused(r"f.jsonl line 2: the line has to be a JSON object, not a int"):
        read_jsonl(path)


def test_a_pipe_in_place_of_a_file_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "validation.jsonl")
    with refused(r"validation\.jsonl: this path is not a regular file"):
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
