"""The run's rollout store: finished groups in RUN/rollouts/segment-NNNNN.bin, appended and read by reference.

`blocks` has the format. One writer appends to the newest segment and begins a new one at `SEGMENT_BYTES`; one file is
open for writing. A block is read by its reference (`types.BlockRef`) with reads of its own bytes, as a whole, or its
head, or one completion; every checksum is verified. `scan` lists the blocks of a segment without the journal.

A crash may leave a torn block at the end of the newest segment: it is cut when the store is opened for writing.
Blocks up to the last reference of the journal were synced before it, so no byte before that is cut. Only the owner
can read these files.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.batching.rollout_bytes import RolloutArrays
from megatron_scalerl.checkpoints.atomic_io import naming, sync, write_all
from megatron_scalerl.rollouts import blocks
from megatron_scalerl.rollouts.blocks import BlockHead, GroupHeader
from megatron_scalerl.types import BlockRef

SEGMENT_BYTES = 512 << 20
"""Size at which a segment is complete: what retention deletes at once."""
_SEGMENT = re.compile(r"segment-(\d+)\.bin")
_FIRST_READ = 1 << 14
"""Bytes with which a head is read; most fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """A block, read and verified."""

    group_id: int
    header: GroupHeader
    completions: tuple[memoryview, ...]
    """[C] each as `batching.rollout_bytes` writes it."""


def segment_path(folder: Path, segment: int) -> Path:
    """File of a segment in RUN/rollouts."""
    return folder / f"segment-{segment:05d}.bin"


def segments(folder: Path) -> list[int]:
    """Numbers of the segments in RUN/rollouts, ascending."""
    return sorted(int(match[1]) for path in folder.glob("segment-*.bin") if (match := _SEGMENT.fullmatch(path.name)))


class StoreWriter:
    """Appends blocks. Not for several threads at a time."""

    def __init__(self, folder: Path, *, durable: BlockRef | None = None, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open RUN/rollouts. durable: the last block that the journal names.

        Cuts a torn block off the newest segment. Raises OSError.
        """
        self.folder = folder
        self._limit = segment_bytes
        self._fd = -1
        self._complete = False
        self._failure: OSError | None = None
        newest = max(segments(folder), default=-1)
        durable_segment = durable.segment if durable else -1
        self._segment = max(newest, durable_segment)
        self._end = 0
        if newest == self._segment >= 0:
            keep = durable.offset + durable.nbytes if durable and durable.segment == newest else 0
            self._reopen(segment_path(folder, newest), keep)

    @property
    def position(self) -> tuple[int, int]:
        """(segment, offset) after the last block; (0, 0) in a new store."""
        return max(self._segment, 0), self._end

    def append(self, block: bytes) -> BlockRef:
        """Write one block (`blocks.block_bytes`). Raises OSError naming the file; nothing of the block is left then.

        It is on the disk after the next `sync`.
        """
        if self._failure is not None:
            raise self._failure
        full = self._end > blocks.SEGMENT_START and self._end + len(block) > self._limit
        if self._fd < 0 or full or self._complete:
            self._begin_segment()
        try:
            with naming(segment_path(self.folder, self._segment)):
                write_all(self._fd, block)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise
        stored = BlockRef(segment=self._segment, offset=self._end, nbytes=len(block))
        self._end += len(block)
        return stored

    def sync(self) -> None:
        """Return once every block is on the disk. Raises OSError, then and at every later call."""
        if self._failure is not None:
            raise self._failure
        if self._fd >= 0:
            try:
                with naming(segment_path(self.folder, self._segment)):
                    os.fsync(self._fd)
            except OSError as error:
                self._failure = error  # the system may have dropped what it could not write: no later sync is proof
                raise

    def complete_segment(self) -> None:
        """The next block begins a new segment."""
        self._complete = self._end > blocks.SEGMENT_START

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _begin_segment(self) -> None:
        self.sync()
        path = segment_path(self.folder, self._segment + 1)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(path, flags, 0o600)
        try:
            with naming(path):
                write_all(handle, blocks.segment_header())
            sync(self.folder)
        except OSError:
            os.close(handle)
            path.unlink(missing_ok=True)
            raise
        self.close()
        self._complete = False
        self._fd, self._segment, self._end = handle, self._segment + 1, blocks.SEGMENT_START

    def _reopen(self, path: Path, durable: int) -> None:
        """Go on with the newest segment after `durable` bytes, unless it is complete or damaged."""
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            with naming(path):
                end = _whole_end(path, durable)
                if end is None or end >= self._limit:
                    self._end = os.fstat(handle).st_size
                    os.close(handle)
                    return
                if end < os.fstat(handle).st_size:
                    os.ftruncate(handle, end)
                if end == 0:
                    write_all(handle, blocks.segment_header())
                    end = blocks.SEGMENT_START
                os.fsync(handle)
        except BaseException:
            os.close(handle)
            raise
        self._fd, self._end = handle, end


def _whole_end(path: Path, durable: int) -> int | None:
    """End of the last whole block of a segment, from offset `durable`; 0 if its header is torn.

    None if the segment is not to be appended to: it is no segment, or shorter than it was.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(blocks.SEGMENT_START)
    if durable > size:
        return None
    if start != blocks.segment_header():
        return 0 if len(start) < blocks.SEGMENT_START or (not any(start) and not durable) else None
    end = max(durable, blocks.SEGMENT_START)
    with contextlib.suppress(ValueError):
        for stored, _ in scan(path, end):
            read_block(path, stored)
            end = stored.offset + stored.nbytes
    return end


def read_block(path: Path, stored: BlockRef) -> StoredGroup:
    """The block at this place of the segment `path`, with one read.

    Raises ValueError naming file, offset, what was expected and what was found; OSError.
    """
    with _placing(path, stored.offset):
        data = _pread(path, stored.offset, stored.nbytes)
        head = _check_size(blocks.read_head(data), stored)
        whole = memoryview(data)
        completions = [whole[at : at + size] for at, size in zip(head.offsets, head.sizes)]
        header = _header(head)
    for completion, at, checksum in zip(completions, head.offsets, head.checksums):
        with _placing(path, stored.offset + at):
            blocks.check_completion(completion, checksum)
    return StoredGroup(group_id=head.group_id, header=header, completions=tuple(completions))


def read_arrays(path: Path, stored: BlockRef) -> tuple[StoredGroup, list[RolloutArrays]]:
    """The block at this place and its completions [C]. Raises as `read_block`."""
    group = read_block(path, stored)
    with _placing(path, stored.offset):
        return group, [rollout_bytes.read(completion) for completion in group.completions]


def read_header(path: Path, stored: BlockRef) -> tuple[int, GroupHeader]:
    """Group id and header of the block at this place; completions are not read. Raises as `read_block`."""
    with _placing(path, stored.offset):
        head = _check_size(_head_at(path, stored.offset, stored.nbytes), stored)
        return head.group_id, _header(head)


def read_completions(path: Path, stored: BlockRef, positions: Iterable[int]) -> list[bytes]:
    """These completions of the block at this place; the others are not read.

    Raises as `read_block`, and IndexError.
    """
    with _placing(path, stored.offset):
        head = _check_size(_head_at(path, stored.offset, stored.nbytes), stored)
    found = []
    for position in positions:
        at = stored.offset + head.offsets[position]
        with _placing(path, at):
            data = _pread(path, at, head.sizes[position])
            blocks.check_completion(data, head.checksums[position])
        found.append(data)
    return found


def scan(path: Path, offset: int = blocks.SEGMENT_START) -> Iterator[tuple[BlockRef, BlockHead]]:
    """Place and head of every block of a segment from `offset` on, in order; completions are not read.

    Raises ValueError, naming file and offset, at the first that is damaged or torn; OSError.
    """
    match = _SEGMENT.fullmatch(path.name)
    segment = int(match[1]) if match else 0
    with _placing(path, 0):
        blocks.check_segment_header(_pread(path, 0, blocks.SEGMENT_START))
    size = path.stat().st_size
    while offset < size:
        with _placing(path, offset):
            head = _head_at(path, offset, size - offset)
            if head.nbytes > size - offset:
                raise ValueError(f"expected a block of {head.nbytes} bytes, found {size - offset}")
        yield BlockRef(segment=segment, offset=offset, nbytes=head.nbytes), head
        offset += head.nbytes


def stored_header(head: BlockHead) -> GroupHeader:
    """The header in a head. Raises ValueError."""
    return _header(head)


def check_stored(folder: Path, references: Sequence[BlockRef]) -> None:
    """Raises ValueError naming the file if a segment is missing or too short for one of these references."""
    ends: dict[int, int] = {}
    for stored in references:
        ends[stored.segment] = max(ends.get(stored.segment, 0), stored.offset + stored.nbytes)
    for segment, end in sorted(ends.items()):
        path = segment_path(folder, segment)
        found = path.stat().st_size if path.exists() else None
        if found is None or found < end:
            raise ValueError(f"{path}: expected at least {end} bytes, found {'no file' if found is None else found}")


def check_position(folder: Path, segment: int, offset: int) -> None:
    """Raises ValueError naming the file if the store ends before this byte of this segment."""
    newest = max(segments(folder), default=-1)
    path = segment_path(folder, segment)
    found = path.stat().st_size if path.exists() else 0
    if offset and (newest < segment or (newest == segment and found < offset)):
        raise ValueError(f"{path}: expected at least {offset} bytes, found {found or 'no file'}")


def _head_at(path: Path, offset: int, available: int) -> BlockHead:
    data = _pread(path, offset, min(_FIRST_READ, available))
    if (size := blocks.head_bytes(data)) > len(data):
        data = _pread(path, offset, min(size, available))
    return blocks.read_head(data)


def _check_size(head: BlockHead, stored: BlockRef) -> BlockHead:
    if head.nbytes != stored.nbytes:
        raise ValueError(f"expected a block of {stored.nbytes} bytes, found {head.nbytes}")
    return head


def _header(head: BlockHead) -> GroupHeader:
    try:
        header = msgspec.json.decode(head.header, type=GroupHeader)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"expected the header of a group, found {error}") from None
    found = len(header.scores), len(header.completions)
    if found != (len(head.sizes),) * 2:
        raise ValueError(f"expected scores and facts of {len(head.sizes)} completions, found {found}")
    return header


def _pread(path: Path, offset: int, size: int) -> bytes:
    """These bytes of the file. Raises ValueError if it ends before, OSError naming it."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = os.fstat(handle).st_size
        if offset < 0 or size < 0 or end < offset + size:
            raise ValueError(f"expected {size} bytes, found {max(0, end - offset)}")
        parts, left = [], size
        while left and (part := _read_some(path, handle, left, offset + size - left)):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(handle)
    if left:
        raise ValueError(f"expected {size} bytes, found {size - left}")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _read_some(path: Path, handle: int, size: int, offset: int) -> bytes:
    with naming(path):
        return os.pread(handle, size, offset)


@contextlib.contextmanager
def _placing(path: Path, offset: int) -> Iterator[None]:
    """Context whose ValueErrors and missing file name the place."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path}: expected a segment of rollouts, found no file") from None
    except ValueError as error:
        raise ValueError(f"{path}: byte {offset}: {error}") from None
