"""The journal: groups drawn, groups finished and batches composed, in order.

`RUN/journal.jsonl` has one event per line:

    {"event": "admit",  "group_id", "prompt_id", "epoch"}                  a prompt was drawn and submitted
    {"event": "finish", "group_id", "prompt_id", "pass_rate", "first_token_version", "file"}
    {"event": "batch",  "batch", "step", "policy_version", "group_ids"}    about to be trained on

`RUN/rollouts/groups-NNNNN.jsonl` contain the finished groups. A group is in the journal before a trainer receives
it; a batch event and the groups in it are on disk before its optimizer step begins. After a power loss the disk may
have a finish event without its group: that group is generated again. Replaying events in order restores the
curriculum exactly, and the batches after a checkpoint can be trained again with the same rollouts in the same order.
Only the owner can read these files.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl, recover
from megatron_scalerl.types import RolloutGroup

GROUPS_PER_FILE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRecord:
    """The composition of one batch."""

    batch: int
    """Number of the batch in the run's lineage, from 0, counting batches without a step."""
    step: int
    """The optimizer step for which the batch was composed, from 1."""
    policy_version: int
    """Policy version that trained on it."""
    group_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The journal of the attempts before this one. Produced by `read_history`."""

    events: tuple[dict[str, Any], ...]
    """Every event, in order."""
    batches: tuple[BatchRecord, ...]
    files: dict[int, str]
    """Group id -> file in RUN/rollouts with the finished group."""

    def unbatched(self) -> tuple[int, ...]:
        """Finished groups that are in no batch, in order of admission."""
        batched = {g for record in self.batches for g in record.group_ids}
        return tuple(sorted(g for g in self.files if g not in batched))

    def to_reissue(self, ready: Container[int]) -> tuple[dict[str, Any], ...]:
        """Admit events of groups that are neither in a batch nor in `ready`, in order of admission.

        They did not finish, or the event reached the disk without the group.
        """
        batched = {g for record in self.batches for g in record.group_ids}
        return tuple(
            e
            for e in self.events
            if e["event"] == "admit" and e["group_id"] not in batched and e["group_id"] not in ready
        )


class Journal:
    """Appends events of the rollout stream and the controller; read at a restart."""

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self._rollouts = self.run_dir / "rollouts"
        self._rollouts.mkdir(parents=True, exist_ok=True)
        for path in self._rollouts.glob("groups-*.jsonl"):
            recover(path)
        self._events = JsonlWriter(self.run_dir / "journal.jsonl", private=True)
        self._group_files: dict[str, JsonlWriter] = {}
        self._unsynced: set[JsonlWriter] = set()

    def admit(self, group_id: int, prompt_id: str, epoch: int) -> None:
        """Record that a prompt was drawn for a group."""
        self._events.append({"event": "admit", "group_id": group_id, "prompt_id": prompt_id, "epoch": epoch})

    def finish(self, group: RolloutGroup) -> None:
        """Record a finished, scored group; the group is written before its event."""
        name = f"groups-{group.group_id // GROUPS_PER_FILE:05d}.jsonl"
        file = self._group_files.get(name)
        if file is None:
            file = self._group_files[name] = JsonlWriter(self._rollouts / name, private=True)
        file.append(group)
        self._unsynced.add(file)
        self._events.append(
            {
                "event": "finish",
                "group_id": group.group_id,
                "prompt_id": group.prompt.prompt_id,
                "pass_rate": group.pass_rate,
                "first_token_version": group.first_token_version,
                "file": name,
            }
        )

    def batch(self, record: BatchRecord) -> None:
        """Record a batch about to be trained on. It and its groups are synced to disk when this returns."""
        for file in self._unsynced:
            file.sync()
        self._unsynced.clear()
        self._events.append({"event": "batch", **asdict(record)})
        self._events.sync()

    def close(self) -> None:
        """Close every file."""
        for file in [self._events, *self._group_files.values()]:
            file.close()


def read_history(run_dir: str | Path) -> History:
    """Read RUN/journal.jsonl. Raises ValueError naming file and line for an invalid line."""
    events = tuple(read_jsonl(Path(run_dir) / "journal.jsonl"))
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
    """The finished groups of these ids that are on disk; the later one if a group has two lines.

    Raises ValueError naming file and line for an invalid line.
    """
    requested = set(group_ids)
    found: dict[int, RolloutGroup] = {}
    for name in sorted({history.files[g] for g in requested}):
        path = Path(run_dir) / "rollouts" / name
        if not path.exists():
            continue
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                group = _group(line, f"{path} line {number}")
                if group is not None and group.group_id in requested:
                    found[group.group_id] = group
    return found


def read_batch(run_dir: str | Path, history: History, record: BatchRecord) -> list[RolloutGroup]:
    """The groups of a batch, in its order. Raises ValueError if one is missing: they were synced before it."""
    groups = read_groups(run_dir, history, record.group_ids)
    for group_id in record.group_ids:
        if group_id not in groups:
            file = Path(run_dir) / "rollouts" / history.files[group_id]
            raise ValueError(f"{file}: expected group {group_id} of batch {record.batch}, found none")
    return [groups[g] for g in record.group_ids]


def _group(line: bytes, where: str) -> RolloutGroup | None:
    """A line as a group; None for an incomplete last line."""
    try:
        return msgspec.json.decode(line, type=RolloutGroup)
    except msgspec.DecodeError as error:
        if not line.endswith(b"\n"):
            return None
        raise ValueError(f"{where}: expected a group, found {error}") from None
