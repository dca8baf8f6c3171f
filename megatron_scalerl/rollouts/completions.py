"""Reads the bytes of a batch's completions from the rollout store, when the batch is sent to the trainer."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from megatron_scalerl.batching.assignment import ReadCompletions
from megatron_scalerl.rollouts.store import read_completions, segment_path
from megatron_scalerl.types import BlockRef

Source = tuple[BlockRef | None, int]
"""The place of a sample's bytes in the store: (block of the group, position of the sample in the block)."""


def completions_of(run_dir: Path, sources: Sequence[Source]) -> ReadCompletions:
    """Make a coroutine function (indices into `sources`) -> bytes of each sample, read in a thread.

    The function reads the bytes of no further sample, and verifies each checksum. The function raises ValueError,
    naming the file, for a damaged group, and OSError if a file cannot be read.
    """
    folder = run_dir / "rollouts"

    async def read(numbers: Sequence[int]) -> Sequence[bytes]:
        return await asyncio.to_thread(_read, folder, [sources[number] for number in numbers])

    return read


def _read(folder: Path, sources: Sequence[Source]) -> list[bytes]:
    # Positions are collected by block, so that the head of each block is read and verified once.
    positions: dict[BlockRef, list[int]] = {}
    for stored, position in sources:
        assert stored is not None, "a group is stored before it is trained"
        positions.setdefault(stored, []).append(position)
    completions: dict[Source, bytes] = {}
    for stored, block_positions in positions.items():
        data = read_completions(segment_path(folder, stored.segment), stored, block_positions)
        completions.update(zip(((stored, position) for position in block_positions), data))
    return [completions[source] for source in sources]
