"""Runs a conversion: its options, the work folder that makes it resumable, and the move to the final name.

The work folder `.NAME.partial`, beside the result's place, holds the plan's fingerprint and the result of every
finished job. A conversion that was killed resumes from there if source and options are the same; one that fails
removes it. Nothing has the final name before everything is written and synced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_scalerl.checkpoints.atomic_io import publish_folder, write_durably
from megatron_scalerl.checkpoints.hf_writer import SafetensorsFile
from megatron_scalerl.checkpoints.jobs import Job, JobResult, Setting, SourceFiles
from megatron_scalerl.checkpoints.workers import run_jobs

_MAX_JOB_BYTES = 1 << 30
_MIN_JOB_BYTES = 32 << 20
_MIN_JOBS = 16
"""Of a checkpoint that is not small."""
_PLAN = "plan.json"
_RECORDS = "records"
_RESERVE = 64 << 20
"""Bytes that stay free."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a conversion."""

    processes: int = 1
    dtype: str | None = None
    """F32, BF16 or F16; None keeps each tensor's type."""
    verify: bool = False
    """Compare every tensor bit for bit before the result gets its name."""
    allow_nonfinite: bool = False
    console: Console | None = None
    """Where the progress bar is shown, if it is a terminal."""
    job_bytes: int | None = None
    """Size of one job; None chooses it."""

    def bytes_of_a_job(self, total: int) -> int:
        """Job size for `total` bytes: independent of the number of processes, so that any number can resume."""
        return self.job_bytes or max(_MIN_JOB_BYTES, min(_MAX_JOB_BYTES, total // _MIN_JOBS))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a conversion did."""

    tensors: int
    nbytes: int
    """Bytes of weights in the result."""
    resumed_bytes: int
    """Of these, bytes that an earlier, interrupted conversion had written."""
    verified: bool


def convert(
    out: str | Path,
    jobs: Sequence[Job],
    source: SourceFiles,
    options: Options,
    *,
    direction: str,
    inputs: Mapping[str, Any],
    files: Iterable[SafetensorsFile],
    finish: Callable[[Path, dict[str, JobResult]], None],
) -> int:
    """Run the jobs in a work folder, and give the result its name `out`. Returns the bytes that were done already.

    inputs: state of the files that results depend on (`source_state`). files: those that several jobs fill. finish:
    called with the result's folder and the results by job name after all jobs. Raises like `work_folder` and
    `run_jobs`.
    """
    plan = dict(direction=direction, dtype=options.dtype, allow_nonfinite=options.allow_nonfinite, **inputs)
    with work_folder(out, {**plan, "jobs": [(job.name, job.nbytes) for job in jobs]}, jobs) as work:
        remaining = [job for job in jobs if job.name not in work.results]
        total = sum(job.nbytes for job in jobs)
        resumed = total - sum(job.nbytes for job in remaining)
        for file in files:
            file.create(work.path)
        with progress(options, direction, total, resumed) as advance:
            run_jobs(
                remaining,
                Setting(sources=[source], folder=work.path, allow_nonfinite=options.allow_nonfinite),
                processes=options.processes,
                on_bytes=advance,
                on_done=work.record,
            )
        finish(work.path, work.results)
        work.publish()
    return resumed


@contextmanager
def progress(options: Options, title: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A progress bar of bytes on a terminal, nothing elsewhere; yields the function that advances it."""
    console = options.console
    if console is None or not console.is_terminal:
        yield lambda nbytes: None
        return
    bytes_column = DownloadColumn(binary_units=True)
    columns = (TextColumn(title), BarColumn(bar_width=20), bytes_column, TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total, completed=done)
        yield lambda nbytes: bar.advance(task, nbytes)


class WorkFolder:
    """One conversion's work folder. Produced by `work_folder`."""

    def __init__(self, out: Path, state: Path):
        self.out = out
        self.path = state / "result"
        """What becomes the result."""
        self.results: dict[str, JobResult] = {}
        """Job's name -> its result, of finished jobs."""
        self._state = state

    def record(self, job: Job, result: JobResult) -> None:
        """Record a finished job, whose bytes are on the disk."""
        self.results[job.name] = result
        write_durably(self._state / _RECORDS / job.name, json.dumps(result).encode())

    def publish(self) -> None:
        """Give the result its name."""
        publish_folder(self.path, self.out)
        shutil.rmtree(self._state)

    def resume(self, plan: Mapping[str, Any]) -> None:
        """Read the results of an interrupted conversion with the same plan, or start over."""
        fingerprint = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest().encode()
        known = self._state / _PLAN
        if known.is_file() and known.read_bytes() == fingerprint and self.path.is_dir():
            for path in sorted((self._state / _RECORDS).iterdir()):
                if not path.name.startswith("."):
                    self.results[path.name] = json.loads(path.read_text())
            return
        for path in self._state.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        self.path.mkdir()
        (self._state / _RECORDS).mkdir()
        write_durably(known, fingerprint)


@contextlib.contextmanager
def work_folder(out: str | Path, plan: Mapping[str, Any], jobs: Sequence[Job]) -> Iterator[WorkFolder]:
    """A work folder for the result `out`, with the results of an interrupted conversion with the same `plan`.

    Raises ValueError if `out` exists, another process converts to it, or the disk has too little space for `jobs`. A
    ValueError or OSError inside the block removes the folder; an interruption leaves it.
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
        folder = WorkFolder(out, state)
        folder.resume(plan)
        try:
            _check_space(out, sum(job.nbytes for job in jobs if job.name not in folder.results))
            yield folder
        except (ValueError, OSError):
            shutil.rmtree(state)
            raise


def _lock(lock: IO[str], out: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{out}: expected one conversion to it at a time, found another running") from None


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if needed + _RESERVE > free:
        raise ValueError(
            f"{out}: expected {(needed + _RESERVE) / 2**30:.2f} GiB of free space, found {free / 2**30:.2f} GiB"
        )
