"""The format of a segment of the rollout store: checksummed blocks, one for each finished group.

Little-endian, without padding:

    segment       magic MSRLSEGM, format 1 u32, CRC-32 of these 12 bytes u32; then blocks, one after another
    block         magic GRUP, checksum u32, bytes of the block u64, group id i64, bytes of the header u32, C u32
                  table [C] (bytes of the completion u64, its CRC-32 u32)
                  header (JSON, `GroupHeader`)
                  completions [C], each as `batching.rollout_bytes` writes it

The block's checksum is the CRC-32 of all that follows it up to the first completion. So the header of a block, and
each of its completions, can be read and verified alone.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from megatron_scalerl.types import Completion, Prompt, Score

_SEGMENT = struct.Struct("<8sI")
_CHECKSUM = struct.Struct("<I")
_SEGMENT_MAGIC, _FORMAT = b"MSRLSEGM", 1
SEGMENT_START = _SEGMENT.size + _CHECKSUM.size
"""Offset of the first block."""
_MAGIC = b"GRUP"
_FIXED = struct.Struct("<4sIQqII")
_COVERED = struct.Struct("<QqII")
"""The part of `_FIXED` that the checksum covers."""
_ENTRY = struct.Struct("<QI")
FIXED_BYTES = _FIXED.size
"""Bytes from which `head_bytes` is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockHead:
    """The start of a block, verified."""

    nbytes: int
    """Size of the whole block."""
    group_id: int
    header: bytes
    """JSON of a `GroupHeader`."""
    offsets: tuple[int, ...]
    """[C] first byte of each completion in the block."""
    sizes: tuple[int, ...]
    """[C] bytes of each completion."""
    checksums: tuple[int, ...]
    """[C] CRC-32 of each completion."""


def segment_header() -> bytes:
    """The first `SEGMENT_START` bytes of a segment."""
    start = _SEGMENT.pack(_SEGMENT_MAGIC, _FORMAT)
    return start + _CHECKSUM.pack(zlib.crc32(start))


def check_segment_header(data: bytes) -> None:
    """Raises ValueError unless `data` is the start of a segment."""
    if data != segment_header():
        raise ValueError(f"expected a segment of rollouts, format {_FORMAT}, found {data!r}")


def block_bytes(group_id: int, header: GroupHeader, completions: Sequence[bytes]) -> bytes:
    """The block of one group."""
    encoded = msgspec.json.encode(header)
    size = _FIXED.size + _ENTRY.size * len(completions) + len(encoded) + sum(map(len, completions))
    covered = _COVERED.pack(size, group_id, len(encoded), len(completions))
    table = b"".join(_ENTRY.pack(len(c), zlib.crc32(c)) for c in completions)
    start = b"".join([covered, table, encoded])
    return b"".join([_MAGIC, _CHECKSUM.pack(zlib.crc32(start)), start, *completions])


def head_bytes(data: bytes) -> int:
    """Bytes of a block before its first completion, from its first `FIXED_BYTES`. Raises ValueError."""
    if len(data) < _FIXED.size:
        raise ValueError(f"expected a block of at least {_FIXED.size} bytes, found {len(data)}")
    magic, _, size, _, header_bytes, completions = _FIXED.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError(f"expected a block that begins with {_MAGIC!r}, found {magic!r}")
    head: int = _FIXED.size + _ENTRY.size * completions + header_bytes
    if head > size:
        raise ValueError(f"expected a block of at least {head} bytes, found {size}")
    return head


def read_head(data: bytes) -> BlockHead:
    """The head of the block that begins `data`, which has at least its `head_bytes`. Raises ValueError."""
    end = head_bytes(data)
    if len(data) < end:
        raise ValueError(f"expected a block whose head has {end} bytes, found {len(data)}")
    _, checksum, size, group_id, _, completions = _FIXED.unpack_from(data)
    if (found := zlib.crc32(memoryview(data)[8:end])) != checksum:
        raise ValueError(f"expected a block head with checksum {checksum:08x}, found {found:08x}")
    table_end = _FIXED.size + _ENTRY.size * completions
    entries = list(_ENTRY.iter_unpack(memoryview(data)[_FIXED.size : table_end]))
    sizes = tuple(entry[0] for entry in entries)
    offsets, at = [], end
    for each in sizes:
        offsets.append(at)
        at += each
    if at != size:
        raise ValueError(f"expected completions up to byte {size} of the block, found {at}")
    return BlockHead(
        nbytes=size,
        group_id=group_id,
        header=bytes(data[table_end:end]),
        offsets=tuple(offsets),
        sizes=sizes,
        checksums=tuple(entry[1] for entry in entries),
    )


def check_completion(data: bytes | memoryview, checksum: int) -> None:
    """Raises ValueError unless `data` has this CRC-32."""
    if (found := zlib.crc32(data)) != checksum:
        raise ValueError(f"expected checksum {checksum:08x}, found {found:08x}")
