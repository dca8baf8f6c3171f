"""What is refused before anything is submitted: each check raises ValueError with one line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.cluster.cluster import Job, Partition, either, seconds_of
from megatron_scalerl.cluster.job import MARGIN_S
from megatron_scalerl.cluster.node import mount_of
from megatron_scalerl.controller.run_folder import SAVES, SLURM
from megatron_scalerl.recipe.other_names import unknown_key

STARTUP_S, SAVE_S = 600.0, 300.0
"""Assumed seconds until the first step, and of a step and its checkpoint, where the run has no records of them."""
_RECENT = 100
"""Steps whose slowest one counts."""
_PRIVATE = ("tmpfs", "ramfs", "devtmpfs", "overlay", "squashfs")
_LOCAL_FOLDERS = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
_LOCAL_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs")
"""File systems of one host; it may export them to others under the same path."""
JOBS = "jobs.jsonl"
"""In RUN/slurm: one line per submission with the job's id and script."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """How long a run takes to start and to save."""

    startup_s: float
    """Seconds until the first step."""
    save_s: float
    """Seconds to finish the step in progress, with its weight update, and to write a checkpoint."""

    @property
    def lead_s(self) -> int:
        """Seconds before the time limit at which it has to be asked to save."""
        return int(self.save_s + 0.999) + MARGIN_S


def times_of(run: Path, *, startup_s: float | None, save_s: float | None) -> Times:
    """The slowest start, step and checkpoint in the run's records, else the assumed ones; those given before both."""
    records = read_jsonl(run / SAVES)
    saves = [row["seconds"] for row in records]
    # an asynchronous one that is being written is waited for before the last one begins
    pending = max((row["seconds"] - row.get("stopped_seconds", row["seconds"]) for row in records), default=0.0)
    rows = read_jsonl(run / "metrics.jsonl")[-_RECENT:] if saves else []
    step = max(
        (sum(row.get(f"{what}_seconds", 0.0) for what in ("train", "pinned", "publish")) for row in rows), default=0.0
    )
    starts = [row["seconds"] for row in read_jsonl(run / "ledger.jsonl") if row.get("phase") == "startup"]
    return Times(
        startup_s=startup_s if startup_s is not None else max(starts, default=STARTUP_S),
        save_s=save_s if save_s is not None else step + max(saves) + pending if saves else SAVE_S,
    )


def check_partition(names: str, partitions: Mapping[str, Partition]) -> Partition:
    """The partition of this name; of several, separated by commas, what the job may count on in each."""
    for name in names.split(","):
        if not partitions:
            raise ValueError(f"--partition: there is no partition {name}; this cluster has none")
        if name not in partitions:
            text = unknown_key(name, partitions, expected="a partition of this cluster", kind="partitions")
            raise ValueError(f"--partition: {text}")
    return either([partitions[name] for name in names.split(",")])


def check_time(limit: str, partition: Partition, times: Times) -> None:
    """A time limit of the partition in which a run starts and saves."""
    seconds, least = seconds_of(limit), times.startup_s + times.lead_s
    if seconds < least:
        raise ValueError(
            f"--time: {seconds} s is too short for start-up ({times.startup_s:.0f} s), a step and its checkpoint "
            f"({times.save_s:.0f} s) and a margin ({MARGIN_S} s); use at least {least:.0f} s, or state "
            "other times with --startup-seconds and --save-seconds"
        )
    if partition.limit_s is not None and seconds > partition.limit_s:
        raise ValueError(
            f"--time: {seconds} s is more than the limit of partition {partition.name}, {partition.limit_s} s"
        )


def job_ids(run: Path) -> list[str]:
    """Ids of the run's submitted jobs, the oldest first."""
    return [str(job) for row in read_jsonl(run / SLURM / JOBS) for job in row["jobs"]]


def jobs_of(run: Path, jobs: Iterable[Job]) -> list[Job]:
    """Those of the `jobs` that are the run's: submitted by the command, or its script by hand. Running ones first."""
    submitted, script = set(job_ids(run)), str(run / SLURM / "job.sbatch")
    mine = [job for job in jobs if job.job_id in submitted or job.script == script]
    return sorted(mine, key=lambda job: job.state != "RUNNING")


def check_shared(run: Path, *, several: bool, anywhere: bool) -> str | None:
    """Whether other nodes can see the run's folder, by the type of its file system, as far as this node can say.

    Returns a warning or None. Raises ValueError for a folder that no other node sees, if the job has several nodes
    and not `anywhere`.
    """
    place = next(place for place in (run, *run.parents) if place.is_dir())
    kind, point = mount_of(place)
    private = kind in _PRIVATE or any(place.resolve().is_relative_to(folder) for folder in _LOCAL_FOLDERS)
    if not private and kind not in _LOCAL_DISKS:
        return None
    found = f"{place}, {kind} at {point}"
    if private and several and not anywhere:
        raise ValueError(
            f"output_dir: the other nodes seem not to see {found}; use a shared folder, or submit all the same with "
            "--any-file-system"
        )
    return f"output_dir: do the job's nodes see it under the same path? It is {found}"


def check_free(run: Path, jobs: Iterable[Job] | None) -> None:
    """A run without a job that is queued or running. jobs: None without Slurm, where any of the run may be."""
    if jobs is None and job_ids(run):
        raise ValueError(f"{run}: may have a job, which a dry run without Slurm would change; give it another name")
    for job in jobs_of(run, jobs or ()):
        raise ValueError(f"{run}: has job {job.job_id} already, {job.state}; scancel {job.job_id} ends it")


def check_script(script: Path, runs: Iterable[Path]) -> None:
    """The script of an array, which names none of the `runs` only if it was written for others."""
    if script.is_file():
        text = script.read_text(encoding="utf8")
        if not any(f"{shlex.quote(str(run))}\n" in text for run in runs):
            raise ValueError(
                f"{script.parent.parent}: expected the script of these runs, found that of others; move it away, or "
                "rename the array's folder or base"
            )
