"""The run's rollout store: finished groups in RUN/rollouts/segment-NNNNN.bin, appended and read by reference.

One writer appends to the newest segment and begins a new one at `SEGMENT_BYTES`; one file is open for writing. A
block is read by its reference (`types.BlockRef`): as a whole, or its head, or one completion. No other bytes are
read, and every checksum is verified. `scan` lists the blocks of a segment without the journal.

The life of a segment: `_begin_segment`, `append` and `sync` by turns, `_reopen` after a restart, and no more bytes
once the next segment is begun; retention may delete it then.

A crash may leave a torn block at the end of the newest segment: it is cut when the store is opened for writing.
Blocks up to the last reference of the journal were synced before it, so no byte before that is cut. Only the owner
can read these files.

A segment has a checksummed block for each finished group. Little-endian, without padding:

    segment       magic MSRLSEGM, format 1 u32, CRC-32 of these 12 bytes u32; then blocks, one after another
    block         magic GRUP, checksum u32, bytes of the block u64, group id i64, bytes of the header u32, N u32
                  table [N] (bytes of the completion u64, its CRC-32 u32)
                  header (JSON, `GroupHeader`)
                  completions [N], each as `batching.rollout_bytes` writes it; of an episode that forked its parts

The block's checksum is the CRC-32 of all that follows it up to the first completion. So the header of a block, and
each of its completions, can be read and verified alone.
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
"""Size at which a segment is complete: retention deletes whole segments."""
_SEGMENT = re.compile(r"segment-(\d+)\.bin")
_FIRST_READ = 1 << 14
"""Bytes that are read for a head at first; most heads have fewer."""
_SEGMENT_START = struct.Struct("<8sI")
_CHECKSUM = struct.Struct("<I")
_SEGMENT_MAGIC = b"MSRLSEGM"
_FORMAT = 1
SEGMENT_START = _SEGMENT_START.size + _CHECKSUM.size
"""Offset of the first block."""
_MAGIC = b"GRUP"
_FIXED = struct.Struct("<4sIQqII")
_COVERED = struct.Struct("<QqII")
"""The part of `_FIXED` that the checksum covers."""
_ENTRY = struct.Struct("<QI")


@record
class GroupHeader:
    """A finished group without its id and its completions' tokens; fields as in `types.RolloutGroup`."""

    prompt: Prompt
    epoch: int
    first_token_version: int
    lost_completions: int
    scores: tuple[Score, ...]
    """[C]"""
    completions: tuple[Completion, ...]
    """[C]"""
    lost_reasons: Mapping[str, int] = field(default_factory=dict)


@record
class BlockHead:
    """The verified start of a block."""

    nbytes: int
    """Bytes of the whole block."""
    group_id: int
    header: bytes
    """JSON of a `GroupHeader`."""
    offsets: tuple[int, ...]
    """[N] offset of each completion in the block."""
    sizes: tuple[int, ...]
    """[N] bytes of each completion."""
    checksums: tuple[int, ...]
    """[N] CRC-32 of each completion."""


def segment_header() -> bytes:
    """The first `SEGMENT_START` bytes of a segment."""
    start = _SEGMENT_START.pack(_SEGMENT_MAGIC, _FORMAT)
    return start + _CHECKSUM.pack(zlib.crc32(start))


def check_segment_header(data: bytes) -> None:
    """Raises ValueError unless `data` is the start of a segment."""
    if data != segment_header():
        raise ValueError(f"the file begins with {data!r}, which is no segment of rollouts in format {_FORMAT}")


def block_bytes(group_id: int, header: GroupHeader, completions: Sequence[bytes]) -> bytes:
    """The block of one group."""
    encoded = msgspec.json.encode(header)
    size = _FIXED.size + _ENTRY.size * len(completions) + len(encoded) + sum(map(len, completions))
    # the checksum covers the head only: each completion has its own, and is read alone
    covered = _COVERED.pack(size, group_id, len(encoded), len(completions))
    table = b"".join(_ENTRY.pack(len(c), zlib.crc32(c)) for c in completions)
    start = b"".join([covered, table, encoded])
    return b"".join([_MAGIC, _CHECKSUM.pack(zlib.crc32(start)), start, *completions])


def head_bytes(data: bytes) -> int:
    """Bytes of a block before its first completion, from its fixed first part. Raises ValueError."""
    if len(data) < _FIXED.size:
        raise ValueError(f"only {len(data)} bytes are left, and a block has at least {_FIXED.size}")
    magic, _, size, _, header_bytes, completions = _FIXED.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError(f"the bytes {magic!r} begin no block of a group")
    head = _FIXED.size + _ENTRY.size * completions + header_bytes
    if head > size:
        raise ValueError(f"the block has {size} bytes, fewer than the {head} of its head")
    return head


def read_head(data: bytes) -> BlockHead:
    """The head of the block that begins `data`, which has at least its `head_bytes`. Raises ValueError."""
    end = head_bytes(data)
    if len(data) < end:
        raise ValueError(f"only {len(data)} of the {end} bytes of the block's head are left")
    _, checksum, size, group_id, _, completions = _FIXED.unpack_from(data)
    check_bytes(memoryview(data)[8:end], checksum)
    table_end = _FIXED.size + _ENTRY.size * completions
    entries = list(_ENTRY.iter_unpack(memoryview(data)[_FIXED.size : table_end]))
    sizes = tuple(entry[0] for entry in entries)
    offsets = [*accumulate(sizes, initial=end)]
    completions_end = offsets.pop()
    if completions_end != size:
        raise ValueError(f"the completions end at byte {completions_end} of the block, which has {size} bytes")
    return BlockHead(
        nbytes=size,
        group_id=group_id,
        header=bytes(data[table_end:end]),
        offsets=tuple(offsets),
        sizes=sizes,
        checksums=tuple(entry[1] for entry in entries),
    )


def check_bytes(data: bytes | memoryview, checksum: int) -> None:
    """Raises ValueError unless `data` has this CRC-32."""
    actual = zlib.crc32(data)
    if actual != checksum:
        raise ValueError(f"the bytes are damaged: their checksum is {actual:08x}, and {checksum:08x} is recorded")


@record
class StoredGroup:
    """A block, read and verified."""

    group_id: int
    header: GroupHeader
    completions: tuple[memoryview, ...]
    """[N] each as `batching.rollout_bytes` writes it."""


def positions_of(completions: Iterable[Completion]) -> tuple[int, ...]:
    """[C] number of each completion's first sample in its block."""
    return (0, *accumulate(len(completion.samples) for completion in completions))[:-1]


def segment_path(folder: Path, segment: int) -> Path:
    """File of a segment in RUN/rollouts."""
    return folder / f"segment-{segment:05d}.bin"


def segments(folder: Path) -> list[int]:
    """Numbers of the segments in RUN/rollouts, ascending."""
    matches = (_SEGMENT.fullmatch(path.name) for path in folder.glob("segment-*.bin"))
    return sorted(int(match[1]) for match in matches if match)


class StoreWriter:
    """Appends groups to the newest segment. `sync` may be called while another thread appends."""

    def __init__(self, folder: Path, *, durable: BlockRef | None = None, segment_bytes: int = SEGMENT_BYTES):
        """Open RUN/rollouts. durable: the last block that the journal names.

        Cuts a torn block off the newest segment. Raises OSError.
        """
        self.folder = folder
        self._limit = segment_bytes
        self._fd = -1
        self._complete = False
        self._failure: OSError | None = None
        self._lock = threading.RLock()
        newest = max(segments(folder), default=-1)
        self._segment = newest
        self._end = 0
        durable_bytes = 0
        if durable:
            self._segment = max(newest, durable.segment)  # a removed segment's number is not used again
            if durable.segment == newest:
                durable_bytes = durable.offset + durable.nbytes
        if newest == self._segment >= 0:
            self._reopen(segment_path(folder, newest), durable_bytes)

    @property
    def position(self) -> tuple[int, int]:
        """(segment, offset) after the last block; (0, 0) in a new store."""
        return max(self._segment, 0), self._end

    def append(self, block: bytes) -> BlockRef:
        """Write one block (`block_bytes`). Raises OSError naming the file; nothing of the block is left then.

        It is on the disk after the next `sync`.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            full = self._end > SEGMENT_START and self._end + len(block) > self._limit
            if self._fd < 0 or full or self._complete:
                self._begin_segment()
            try:
                with naming(segment_path(self.folder, self._segment)):
                    write_all(self._fd, block)
            except OSError:
                with contextlib.suppress(OSError):  # a torn block would hide the next one from `scan`
                    os.ftruncate(self._fd, self._end)
                raise
            stored = BlockRef(segment=self._segment, offset=self._end, nbytes=len(block))
            self._end += len(block)
            return stored

    def sync(self) -> None:
        """Return once every block is on the disk. Raises OSError, then and at every later call."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._fd < 0:
                return
            try:
                path = segment_path(self.folder, self._segment)
                with naming(path):
                    os.fsync(self._fd)
                check_in_place(path, self._fd, self._end)
            except OSError as error:
                self._failure = error  # the system may have dropped what it could not write: no later sync is proof
                raise

    def complete_segment(self) -> None:
        """The next block begins a new segment."""
        self._complete = self._end > SEGMENT_START

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _begin_segment(self) -> None:
        self.sync()
        path = segment_path(self.folder, self._segment + 1)
        # never a file or a link that is there already: both could be another program's
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(path, flags, 0o600)
        try:
            with naming(path):
                write_all(handle, segment_header())
            sync(self.folder)  # without it, a power loss may take the new file's name
        except OSError:
            os.close(handle)
            path.unlink(missing_ok=True)
            raise
        self.close()
        self._complete = False
        self._fd = handle
        self._segment += 1
        self._end = SEGMENT_START

    def _reopen(self, path: Path, durable: int) -> None:
        """Go on with the newest segment after its whole blocks, unless it is complete or damaged.

        durable: bytes that the journal refers to, which are never cut.
        """
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            with naming(path):
                end = _whole_end(path, durable)
                if end is None or end >= self._limit:  # `append` begins a new segment then
                    self._end = os.fstat(handle).st_size
                    os.close(handle)
                    return
                if end < os.fstat(handle).st_size:
                    os.ftruncate(handle, end)
                if end == 0:
                    write_all(handle, segment_header())
                    end = SEGMENT_START
                os.fsync(handle)  # of blocks that a crash left in the system's memory, too: later ones follow them
        except BaseException:
            os.close(handle)
            raise
        self._fd = handle
        self._end = end


def _whole_end(path: Path, durable: int) -> int | None:
    """End of the last whole block of a segment, from offset `durable`; 0 if its header is torn.

    None if the segment is not to be appended to: it is no segment, or shorter than it was.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(SEGMENT_START)
    if durable > size:
        return None
    if start != segment_header():
        # a file system may leave zeros in the place of a header that was not synced
        torn = len(start) < SEGMENT_START or (not any(start) and not durable)
        return 0 if torn else None
    end = max(durable, SEGMENT_START)
    with contextlib.suppress(ValueError):
        for stored, _ in scan(path, end):
            read_block(path, stored)
            end = stored.offset + stored.nbytes
    return end


def read_block(path: Path, stored: BlockRef) -> StoredGroup:
    """The block at this place of the segment `path`, with one read.

    Raises ValueError naming file and offset, for a block that is missing or damaged; OSError.
    """
    with _placing(path, stored.offset):
        data = _pread(path, stored.offset, stored.nbytes)
        head = _check_size(read_head(data), stored)
        whole = memoryview(data)
        completions = [whole[at : at + size] for at, size in zip(head.offsets, head.sizes)]
        header = stored_header(head)
    for completion, at, checksum in zip(completions, head.offsets, head.checksums):
        with _placing(path, stored.offset + at):
            check_bytes(completion, checksum)
    return StoredGroup(group_id=head.group_id, header=header, completions=tuple(completions))


def read_arrays(path: Path, stored: BlockRef) -> tuple[StoredGroup, list[RolloutArrays]]:
    """The block at this place and its completions [N]. Raises as `read_block`."""
    group = read_block(path, stored)
    with _placing(path, stored.offset):
        return group, [rollout_bytes.read(completion) for completion in group.completions]


def read_header(path: Path, stored: BlockRef) -> tuple[int, GroupHeader]:
    """Group id and header of the block at this place; completions are not read. Raises as `read_block`."""
    with _placing(path, stored.offset):
        head = _check_size(_head_at(path, stored.offset, stored.nbytes), stored)
        return head.group_id, stored_header(head)


def read_completions(path: Path, stored: BlockRef, positions: Iterable[int]) -> list[bytes]:
    """The completions at these positions of the block; the others are not read.

    Raises as `read_block`, and IndexError.
    """
    with _placing(path, stored.offset):
        head = _check_size(_head_at(path, stored.offset, stored.nbytes), stored)
    completions = []
    for position in positions:
        at = stored.offset + head.offsets[position]
        with _placing(path, at):
            data = _pread(path, at, head.sizes[position])
            check_bytes(data, head.checksums[position])
        completions.append(data)
    return completions


def scan(path: Path, offset: int = SEGMENT_START) -> Iterator[tuple[BlockRef, BlockHead]]:
    """Place and head of every block of a segment from `offset` on, in order; completions are not read.

    Raises ValueError, naming file and offset, at the first block that is damaged or torn; OSError.
    """
    match = _SEGMENT.fullmatch(path.name)
    segment = int(match[1]) if match else 0
    with _placing(path, 0):
        check_segment_header(_pread(path, 0, SEGMENT_START))
    size = path.stat().st_size
    while offset < size:
        with _placing(path, offset):
            head = _head_at(path, offset, size - offset)
            if head.nbytes > size - offset:
                raise ValueError(f"only {size - offset} of the block's {head.nbytes} bytes are left")
        yield BlockRef(segment=segment, offset=offset, nbytes=head.nbytes), head
        offset += head.nbytes


def check_stored(folder: Path, references: Sequence[BlockRef]) -> None:
    """Raises ValueError naming the file if a segment is missing or too short for one of these references."""
    ends: dict[int, int] = {}
    for stored in references:
        ends[stored.segment] = max(ends.get(stored.segment, 0), stored.offset + stored.nbytes)
    for segment, end in sorted(ends.items()):
        path = segment_path(folder, segment)
        size = path.stat().st_size if path.exists() else 0
        if size < end:
            raise ValueError(f"{path}: {size} bytes are left of the {end} that the journal refers to")


def check_position(folder: Path, segment: int, offset: int) -> None:
    """Raises ValueError naming the file if the store ends before this byte of this segment."""
    # retention may have deleted the segment since the checkpoint, but only if there is a newer one
    newest = max(segments(folder), default=-1)
    path = segment_path(folder, segment)
    size = path.stat().st_size if path.exists() else 0
    if offset and (newest < segment or (newest == segment and size < offset)):
        raise ValueError(f"{path}: {size} bytes are left of the {offset} that the checkpoint refers to")


def _head_at(path: Path, offset: int, available: int) -> BlockHead:
    data = _pread(path, offset, min(_FIRST_READ, available))
    size = head_bytes(data)
    if size > len(data):
        data = _pread(path, offset, min(size, available))
    return read_head(data)


def _check_size(head: BlockHead, stored: BlockRef) -> BlockHead:
    if head.nbytes != stored.nbytes:
        raise ValueError(f"the block has {head.nbytes} bytes, and the journal refers to {stored.nbytes}")
    return head


def stored_header(head: BlockHead) -> GroupHeader:
    """The header in a head. Raises ValueError."""
    try:
        header = msgspec.json.decode(head.header, type=GroupHeader)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the group's header cannot be read: {error}") from None
    samples = sum(len(completion.samples) for completion in header.completions)
    if len(header.scores) != len(header.completions) or samples != len(head.sizes):
        raise ValueError(
            f"the group has {len(head.sizes)} samples, and its header {len(header.scores)} scores and the facts of "
            f"{len(header.completions)} completions with {samples}"
        )
    return header


def _pread(path: Path, offset: int, size: int) -> bytes:
    """The `size` bytes of the file from `offset` on. Raises ValueError if it ends before, OSError naming it."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = os.fstat(handle).st_size
        # before anything is read: a damaged size would allocate its bytes
        if offset < 0 or size < 0 or end < offset + size:
            raise ValueError(f"{max(0, end - offset)} of {size} bytes are left")
        parts = []
        missing = size
        # the system reads at most 2 GiB at a time, and may return less
        while missing and (part := _read_some(path, handle, missing, offset + size - missing)):
            parts.append(part)
            missing -= len(part)
    finally:
        os.close(handle)
    if missing:
        raise ValueError(f"{size - missing} of {size} bytes are left")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _read_some(path: Path, handle: int, size: int, offset: int) -> bytes:
    with naming(path):
        return os.pread(handle, size, offset)


@contextlib.contextmanager
def _placing(path: Path, offset: int) -> Iterator[None]:
    """Context that adds the place in a segment to ValueErrors, and makes one of a missing file."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path}: the segment of rollouts does not exist") from None
    except ValueError as error:
        raise ValueError(f"{path}: byte {offset}: {error}") from None
