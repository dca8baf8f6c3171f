"""The rollout store: torn, damaged, full, and how many bytes a token takes."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from blocks import block
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_scalerl.rollouts import store
from megatron_scalerl.rollouts.store import (
    SEGMENT_START,
    StoreWriter,
    block_bytes,
    check_position,
    read_arrays,
    read_block,
    read_completions,
    read_head,
    read_header,
    scan,
    segment_path,
    segments,
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


def whole(folder):
    """Group ids of all blocks of all segments, each verified."""
    found = []
    for number in segments(folder):
        path = segment_path(folder, number)
        for stored, head in scan(path):
            assert read_block(path, stored).group_id == head.group_id
            found.append(head.group_id)
    return found


def test_blocks_headers_and_single_completions_are_read_by_place(tmp_path):
    places = filled(tmp_path)
    path = segment_path(tmp_path, 0)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [(p.offset, p.nbytes) for p, _ in scan(path)] == [(p.offset, p.nbytes) for p in places]
    for n, place in enumerate(places):
        _, header, data = block(n)
        stored = read_block(path, place)
        assert (stored.group_id, stored.header, [*map(bytes, stored.completions)]) == (n, header, [*data])
        assert read_header(path, place) == (n, header)
        assert [*read_completions(path, place, (0, 1))] == [*data]
    assert [stored_header(head) for _, head in scan(path)] == [block(n)[1] for n in range(3)]


def test_segments_roll_and_one_file_is_open(tmp_path):
    size = len(block(0)[0])
    writer = StoreWriter(tmp_path, segment_bytes=SEGMENT_START + 2 * size)
    places = [writer.append(block(n)[0]) for n in range(5)]
    opened = [os.path.realpath(f"/proc/self/fd/{handle}") for handle in os.listdir("/proc/self/fd")]
    assert len([path for path in opened if path.startswith(f"{tmp_path}/")]) == 1
    writer.complete_segment()
    places.append(writer.append(block(5)[0]))
    writer.close()
    assert [p.segment for p in places] == [0, 0, 1, 1, 2, 3]
    assert whole(tmp_path) == list(range(6))
    again = StoreWriter(tmp_path, segment_bytes=SEGMENT_START + 2 * size)
    assert again.position == (3, SEGMENT_START + size)
    assert [again.append(block(n)[0]).segment for n in (6, 7)] == [3, 4]
    again.close()


def test_the_tail_may_be_cut_at_every_byte(tmp_path, monkeypatch):
    """Whole blocks stay, the rest is cut, and the store goes on there."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # stand-in: the disk is not what is tested
    whole_folder, folder = tmp_path / "whole", tmp_path / "cut"
    whole_folder.mkdir()
    folder.mkdir()
    places = filled(whole_folder)
    content = segment_path(whole_folder, 0).read_bytes()
    path = segment_path(folder, 0)
    for cut in [*range(places[0].offset + 60), *range(places[2].offset - 60, len(content) + 1)]:
        path.write_bytes(content[:cut])
        kept = [n for n, p in enumerate(places) if p.offset + p.nbytes <= cut]
        writer = StoreWriter(folder)
        stored = writer.append(block(7)[0])
        writer.close()
        assert segments(folder) == [0] and stored.offset == (places[len(kept)].offset if len(kept) < 3 else cut)
        assert whole(folder) == [*kept, 7]


def test_a_segment_that_a_machine_left_empty_is_begun_again(tmp_path):
    segment_path(tmp_path, 0).write_bytes(bytes(4096))
    assert filled(tmp_path)[0] == BlockRef(segment=0, offset=SEGMENT_START, nbytes=len(block(0)[0]))
    assert whole(tmp_path) == [0, 1, 2]


def test_a_machine_may_leave_zeros_after_the_last_block(tmp_path):
    filled(tmp_path)
    with open(segment_path(tmp_path, 0), "ab") as file:
        file.write(bytes(100_000))
    StoreWriter(tmp_path).close()
    assert whole(tmp_path) == [0, 1, 2]


def test_nothing_that_the_journal_names_is_cut(tmp_path):
    """A damaged block before the last one named stays where it is; appended blocks do not touch it."""
    places = filled(tmp_path)
    path = segment_path(tmp_path, 0)
    content = bytearray(path.read_bytes())
    content[places[1].offset + 2] ^= 1
    path.write_bytes(content + b"torn")
    writer = StoreWriter(tmp_path, durable=places[2])
    stored = writer.append(block(3)[0])
    writer.close()
    assert stored.offset == len(content)
    assert path.read_bytes() == bytes(content) + block(3)[0]
    assert [read_block(path, p).group_id for p in (places[0], places[2], stored)] == [0, 2, 3]


@pytest.mark.parametrize("damage", ["shorter", "no segment", "missing"])
def test_a_store_that_is_less_than_the_journal_names_goes_on_in_a_new_segment(tmp_path, damage):
    places = filled(tmp_path)
    path = segment_path(tmp_path, 0)
    if damage == "missing":
        path.unlink()
    elif damage == "shorter":
        os.truncate(path, places[2].offset + 5)
    else:
        path.write_bytes(b"x" * path.stat().st_size)
    before = path.read_bytes() if path.exists() else None
    writer = StoreWriter(tmp_path, durable=places[2])
    assert writer.append(block(3)[0]) == BlockRef(segment=1, offset=SEGMENT_START, nbytes=len(block(3)[0]))
    writer.close()
    assert (path.read_bytes() if path.exists() else None) == before


def test_every_flipped_bit_is_found_and_named(tmp_path):
    places = filled(tmp_path, count=1)
    path = segment_path(tmp_path, 0)
    content = path.read_bytes()
    for at in range(SEGMENT_START, len(content)):
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
    with pytest.raises(ValueError, match=r"checksum is [0-9a-f]{8}, and [0-9a-f]{8} is recorded"):
        read_completions(path, places[0], [1])
    for at in range(SEGMENT_START):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(ValueError, match=r"byte 0: .* segment of rollouts in format 1"):
            list(scan(path))


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 400))
@settings(deadline=None, max_examples=300)
def test_no_content_is_more_than_a_value_error(tmp_path_factory, noise, at, size):
    """Noise over a block, at any place, under a right and a wrong checksum of its head."""
    folder = tmp_path_factory.getbasetemp()
    path = segment_path(folder, 77)
    good = block(0)[0]
    content = store.segment_header() + good[:at] + noise + good[at + len(noise) :]
    path.write_bytes(content)
    for read in (
        lambda: list(scan(path)),
        lambda: read_block(path, BlockRef(segment=77, offset=at, nbytes=size)),
        lambda: read_block(path, BlockRef(segment=77, offset=SEGMENT_START, nbytes=len(good))),
        lambda: read_completions(path, BlockRef(segment=77, offset=SEGMENT_START, nbytes=len(good)), [1, 0]),
    ):
        try:
            read()
        except ValueError as error:
            assert str(error).startswith(f"{path}: byte ")
    StoreWriter(folder).close()
    path.unlink(missing_ok=True)


def test_a_completion_that_is_none_is_named(tmp_path):
    """Under right checksums, as a faulty writer would leave it."""
    _, header, data = block(0)
    writer = StoreWriter(tmp_path)
    stored = writer.append(block_bytes(0, header, (data[0], data[1][:-1])))
    writer.close()
    path = segment_path(tmp_path, 0)
    with pytest.raises(ValueError, match=rf"^{path}: byte 16: rollout: {len(data[1]) - 1} bytes .* {len(data[1])}$"):
        read_arrays(path, stored)


def test_a_reference_to_more_than_there_is_reads_nothing(tmp_path):
    filled(tmp_path)
    path = segment_path(tmp_path, 0)
    for offset, size in [(16, 2**62), (2**62, 16), (-1, 16), (16, -1)]:
        with pytest.raises(ValueError, match=rf"byte {offset}: \d+ of {size} bytes"):
            read_block(path, BlockRef(segment=0, offset=offset, nbytes=size))
    with pytest.raises(ValueError, match=r"segment-00009.bin: .* does not exist"):
        read_block(segment_path(tmp_path, 9), BlockRef(segment=9, offset=16, nbytes=100))


def test_a_position_behind_a_checkpoint_is_refused(tmp_path):
    check_position(tmp_path, 0, 0)
    filled(tmp_path)
    size = segment_path(tmp_path, 0).stat().st_size
    check_position(tmp_path, 0, size)
    for segment, offset in [(0, size + 1), (1, 20)]:
        with pytest.raises(ValueError, match=rf"segment-0000{segment}.bin: \d+ bytes are left of the {offset} "):
            check_position(tmp_path, segment, offset)
    filled(tmp_path, segment_bytes=1)
    check_position(tmp_path, 0, 10**9)  # a later segment: this one was complete, and may be gone


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
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path, *paths], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2", str(segment_path(tmp_path, 0))]
    assert segment_path(tmp_path, 0).stat().st_size == SEGMENT_START + 2 * len(block(0)[0])
    assert whole(tmp_path) == [0, 1]


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


def test_a_link_in_the_place_of_a_segment_is_not_followed(tmp_path):
    target = tmp_path / "mine"
    target.write_bytes(store.segment_header())
    segment_path(tmp_path, 0).symlink_to(target)
    with pytest.raises(OSError, match=r"segment-00000.bin"):
        StoreWriter(tmp_path)


def test_a_header_that_was_written_before_reasons_were_kept_can_be_read():
    data, header, _ = block(0)
    head = read_head(data)
    old = json.loads(head.header)
    assert old.pop("lost_reasons") == {}
    assert stored_header(replace(head, header=json.dumps(old).encode())) == header
