"""What of the rollout store may go once a checkpoint is committed (recipe: `checkpoint.rollouts`).

A segment is needed by a resume if one of its groups is in no batch yet, or in a batch that the oldest kept checkpoint
does not include. Other segments are kept, deleted, or rewritten as Parquet and deleted. The newest segment stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_scalerl.checkpoints.atomic_io import sync
from megatron_scalerl.rollouts.history import BatchRecord, History
from megatron_scalerl.rollouts.store import segment_path, segments
from megatron_scalerl.types import BlockRef

Policy = Literal["keep", "resume", "parquet"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expired:
    """A segment that no resume needs."""

    segment: int
    trained: tuple[tuple[BlockRef, BatchRecord], ...]
    """Its groups, each with its batch, in the order of the batches."""


class Retention:
    """Knows for each segment which of its groups a resume may still need. Used by the event loop only."""

    def __init__(self, policy: Policy, folder: Path, history: History) -> None:
        """folder: RUN/rollouts. history: of the attempts before this one."""
        self.policy = policy
        self._folder = folder
        self._unbatched: dict[int, BlockRef] = {}
        self._trained: dict[int, list[tuple[BlockRef, BatchRecord]]] = {}
        if policy == "keep":
            return
        present = set(segments(folder))
        for event in history.finished.values():
            if event.segment in present:
                self.finished(event.group_id, event.stored)
        for record in history.batches:
            self.batched(record)

    def finished(self, group_id: int, stored: BlockRef) -> None:
        """A group is in the store, and in no batch."""
        if self.policy != "keep":
            self._unbatched[group_id] = stored

    def batched(self, record: BatchRecord) -> None:
        """These groups are in a batch."""
        for group_id in record.group_ids:
            if (stored := self._unbatched.pop(group_id, None)) is not None:
                self._trained.setdefault(stored.segment, []).append((stored, record))

    def take_expired(self, batches: int, newest: int) -> list[Expired]:
        """The segments before `newest` that a resume after `batches` batches does not need; they are forgotten."""
        if self.policy == "keep":
            return []
        needed = {stored.segment for stored in self._unbatched.values()}
        needed |= {n for n, trained in self._trained.items() if any(r.batch >= batches for _, r in trained)}
        expired = [n for n in segments(self._folder) if n < newest and n not in needed]
        return [Expired(segment=n, trained=tuple(self._trained.pop(n, ()))) for n in expired]


def remove(folder: Path, expired: Iterable[Expired], policy: Policy) -> None:
    """Delete these segments, after writing them as Parquet if the policy says so. Runs in a thread.

    A crash in between leaves both files; the segment is then removed after the next checkpoint. Raises OSError, and
    ValueError naming file and byte for a damaged block; the segment is kept then.
    """
    for each in expired:
        path = segment_path(folder, each.segment)
        if policy == "parquet" and each.trained:
            _to_parquet(path, each.trained)
        path.unlink(missing_ok=True)
        sync(folder)


def _to_parquet(segment: Path, trained: Sequence[tuple[BlockRef, BatchRecord]]) -> None:
    from megatron_scalerl.rollouts.parquet import write_parquet  # pyarrow: only where it is asked for

    write_parquet(segment.with_suffix(".parquet"), segment, trained)
