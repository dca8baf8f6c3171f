"""The rollout store: torn, damaged, full, and how many bytes a token takes."""

import json
import os
import sys
from dataclasses import replace

import pytest
from blocks import block
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import printed

from megatron_scalerl.rollouts.store import (
    StoreWriter,
    block_bytes,
    read_arrays,
    read_block,
    read_completions,
    read_head,
    read_header,
    segment_path,
    stored_header,
)
from megatron_scalerl.types import BlockRef


def filled(folder, count=3, **options):
    """A store of `count` groups; their places."""
    writer = StoreWriter(folder, **options)
    places = [writer.append(block(n)[0]) for n in range(count)]
    writer.sync()
    writer.close()
    return places


def test_blocks_headers_and_single_completions_are_read_by_place(tmp_path):
    places = filled(tmp_path)
    path = segment_path(tmp_path, 0)
    assert path.stat().st_mode & 0o777 == 0o600
    for n, place in enumerate(places):
        _, header, data = block(n)
        stored = read_block(path, place)
        assert (stored.group_id, stored.header, [*map(bytes, stored.completions)]) == (n, header, [*data])
        assert read_header(path, place) == (n, header)
        assert [*read_completions(path, place, (0, 1))] == [*data]


def test_segments_roll_and_one_file_is_open(tmp_path):
    size = len(block(0)[0])
    writer = StoreWriter(tmp_path, segment_bytes=2 * size)
    places = [writer.append(block(n)[0]) for n in range(5)]
    opened = [os.path.realpath(f"/proc/self/fd/{handle}") for handle in os.listdir("/proc/self/fd")]
    assert len([path for path in opened if path.startswith(f"{tmp_path}/")]) == 1
    writer.complete_segment()
    places.append(writer.append(block(5)[0]))
    writer.close()
    assert [p.segment for p in places] == [0, 0, 1, 1, 2, 3]
    assert [p.offset for p in places] == [0, size, 0, size, 0, 0]
    assert [read_block(segment_path(tmp_path, p.segment), p).group_id for p in places] == list(range(6))


@pytest.mark.parametrize("last", [0, 4])
def test_a_restart_begins_a_segment_and_leaves_what_is_torn(tmp_path, last):
    """Retention may have deleted the last segment, whose number is not used again."""
    filled(tmp_path)
    path = segment_path(tmp_path, 0)
    content = path.read_bytes()[:-9]
    path.write_bytes(content)
    writer = StoreWriter(tmp_path, last_segment=last)
    stored = writer.append(block(3)[0])
    writer.close()
    assert stored == BlockRef(segment=last + 1, offset=0, nbytes=len(block(3)[0]))
    assert read_block(segment_path(tmp_path, last + 1), stored).group_id == 3
    assert path.read_bytes() == content


def test_every_flipped_bit_is_found_and_named(tmp_path):
    places = filled(tmp_path, count=1)
    path = segment_path(tmp_path, 0)
    content = path.read_bytes()
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"^{path}: byte \d+: \w") as error:
            read_block(path, places[0])
        assert "\n" not in str(error.value)
    damaged = bytearray(content)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert read_completions(path, places[0], [0]) == [block(0)[2][0]], "the damage is in the other completion"
    with pytest.raises(ValueError, match=r"checksum is [0-9a-f]{8}, and [0-9a-f]{8} was recorded"):
        read_completions(path, places[0], [1])


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 400))
@settings(deadline=None, max_examples=300)
def test_no_content_is_more_than_a_value_error(tmp_path_factory, noise, at, size):
    """Noise over a block, at any place, under a right and a wrong checksum of its head."""
    folder = tmp_path_factory.getbasetemp()
    path = segment_path(folder, 77)
    good = block(0)[0]
    path.write_bytes(good[:at] + noise + good[at + len(noise) :])
    for read in (
        lambda: read_block(path, BlockRef(segment=77, offset=at, nbytes=size)),
        lambda: read_block(path, BlockRef(segment=77, offset=0, nbytes=len(good))),
        lambda: read_completions(path, BlockRef(segment=77, offset=0, nbytes=len(good)), [1, 0]),
    ):
        try:
            read()
        except ValueError as error:
            assert str(error).startswith(f"{path}: byte ")
    path.unlink()


def test_a_completion_that_is_none_is_named(tmp_path):
    """Under right checksums, as a faulty writer would leave it."""
    _, header, data = block(0)
    writer = StoreWriter(tmp_path)
    stored = writer.append(block_bytes(0, header, (data[0], data[1][:-1])))
    writer.close()
    path = segment_path(tmp_path, 0)
    with pytest.raises(ValueError, match=rf"^{path}: byte 0: rollout: {len(data[1]) - 1} bytes .* {len(data[1])}$"):
        read_arrays(path, stored)


def test_a_reference_to_more_than_there_is_reads_nothing(tmp_path):
    filled(tmp_path)
    path = segment_path(tmp_path, 0)
    for offset, size in [(16, 2**62), (2**62, 16), (-1, 16), (16, -1)]:
        with pytest.raises(ValueError, match=rf"byte {offset}: the file is too short: \d+ of {size} bytes"):
            read_block(path, BlockRef(segment=0, offset=offset, nbytes=size))
    with pytest.raises(ValueError, match=r"segment-00009.bin: .* does not exist"):
        read_block(segment_path(tmp_path, 9), BlockRef(segment=9, offset=16, nbytes=100))


LIMITED = """
import os, resource, signal, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from blocks import block
from megatron_scalerl.rollouts.store import StoreWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
size = len(block(0)[0])
resource.setrlimit(resource.RLIMIT_FSIZE, (size * 2 + size // 2, resource.RLIM_INFINITY))
writer = StoreWriter(folder)
try:
    for n in range(5):
        writer.append(block(n)[0])
except OSError as error:
    print(n, error.filename)
"""


@pytest.mark.slow
def test_a_write_that_is_cut_short_leaves_nothing(tmp_path):
    """A limit on the file's size stands for the disk: the write that passes it is cut short, then fails."""
    paths = [p for p in sys.path if p]
    assert printed(sys.executable, "-c", LIMITED, tmp_path, *paths).split() == ["2", str(segment_path(tmp_path, 0))]
    assert segment_path(tmp_path, 0).read_bytes() == block(0)[0] + block(1)[0]


def test_after_a_failed_sync_nothing_is_called_durable(tmp_path, monkeypatch):
    writer = StoreWriter(tmp_path)
    writer.append(block(0)[0])

    def failing_stand_in(handle):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing_stand_in)
        with pytest.raises(OSError, match=r"Input/output error: '.*segment-00000.bin'"):
            writer.sync()
    for call in (writer.sync, lambda: writer.append(block(1)[0])):
        with pytest.raises(OSError, match=r"Input/output error: '.*segment-00000.bin'"):
            call()
    writer.close()


def test_a_header_that_was_written_before_reasons_were_kept_can_be_read():
    data, header, _ = block(0)
    head = read_head(data)
    old = json.loads(head.header)
    assert old.pop("lost_reasons") == {}
    assert stored_header(replace(head, header=json.dumps(old).encode())) == header
