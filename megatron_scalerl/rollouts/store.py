"""The run's rollout store: finished groups in the files RUN/rollouts/segment-NNNNN.bin.

One writer appends to the newest segment, and begins a new segment at `SEGMENT_BYTES`. A reader takes the place of a
group's block (`types.BlockRef`) from the journal and reads the whole block, the head, or single completions. A reader
verifies the checksum of everything read.

The life of a segment: `_begin_segment`, then `append` and `sync` by turns. The next segment begins when this segment
is full, after a restart, or by `complete_segment`; then this segment gets no more bytes, and `retention` may delete
the segment. A crash may leave an incomplete block at the end, which no event of the journal names. Only the owner can
read a segment's file.

A segment has a checksummed block for each finished group. Little-endian, without padding:

    segment       blocks, one after another; in runs of older versions MSRLSEGM and 8 bytes before the first block
    block         magic GRUP, checksum u32, bytes of the block u64, group id i64, bytes of the header u32, N u32
                  table [N] (bytes of the completion u64, CRC-32 of the completion u32)
                  header (JSON, `GroupHeader`)
                  completions [N] in the format of `batching.rollout_bytes`; each part of an episode counts as one

The block's checksum is the CRC-32 of the bytes from the checksum to the first completion. So the header and each
completion of a block can be read and verified alone.
"""

import contextlib
import os
import re
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import accumulate
from pathlib import Path

import msgspec

from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.batching.rollout_bytes import RolloutArrays
from megatron_scalerl.checkpoints.atomic_io import check_in_place, naming, sync, write_all
from megatron_scalerl.record import record
from megatron_scalerl.types import BlockRef, Completion, Prompt, Score

SEGMENT_BYTES = 512 << 20
"""Size at which a segment is complete and the next block begins a new segment (bytes)."""
_SEGMENT = re.compile(r"segment-(\d+)\.bin")
_FIRST_READ = 1 << 14
"""Number of bytes that are read first for a block's head. Most heads are not longer."""
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"GRUP"
_FIXED = struct.Struct("<4sIQqII")
_COVERED = struct.Struct("<QqII")
"""The fields of `_FIXED` that the checksum covers: size, group id, header bytes, number of completions."""
_ENTRY = struct.Struct("<QI")


@record
class GroupHeader:
    """The facts about a finished group that are stored as JSON; `types.RolloutGroup` explains the fields."""

    prompt: Prompt
    epoch: int
    first_token_version: int
    lost_completions: int
    scores: tuple[Score, ...]
    """[C] the score of each completion."""
    completions: tuple[Completion, ...]
    """[C] the facts about each completion."""
    lost_reasons: Mapping[str, int] = field(default_factory=dict)


@record
class BlockHead:
    """The head of a block, up to the first completion, after the checksum was verified."""

    nbytes: int
    """Size of the whole block (bytes)."""
    group_id: int
    header: bytes
    """JSON of a `GroupHeader`."""
    offsets: tuple[int, ...]
    """[N] offset of each completion in the block."""
    sizes: tuple[int, ...]
    """[N] size of each completion (bytes)."""
    checksums: tuple[int, ...]
    """[N] CRC-32 of each completion."""


def block_bytes(group_id: int, header: GroupHeader, completions: Sequence[bytes]) -> bytes:
    """The bytes of the block for one group. completions: in the format of `batching.rollout_bytes`."""
    encoded = msgspec.json.encode(header)
    size = _FIXED.size + _ENTRY.size * len(completions) + len(encoded) + sum(map(len, completions))
    # The checksum covers the head only, because each completion has a separate checksum and is read alone.
    covered = _COVERED.pack(size, group_id, len(encoded), len(completions))
    table = b"".join(_ENTRY.pack(len(c), zlib.crc32(c)) for c in completions)
    start = b"".join([covered, table, encoded])
    return b"".join([_MAGIC, _CHECKSUM.pack(zlib.crc32(start)), start, *completions])


def head_bytes(data: bytes) -> int:
    """Size of a block's head (bytes), from the block's first `_FIXED.size` bytes. Raises ValueError if invalid."""
    if len(data) < _FIXED.size:
        raise ValueError(f"the file ends after {len(data)} bytes of the block; a block has at least {_FIXED.size}")
    magic, _, size, _, header_bytes, completions = _FIXED.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError(f"the bytes {magic!r} begin no block of a group")
    head = _FIXED.size + _ENTRY.size * completions + header_bytes
    if head > size:
        raise ValueError(f"the block is damaged: the whole has {size} bytes, the head alone {head} bytes")
    return head


def read_head(data: bytes) -> BlockHead:
    """The head of the block at the start of `data`. Raises ValueError for an incomplete or damaged head."""
    end = head_bytes(data)
    if len(data) < end:
        raise ValueError(f"only {len(data)} of the {end} bytes of the block's head are in the file")
    _, checksum, size, group_id, _, completions = _FIXED.unpack_from(data)
    check_bytes(memoryview(data)[8:end], checksum)
    table_end = _FIXED.size + _ENTRY.size * completions
    entries = list(_ENTRY.iter_unpack(memoryview(data)[_FIXED.size : table_end]))
    sizes = tuple(entry[0] for entry in entries)
    offsets = [*accumulate(sizes, initial=end)]
    completions_end = offsets.pop()
    if completions_end != size:
        raise ValueError(f"the completions end at byte {completions_end}, but the whole block has {size} bytes")
    return BlockHead(
        nbytes=size,
        group_id=group_id,
        header=bytes(data[table_end:end]),
        offsets=tuple(offsets),
        sizes=sizes,
        checksums=tuple(entry[1] for entry in entries),
    )


def check_bytes(data: bytes | memoryview, checksum: int) -> None:
    """Raises ValueError unless the CRC-32 of `data` is `checksum`."""
    actual = zlib.crc32(data)
    if actual != checksum:
        raise ValueError(f"the bytes are damaged: the checksum is {actual:08x}, and {checksum:08x} was recorded")


@record
class StoredGroup:
    """The contents of a block, read from the store and verified."""

    group_id: int
    header: GroupHeader
    completions: tuple[memoryview, ...]
    """[N] completions in the format of `batching.rollout_bytes`."""


def positions_of(completions: Iterable[Completion]) -> tuple[int, ...]:
    """[C] for each completion of a group, the position in the block of the completion's first sample."""
    return (0, *accumulate(len(completion.samples) for completion in completions))[:-1]


def segment_path(folder: Path, segment: int) -> Path:
    """Path of a segment's file. folder: RUN/rollouts."""
    return folder / f"segment-{segment:05d}.bin"


def segments(folder: Path) -> list[int]:
    """Numbers of the segments in a folder, ascending. folder: RUN/rollouts."""
    matches = (_SEGMENT.fullmatch(path.name) for path in folder.glob("segment-*.bin"))
    return sorted(int(match[1]) for match in matches if match)


class StoreWriter:
    """Appends groups to the newest segment. `sync` may be called while another thread appends."""

    def __init__(self, folder: Path, *, last_segment: int = -1, segment_bytes: int = SEGMENT_BYTES):
        """folder: RUN/rollouts. last_segment: last segment that the journal names; -1 without a segment."""
        self.folder = folder
        self._limit = segment_bytes
        self._fd = -1
        self._complete = False
        self._failure: OSError | None = None
        self._lock = threading.RLock()
        # The journal may name a segment that was deleted, whose number is not used again.
        self.segment = max(*segments(folder), last_segment, -1)
        """Number of the newest segment; -1 in a store without a segment."""
        self._end = 0

    def append(self, block: bytes) -> BlockRef:
        """Append one block and return the block's place. The block is on the disk after the next `sync`.

        Raises OSError naming the file, after removing a partly written block.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            full = self._end + len(block) > self._limit
            if self._fd < 0 or (self._end and (full or self._complete)):
                self._begin_segment()
            try:
                with naming(segment_path(self.folder, self.segment)):
                    write_all(self._fd, block)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._end)
                raise
            stored = BlockRef(segment=self.segment, offset=self._end, nbytes=len(block))
            self._end += len(block)
            return stored

    def sync(self) -> None:
        """Return once every appended block is on the disk. A failed call's OSError is raised by all later calls."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._fd < 0:
                return
            try:
                path = segment_path(self.folder, self.segment)
                with naming(path):
                    os.fsync(self._fd)
                check_in_place(path, self._fd, self._end)
            except OSError as error:
                # After a failed sync the system may have dropped bytes, so no later sync proves anything about them.
                self._failure = error
                raise

    def complete_segment(self) -> None:
        """Complete the newest segment, so that the next block begins a new segment."""
        self._complete = True

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _begin_segment(self) -> None:
        self.sync()
        path = segment_path(self.folder, self.segment + 1)
        # O_EXCL and O_NOFOLLOW refuse an existing file or link, which could belong to another program.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(path, flags, 0o600)
        try:
            # Without a sync of the folder, a power loss may remove the new file's name.
            sync(self.folder)
        except OSError:
            os.close(handle)
            path.unlink(missing_ok=True)
            raise
        self.close()
        self._complete = False
        self._fd = handle
        self.segment += 1
        self._end = 0


def read_block(path: Path, stored: BlockRef) -> StoredGroup:
    """Read and verify the whole block at the place `stored` in the segment `path`.

    Raises ValueError, naming file and offset, for a missing or damaged block, and OSError.
    """
    with _placing(path, stored.offset):
        data = _pread(path, stored.offset, stored.nbytes)
        head = _check_size(read_head(data), stored)
        view = memoryview(data)
        completions = [view[at : at + size] for at, size in zip(head.offsets, head.sizes)]
        header = stored_header(head)
    for completion, at, checksum in zip(completions, head.offsets, head.checksums):
        with _placing(path, stored.offset + at):
            check_bytes(completion, checksum)
    return StoredGroup(group_id=head.group_id, header=header, completions=tuple(completions))


def read_arrays(path: Path, stored: BlockRef) -> tuple[StoredGroup, list[RolloutArrays]]:
    """(block at the place `stored`, [N] the completions as arrays). Raises as `read_block`."""
    group = read_block(path, stored)
    with _placing(path, stored.offset):
        return group, [rollout_bytes.read(completion) for completion in group.completions]


def read_header(path: Path, stored: BlockRef) -> tuple[int, GroupHeader]:
    """(group id, header) of the block at the place `stored`; reads no completions. Raises as `read_block`."""
    with _placing(path, stored.offset):
        head = _head_at(path, stored)
        return head.group_id, stored_header(head)


def read_completions(path: Path, stored: BlockRef, positions: Iterable[int]) -> list[bytes]:
    """The bytes of the completions at these positions in the block; no other completion is read.

    Raises as `read_block`, and IndexError for a position that the block does not have.
    """
    with _placing(path, stored.offset):
        head = _head_at(path, stored)
    completions = []
    for position in positions:
        at = stored.offset + head.offsets[position]
        with _placing(path, at):
            data = _pread(path, at, head.sizes[position])
            check_bytes(data, head.checksums[position])
        completions.append(data)
    return completions


def _head_at(path: Path, stored: BlockRef) -> BlockHead:
    bytes_left = path.stat().st_size - stored.offset
    # The head may be complete in a file that lost completions: without this check the loss would be noticed late.
    if bytes_left < stored.nbytes:
        raise ValueError(f"the file is too short: {max(0, bytes_left)} of {stored.nbytes} bytes are left")
    data = _pread(path, stored.offset, min(_FIRST_READ, stored.nbytes))
    size = head_bytes(data)
    if size > len(data):
        data = _pread(path, stored.offset, min(size, stored.nbytes))
    return _check_size(read_head(data), stored)


def _check_size(head: BlockHead, stored: BlockRef) -> BlockHead:
    if head.nbytes != stored.nbytes:
        raise ValueError(f"the block has {head.nbytes} bytes; the journal says {stored.nbytes} bytes")
    return head


def stored_header(head: BlockHead) -> GroupHeader:
    """Decode the group header in a block's head. Raises ValueError if the header is invalid."""
    try:
        header = msgspec.json.decode(head.header, type=GroupHeader)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the group's header is not valid: {error}") from None
    samples = sum(len(completion.samples) for completion in header.completions)
    if len(header.scores) != len(header.completions) or samples != len(head.sizes):
        raise ValueError(
            f"the group has {len(head.sizes)} samples, but the header has {len(header.scores)} scores, and "
            f"{len(header.completions)} completions with {samples} samples"
        )
    return header


def _pread(path: Path, offset: int, size: int) -> bytes:
    """Read `size` bytes of a file from `offset` on.

    Raises ValueError if the file is too short, and an OSError that names the file.
    """
    bytes_left = path.stat().st_size - offset
    # The size is checked before the read, because reading a damaged, huge size would allocate too much memory.
    if offset < 0 or not 0 <= size <= bytes_left:
        raise ValueError(f"the file is too short: {max(0, bytes_left)} of {size} bytes are left")
    with naming(path), path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


@contextlib.contextmanager
def _placing(path: Path, offset: int) -> Iterator[None]:
    """Context that adds path and offset to a ValueError, and raises a ValueError for a missing file."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path}: the segment of the rollout store does not exist") from None
    except ValueError as error:
        raise ValueError(f"{path}: byte {offset}: {error}") from None
