"""The groups of a run: an index, read from the growing journal, and the groups, read from the store on demand.

The index holds numbers and no texts, and stays small even if the store is large.
"""

import math
from pathlib import Path
from typing import Any

from megatron_scalerl.page.growing_file import Rows, json_row
from megatron_scalerl.rollouts.group_files import stored_group
from megatron_scalerl.rollouts.history import EVENT_DECODER, Admit, BatchRecord, Finish
from megatron_scalerl.rollouts.store import segment_path, segments


class GroupIndex:
    """The optimizer step that trained each group, and each group's place in the rollout store. Not safe for several
    threads."""

    def __init__(self, run_dir: Path):
        self._folder = run_dir / "rollouts"
        self._journal: Rows[Finish | BatchRecord] = Rows(run_dir / "journal.jsonl", _event)
        self._generation = 0
        self._read_rows = 0
        self._finished: dict[int, Finish] = {}
        self._records: dict[int, BatchRecord] = {}
        self._batch_of: dict[int, int] = {}

    @property
    def damage(self) -> list[str]:
        """The first damage of the journal in one line, until a restart replaces the journal; empty without damage."""
        return list(filter(None, [self._journal.problem]))

    def update(self) -> bool:
        """Read the events appended since the last call; True for a new batch. `damage` names a damaged event."""
        self._journal.update()
        if self._generation != self._journal.generation:  # a restart replaced the journal: read all
            self._generation = self._journal.generation
            self._read_rows = 0
            self._finished.clear()
            self._records.clear()
            self._batch_of.clear()
        old_count = len(self._records)
        for event in self._journal.rows[self._read_rows :]:
            if isinstance(event, Finish):
                self._finished[event.group_id] = event
            else:
                self._records[event.batch] = event
                self._batch_of.update(dict.fromkeys(event.group_ids, event.batch))
        self._read_rows = len(self._journal.rows)
        return len(self._records) != old_count

    @property
    def steps(self) -> list[int]:
        """Steps with a batch, ascending."""
        return sorted({record.step for record in self._records.values()})

    def of_step(self, step: int) -> list[dict[str, Any]]:
        """Id and pass rate of each group that was trained in this step, in the order of the batches."""
        ids = [g for record in self._records.values() if record.step == step for g in record.group_ids]
        return [{"id": g, "pass_rate": self._finished[g].pass_rate} for g in ids if g in self._finished]

    def record_of(self, group_id: int) -> BatchRecord | None:
        """The record of the batch that trained the group; None if no batch has trained the group."""
        batch = self._batch_of.get(group_id)
        return None if batch is None else self._records[batch]

    def read(self, group_id: int) -> dict[str, Any]:
        """The fields of a group, as `rollouts.group_files.stored_group` reads them.

        Raises ValueError for a group that is unknown, no longer stored, or damaged.
        """
        event = self._finished.get(group_id)
        if event is None:
            raise ValueError(f"{self._journal.path}: the run has no finished group {group_id}")
        path = segment_path(self._folder, event.segment)
        if not path.is_file():
            raise ValueError(f"{self._folder}: group {group_id} is deleted; checkpoint.rollouts: keep keeps all")
        return stored_group(path, event.stored)

    def chosen(self, count: int) -> list[int]:
        """Ids of at most `count` groups for a page without a server, from steps at equal distances, first to last.

        Of each chosen step, the groups with a pass rate nearest to 0.5 are taken.
        """
        stored_segments = segments(self._folder)
        deleted = {g for g, event in self._finished.items() if event.segment not in stored_segments}
        steps = sorted({record.step for record in self._records.values() if set(record.group_ids) - deleted})
        if not steps or count < 1:
            return []
        number = min(count, len(steps))
        chosen = []
        for i in range(number):
            step = steps[round(i * (len(steps) - 1) / max(1, number - 1))]
            stored = [group for group in self.of_step(step) if group["id"] not in deleted]
            stored.sort(key=lambda group: abs(group["pass_rate"] - 0.5))
            # shares of `count`, rounded up: if `count` is no multiple of the number of steps, the first steps get one
            # more
            share = math.ceil((count - i) / number)
            chosen += [group["id"] for group in stored[:share]]
        return chosen


def _event(line: bytes) -> Finish | BatchRecord | None:
    event = json_row(line, "an event", EVENT_DECODER)
    if isinstance(event, Admit):  # an `Admit` starts a group, which has no result
        return None
    return event
