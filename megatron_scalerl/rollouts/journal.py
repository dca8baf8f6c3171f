"""Writes the journal of a run: groups drawn, groups finished and batches composed, in order.

`RUN/journal.jsonl` has one event per line:

    {"event": "admit",  "group_id", "prompt_id", "epoch"}                  a prompt was drawn for a new group
    {"event": "finish", "group_id", "prompt_id", "pass_rate", "first_token_version", "segment", "offset", "bytes"}
    {"event": "batch",  "batch", "step", "policy_version", "group_ids"}    a batch is about to be trained on

The life of a group here: `admit` writes the draw; `finish` queues the group's block, which a thread appends to the
rollout store (`store`) and syncs, and then writes the finish event; `batch` writes the batch with the group; `retain`
deletes the segment of the block once no resume needs the segment.

A block is on the disk before the finish event is written, and a batch event is on the disk before the optimizer step
begins. Replaying events in order (`history`) restores the curriculum exactly,
and the batches after a checkpoint can be trained again with the same rollouts in the same order. Only the owner can
read these files.

Threads of the event loop's default executor write blocks and sync files, so that the loop never waits for the disk.
The loop itself appends the events, which are small.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_scalerl.checkpoints.jsonl import JsonlWriter
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.history import Admit, BatchRecord, Finish, History, read_history
from megatron_scalerl.rollouts.retention import Policy, Retention, remove
from megatron_scalerl.rollouts.store import SEGMENT_BYTES, GroupHeader, StoreWriter, block_bytes
from megatron_scalerl.types import BlockRef, RolloutGroup

T = TypeVar("T")


@record
class Position:
    """Length of the journal at a checkpoint. A resume from the checkpoint needs a journal of at least this length."""

    journal_bytes: int
    """Size of journal.jsonl (bytes)."""


@record
class _Waiting:
    """A finished group whose block is not on the disk yet. `done` gets the block's place in the store."""

    group_id: int
    header: GroupHeader
    completions: tuple[bytes, ...]
    done: asyncio.Future[BlockRef]


class Journal:
    """Appends events of the rollout stream and the controller; `history` reads the events at a restart.

    Queue `_waiting`: finished groups whose block is not written yet. `finish` adds one entry per group, so the queue
    is bounded by the number of outstanding groups, (k + 1) * groups_per_batch (`gate`). `_write_waiting` takes all
    entries and syncs once. `close` empties the queue.
    """

    def __init__(
        self,
        run_dir: Path,
        history: History | None = None,
        *,
        policy: Policy = "keep",
        segment_bytes: int = SEGMENT_BYTES,
    ):
        """history: the events in the journal so far; None: read here. policy: the recipe's `checkpoint.rollouts`.

        Raises OSError if a file cannot be opened, and ValueError as `read_history`.
        """
        self.run_dir = run_dir
        self._folder = self.run_dir / "rollouts"
        self._folder.mkdir(parents=True, exist_ok=True)
        history = history or read_history(run_dir)
        self._events = JsonlWriter(self.run_dir / "journal.jsonl", private=True)
        self._store = StoreWriter(self._folder, last_segment=history.last_segment, segment_bytes=segment_bytes)
        self._on_disk = self._store.segment
        self._retention = Retention(policy, self._folder, history)
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None
        self._in_threads: set[asyncio.Future[Any]] = set()

    def admit(self, group_id: int, prompt_id: str, epoch: int) -> None:
        """Write the event that a prompt was drawn for a group."""
        self._events.append(Admit(group_id=group_id, prompt_id=prompt_id, epoch=epoch))

    async def finish(self, group: RolloutGroup, completions: Sequence[bytes]) -> RolloutGroup:
        """Write a finished, scored group to the store; returns the group with the place of the block on the disk.

        completions: the group's completions, or the parts of forked episodes, in the format of `rollout_bytes.write`.
        Returns without a further await once the finish event is written. Raises OSError naming the file.
        """
        header = GroupHeader(
            prompt=group.prompt,
            epoch=group.epoch,
            first_token_version=group.first_token_version,
            lost_completions=group.lost_completions,
            lost_reasons=group.lost_reasons,
            scores=group.scores,
            completions=group.completions,
        )
        done: asyncio.Future[BlockRef] = asyncio.get_running_loop().create_future()
        self._waiting.append(
            _Waiting(group_id=group.group_id, header=header, completions=tuple(completions), done=done)
        )
        # At most one task writes: groups that come while the task waits for the disk share the next sync.
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_waiting(), name="rollout store")
        stored = await done
        self._events.append(
            Finish(
                group_id=group.group_id,
                prompt_id=group.prompt.prompt_id,
                pass_rate=group.pass_rate,
                first_token_version=group.first_token_version,
                segment=stored.segment,
                offset=stored.offset,
                nbytes=stored.nbytes,
            )
        )
        return replace(group, stored=stored)

    async def batch(self, record: BatchRecord) -> None:
        """Write the event that a batch will be trained on. At return the event and all groups are on the disk.

        Raises OSError naming the file.
        """
        self._events.append(record)
        self._retention.batched(record)
        await self._in_thread(self._events.sync)

    async def position(self) -> Position:
        """Sync journal and store; returns the journal's length on the disk. Raises OSError naming the file."""
        # The size is taken before the syncs: the position excludes events that are appended meanwhile.
        size = self._events.size
        await self._in_thread(self._events.sync)
        # `sync` also raises an OSError if somebody has removed the newest segment.
        await self._in_thread(self._store.sync)
        return Position(journal_bytes=size)

    async def retain(self, batches: int) -> None:
        """Delete the segments of the store that no resume needs. Raises OSError naming the file.

        batches: number of batches that every kept checkpoint includes.
        """
        expired = self._retention.take_expired(batches, self._on_disk)
        if self._retention.policy != "keep":
            # The next block begins a new segment: a segment with groups from before and after this checkpoint could
            # be deleted only much later.
            self._store.complete_segment()
        if expired:
            await self._in_thread(partial(remove, self._folder, expired))

    async def close(self) -> None:
        """Wait for blocks that are being written, then close all files. Drops groups whose write has not begun."""
        for waiting in self._waiting:
            waiting.done.cancel()
        self._waiting.clear()
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self._in_threads:
            await asyncio.wait(self._in_threads)
        self._events.close()
        self._store.close()

    async def _write_waiting(self) -> None:
        """Write the groups in the queue until the queue is empty. All groups in the queue share one (slow) sync."""
        while self._waiting:
            groups = self._waiting
            self._waiting = []
            try:
                blocks = await self._in_thread(partial(self._write, groups))
            except BaseException as failure:
                for waiting in groups:
                    if not waiting.done.done():
                        waiting.done.set_exception(failure)
                # After an OSError the task goes on with later groups, since a full disk may get room again.
                if not isinstance(failure, OSError):
                    raise
                continue
            for waiting, block in zip(groups, blocks):
                if not waiting.done.done():
                    self._retention.finished(waiting.group_id, block.segment)
                    waiting.done.set_result(block)
            self._on_disk = self._store.segment

    def _write(self, groups: Sequence[_Waiting]) -> list[BlockRef]:
        """Append the blocks of these groups and sync; returns each block's place. Runs in a thread."""
        blocks = [self._store.append(block_bytes(g.group_id, g.header, g.completions)) for g in groups]
        self._store.sync()
        return blocks

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread to the end, even if the caller is cancelled: `close` waits for the thread."""
        # A thread cannot be cancelled, and must not write to a file that `close` has closed.
        thread_result = asyncio.ensure_future(asyncio.to_thread(work))
        self._in_threads.add(thread_result)
        thread_result.add_done_callback(self._in_threads.discard)
        return await asyncio.shield(thread_result)
