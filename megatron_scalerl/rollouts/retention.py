"""Decides which segments of the rollout store are deleted once a checkpoint is committed (`checkpoint.rollouts`).

A resume needs a segment if a group in the segment is in no batch yet, or in a batch that the oldest kept checkpoint
does not include. With `resume` all segments that no resume needs are deleted, except the newest segment, which still
grows. With `keep` no segment is deleted.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from megatron_scalerl.checkpoints.atomic_io import sync
from megatron_scalerl.rollouts.history import BatchRecord, History
from megatron_scalerl.rollouts.store import segment_path, segments

Policy = Literal["keep", "resume"]


class Retention:
    """Records for each segment which groups a resume may still need. Only the event loop's thread calls methods."""

    def __init__(self, policy: Policy, folder: Path, history: History):
        """policy: `checkpoint.rollouts`. folder: RUN/rollouts. history: events of earlier attempts."""
        self.policy = policy
        self._folder = folder
        self._unbatched: dict[int, int] = {}
        """Id of a group in no batch -> number of the group's segment."""
        self._last_batches: dict[int, int] = {}
        """Number of a segment -> number of the last batch with a group of the segment."""
        if policy == "keep":
            return
        stored_segments = set(segments(folder))
        for event in history.finished.values():
            if event.segment in stored_segments:
                self.finished(event.group_id, event.segment)
        for record in history.batches:
            self.batched(record)

    def finished(self, group_id: int, segment: int) -> None:
        """Note that a group is in the store, and in no batch."""
        if self.policy != "keep":
            self._unbatched[group_id] = segment

    def batched(self, record: BatchRecord) -> None:
        """Note that the groups of `record` are in a batch."""
        for group_id in record.group_ids:
            segment = self._unbatched.pop(group_id, None)
            # Batches are recorded in order, so that this batch is the last so far with a group of the segment.
            if segment is not None:
                self._last_batches[segment] = record.batch

    def take_expired(self, batches: int, newest: int) -> list[int]:
        """Numbers of the segments to delete: older than `newest`, and not needed by a resume after `batches` batches.

        The caller deletes the segments, which are no longer recorded here.
        """
        if self.policy == "keep":
            return []
        needed_segments = {*self._unbatched.values()} | {
            n for n, batch in self._last_batches.items() if batch >= batches
        }
        expired_segments = [n for n in segments(self._folder) if n < newest and n not in needed_segments]
        for segment in expired_segments:
            self._last_batches.pop(segment, None)
        return expired_segments


def remove(folder: Path, expired_segments: Iterable[int]) -> None:
    """Delete the files of these segments. Runs in a thread. Raises OSError if a file cannot be deleted."""
    for segment in expired_segments:
        segment_path(folder, segment).unlink(missing_ok=True)
        sync(folder)
