"""The bytes of a batch's completions, read from where their groups are stored when they are sent to the trainer."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from megatron_scalerl.batching.assignment import ReadCompletions
from megatron_scalerl.rollouts.store import read_completions, segment_path
from megatron_scalerl.types import BlockRef

Source = tuple[BlockRef | None, int]
"""(block of a group, position of a sample in it)."""


def completions_of(run_dir: Path, sources: Sequence[Source]) -> ReadCompletions:
    """Reads samples by their numbers in `sources` (`controller.samples.BatchPlan`), in a thread.

    Only the bytes of these completions are read, and verified. The reader raises ValueError naming the file for a
    group that is damaged, and OSError.
    """
    folder = run_dir / "rollouts"

    async def read(numbers: Sequence[int]) -> Sequence[bytes]:
        return await asyncio.to_thread(_read, folder, [sources[number] for number in numbers])

    return read


def _read(folder: Path, sources: Sequence[Source]) -> list[bytes]:
    # by block, so that the head of each is read and verified once
    positions: dict[BlockRef, list[int]] = {}
    for stored, position in sources:
        assert stored is not None, "a group is stored before it is trained"
        positions.setdefault(stored, []).append(position)
    completions: dict[Source, bytes] = {}
    for stored, wanted in positions.items():
        data = read_completions(segment_path(folder, stored.segment), stored, wanted)
        completions.update(zip(((stored, position) for position in wanted), data))
    return [completions[source] for source in sources]
