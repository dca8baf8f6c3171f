"""The journal: what was drawn, what was finished, what was trained on, in the order in which it happened.

`RUN/journal.jsonl` holds one event a line:

    {"event": "admit",  "group_id", "prompt_id", "epoch"}                  a prompt was drawn and submitted
    {"event": "finish", "group_id", "prompt_id", "pass_rate", "first_token_version", "file"}
    {"event": "batch",  "batch", "step", "policy_version", "group_ids"}    about to be trained on

`RUN/rollouts/groups-NNNNN.jsonl` hold the finished groups themselves. A group is in the journal before a
trainer sees it; a batch event is on disk before its optimiser step begins. A line that a crash tore in
two can only be the last one of its file; it is cut off at the next start. Reading the events again in
their order rebuilds the curriculum exactly, and the batches after a checkpoint can be trained again with
the same rollouts in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from megatron_scalerl.types import RolloutGroup

GROUPS_PER_FILE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRecord:
    """One batch as it was composed."""

    batch: int
    """Number of the batch in the run's lineage, from 0, batches without a step included."""
    step: int
    """The optimiser step that the batch was to make, from 1."""
    policy_version: int
    """Version of the weights that trained it."""
    group_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What a journal says about an earlier life of the run."""

    events: tuple[dict[str, Any], ...]
    """Every event, in order."""
    batches: tuple[BatchRecord, ...]
    files: dict[int, str]
    """Group id -> file in RUN/rollouts that holds the finished group."""

    @property
    def unfinished(self) -> tuple[dict[str, Any], ...]:
        """Admit events whose group never finished, in order of admission."""
        return tuple(e for e in self.events if e["event"] == "admit" and e["group_id"] not in self.files)

    def unbatched(self) -> tuple[int, ...]:
        """Finished groups that no batch holds, in order of admission."""
        batched = {g for record in self.batches for g in record.group_ids}
        return tuple(sorted(g for g in self.files if g not in batched))


class Journal:
    """Appends events; filled by the rollout stream and the controller, read at a restart."""

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self._rollouts = self.run_dir / "rollouts"
        self._rollouts.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self.run_dir / "journal.jsonl")
        for path in self._rollouts.glob("groups-*.jsonl"):
            _cut_torn_line(path)
        self._events: BinaryIO = open(self.run_dir / "journal.jsonl", "ab")  # noqa: SIM115
        self._group_files: dict[str, BinaryIO] = {}

    def admit(self, group_id: int, prompt_id: str, epoch: int) -> None:
        """A prompt was drawn; from here on its group exists."""
        self._event(event="admit", group_id=group_id, prompt_id=prompt_id, epoch=epoch)

    def finish(self, group: RolloutGroup) -> None:
        """A group is complete and scored; its text goes to disk before its event."""
        name = f"groups-{group.group_id // GROUPS_PER_FILE:05d}.jsonl"
        file = self._group_files.get(name)
        if file is None:
            file = self._group_files[name] = open(self._rollouts / name, "ab")  # noqa: SIM115
        file.write(msgspec.json.encode(group) + b"\n")
        file.flush()
        self._event(
            event="finish",
            group_id=group.group_id,
            prompt_id=group.prompt.prompt_id,
            pass_rate=group.pass_rate,
            first_token_version=group.first_token_version,
            file=name,
        )

    def batch(self, record: BatchRecord) -> None:
        """A batch is about to train; on disk for certain when this returns."""
        for file in self._group_files.values():
            os.fsync(file.fileno())
        self._event(
            event="batch",
            batch=record.batch,
            step=record.step,
            policy_version=record.policy_version,
            group_ids=record.group_ids,
        )
        os.fsync(self._events.fileno())

    def close(self) -> None:
        """Flush and close every file."""
        for file in [self._events, *self._group_files.values()]:
            file.close()

    def _event(self, **event: Any) -> None:
        self._events.write(msgspec.json.encode(event) + b"\n")
        self._events.flush()


def read_history(run_dir: str | Path) -> History:
    """Read RUN/journal.jsonl. Raises ValueError naming file and line where it is not what was written."""
    path = Path(run_dir) / "journal.jsonl"
    events = tuple(_lines(path)) if path.exists() else ()
    batches = tuple(
        BatchRecord(
            batch=e["batch"], step=e["step"], policy_version=e["policy_version"], group_ids=tuple(e["group_ids"])
        )
        for e in events
        if e["event"] == "batch"
    )
    files = {e["group_id"]: e["file"] for e in events if e["event"] == "finish"}
    return History(events=events, batches=batches, files=files)


def read_groups(run_dir: str | Path, history: History, group_ids: Iterable[int]) -> dict[int, RolloutGroup]:
    """Load finished groups by their ids. Raises ValueError where a group's line is missing."""
    wanted = set(group_ids)
    found: dict[int, RolloutGroup] = {}
    for name in sorted({history.files[g] for g in wanted}):
        path = Path(run_dir) / "rollouts" / name
        with open(path, "rb") as file:
            for line in file:
                group = msgspec.json.decode(line, type=RolloutGroup)
                if group.group_id in wanted:
                    found[group.group_id] = group
    missing = sorted(wanted - found.keys())
    if missing:
        raise ValueError(f"{run_dir}/rollouts: expected group {missing[0]}, found no line with it")
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path} line {number}: expected a JSON object, found {error}") from None


def _cut_torn_line(path: Path) -> None:
    """Cut an unfinished last line off."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start, tail = size, b""
        while start > 0 and b"\n" not in tail:
            step = min(start, 1 << 16)
            start = file.seek(start - step)
            tail = file.read(step) + tail
        keep = start + tail.rfind(b"\n") + 1
        if keep < size:
            file.truncate(keep)
