"""The folder that a conversion writes in: beside its place, taken up again after an interruption, moved at the end.

`.NAME.partial` holds the plan's fingerprint and a record of every finished job. A conversion that was killed goes
on from there if source and options are the same; one that fails removes it. Nothing has the final name before
everything is written and on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megatron_scalerl.checkpoints.atomic_io import sync, write_durably
from megatron_scalerl.convert.jobs import Job, Record

_PLAN = "plan.json"
_RECORDS = "records"
_RESERVE = 64 << 20
"""Bytes that stay free."""


class WorkFolder:
    """One conversion's work folder. Use `work_folder` to make one."""

    def __init__(self, out: Path, path: Path, state: Path):
        self.out = out
        self.path = path
        """What becomes the result."""
        self._state = state
        self.records: dict[str, Record] = {}
        """Job's name -> what it left behind."""

    def left(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs that are not done yet."""
        return [job for job in jobs if job.name not in self.records]

    def keep(self, job: Job, record: Record) -> None:
        """The job is done and its bytes are on the disk."""
        self.records[job.name] = record
        path = self._state / _RECORDS / job.name
        write_durably(path, json.dumps(record).encode())

    def publish(self) -> None:
        """Give the result its name."""
        for folder in {file.parent for file in self.path.rglob("*")}:
            sync(folder)
        self.path.rename(self.out)
        sync(self.out.parent)
        shutil.rmtree(self._state)


@contextlib.contextmanager
def work_folder(out: str | Path, plan: Mapping[str, Any], *, nbytes: int, done_bytes: Any) -> Iterator[WorkFolder]:
    """A work folder for the result `out`, with the records of an interrupted conversion with the same `plan`.

    `nbytes` is the size of the result; `done_bytes(records)` what is written of it already. Raises ValueError
    where `out` exists, another process converts to it, or the disk has too little space. A ValueError or OSError
    inside removes the folder; an interruption leaves it.
    """
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: expected no such path (nothing is overwritten), found one")
    if not out.parent.is_dir():
        raise ValueError(f"{out}: expected a place in an existing folder, found no folder {out.parent}")
    state = out.with_name(f".{out.name}.partial")
    state.mkdir(exist_ok=True)
    with (state / "lock").open("a") as lock:
        os.fchmod(lock.fileno(), 0o600)  # whoever may read it can lock it
        _lock(lock, out)
        folder = WorkFolder(out, state / "result", state)
        _take_up(folder, state, plan)
        try:
            _check_space(out, nbytes - done_bytes(folder.records))
            yield folder
        except (ValueError, OSError):
            shutil.rmtree(state)
            raise


def _lock(lock: IO[str], out: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{out}: expected one conversion to it at a time, found another at work") from None


def _take_up(folder: WorkFolder, state: Path, plan: Mapping[str, Any]) -> None:
    """Reads the records that fit the plan, or starts afresh."""
    mark = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest().encode()
    known = state / _PLAN
    if known.is_file() and known.read_bytes() == mark and folder.path.is_dir():
        for path in sorted((state / _RECORDS).iterdir()):
            if not path.name.startswith("."):
                folder.records[path.name] = json.loads(path.read_text())
        return
    for path in state.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    folder.path.mkdir()
    (state / _RECORDS).mkdir()
    write_durably(known, mark)


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if needed + _RESERVE > free:
        raise ValueError(
            f"{out}: expected {(needed + _RESERVE) / 2**30:.2f} GiB of free space, found {free / 2**30:.2f} GiB"
        )
