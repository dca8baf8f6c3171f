"""Decides which segments of the rollout store are deleted once a checkpoint is committed (`checkpoint.rollouts`).

A segment is needed by a resume if one of its groups is in no batch yet, or in a batch that the oldest kept checkpoint
does not include. The policy `resume` deletes other segments, but for the newest; `keep` deletes none.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from megatron_scalerl.checkpoints.atomic_io import sync
from megatron_scalerl.rollouts.history import BatchRecord, History
from megatron_scalerl.rollouts.store import segment_path, segments

Policy = Literal["keep", "resume"]


class Retention:
    """Knows for each segment which of its groups a resume may still need. Used by the event loop only."""

    def __init__(self, policy: Policy, folder: Path, history: History):
        """folder: RUN/rollouts. history: of the attempts before this one."""
        self.policy = policy
        self._folder = folder
        self._unbatched: dict[int, int] = {}
        """Group -> its segment."""
        self._trained: dict[int, int] = {}
        """Segment -> the last batch with a group of it."""
        if policy == "keep":
            return
        present = set(segments(folder))
        for event in history.finished.values():
            if event.segment in present:
                self.finished(event.group_id, event.segment)
        for record in history.batches:
            self.batched(record)

    def finished(self, group_id: int, segment: int) -> None:
        """Note that a group is in the store, and in no batch."""
        if self.policy != "keep":
            self._unbatched[group_id] = segment

    def batched(self, record: BatchRecord) -> None:
        """Note that the groups of a batch are in it."""
        for group_id in record.group_ids:
            segment = self._unbatched.pop(group_id, None)
            if segment is not None:  # batches come in order, so this is the last one of the segment so far
                self._trained[segment] = record.batch

    def take_expired(self, batches: int, newest: int) -> list[int]:
        """The segments before `newest` that a resume after `batches` batches does not need; they are forgotten."""
        if self.policy == "keep":
            return []
        needed = {*self._unbatched.values()} | {n for n, batch in self._trained.items() if batch >= batches}
        expired = [n for n in segments(self._folder) if n < newest and n not in needed]
        for segment in expired:
            self._trained.pop(segment, None)
        return expired


def remove(folder: Path, expired: Iterable[int]) -> None:
    """Delete these segments. Runs in a thread. Raises OSError."""
    for segment in expired:
        segment_path(folder, segment).unlink(missing_ok=True)
        sync(folder)
