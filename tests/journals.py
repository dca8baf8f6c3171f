"""A run's journal and store, written by the journal itself."""

import asyncio

from rollout_groups import parts_of

from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.rollouts.completions import completions_of
from megatron_scalerl.rollouts.journal import Journal


def write_journal(
    run_dir,
    *,
    admitted=(),
    groups=(),
    batches=(),
    retain=None,
    **options,
):
    """Append draws, finished groups, one after another, and batches; remove what `retain` batches made unneeded."""

    async def write():
        journal = Journal(run_dir, **options)
        try:
            for group_id in admitted:
                journal.admit(group_id, f"p{group_id}", 0)
            for group, rollouts in groups:
                await finish(journal, group, rollouts)
            for record in batches:
                await journal.batch(record)
            if retain is not None:
                await journal.retain(retain)
        finally:
            await journal.close()

    asyncio.run(write())


async def finish(journal, group, rollouts):
    """Record a finished group with its completions."""
    data = [rollout_bytes.write(part) for made in rollouts for part in parts_of(made)]
    return await journal.finish(group, data)


def read_rollouts(run_dir, group):
    """The completions of a stored group, read as a batch reads them."""
    read = completions_of(run_dir, [(group.stored, position) for position in group.positions])
    found = asyncio.run(read(range(len(group.positions))))
    return [rollout_bytes.rollout_of(rollout_bytes.read(data)) for data in found]
