"""A run's journal and store, written by the journal itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.rollouts.history import BatchRecord
from megatron_scalerl.rollouts.journal import Journal
from megatron_scalerl.types import RolloutGroup


def write_journal(
    run_dir: Path,
    *,
    admitted: Iterable[int] = (),
    groups: Iterable[RolloutGroup] = (),
    batches: Iterable[BatchRecord] = (),
    retain: int | None = None,
    **options,
) -> None:
    """Append draws, finished groups, one after another, and batches; remove what `retain` batches made unneeded."""

    async def write():
        journal = Journal(run_dir, **options)
        try:
            for group_id in admitted:
                journal.admit(group_id, f"p{group_id}", 0)
            for group in groups:
                await finish(journal, group)
            for record in batches:
                await journal.batch(record)
            if retain is not None:
                await journal.retain(retain)
                await journal.removed()
        finally:
            await journal.close()

    asyncio.run(write())


async def finish(journal: Journal, group: RolloutGroup):
    """Record a finished group; its place in the store."""
    return await journal.finish(group, [rollout_bytes.write(r) for r in group.rollouts])
