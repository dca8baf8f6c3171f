"""Calls of Slurm's programs: partitions, jobs, submissions. No call needs accounting (sacct)."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_scalerl.record import record

TIMEOUT_S = 120.0
"""Time limit of a call (s), above the limits within which a busy controller of Slurm answers."""


@record
class Partition:
    """A partition, described by its largest node."""

    name: str
    gpus: int
    """GPUs of a node."""
    cpus: int
    """CPUs of a node."""
    nodes: int
    """Number of nodes, including nodes that are down."""
    gpu_type: str | None
    """Slurm's name of the GPUs, such as h100; None if Slurm has no name."""
    limit_s: int | None
    """Longest time limit of a job (s); None without a limit."""


@record
class Job:
    """A job, or a task of an array, that is queued or running."""

    job_id: str
    """Slurm's id of the job: N, or N_TASK for a task of an array."""
    state: str
    """State by Slurm's name, such as RUNNING or PENDING."""
    reason: str
    """The reason why the job waits, or the nodes of a running job."""
    script: str
    """Path of the job script."""


def slurm_is_present() -> bool:
    """Whether this machine has the programs of Slurm."""
    return shutil.which("sbatch") is not None


def partitions() -> dict[str, Partition]:
    """Partitions by name. Raises RuntimeError if Slurm does not answer."""
    by_name: dict[str, Partition] = {}
    # --exact: nodes share a line only if all values are equal; without --exact sinfo merges two values into one (64+)
    for line in _ask("sinfo", "--noheader", "--exact", "-o", "%R|%G|%c|%l|%D").splitlines():
        name, gres, cpus, limit, count = line.strip().split("|")
        limit_s = None if limit in ("infinite", "n/a") else seconds_of(limit)
        kind = Partition(
            name=name,
            gpus=gpus_of(gres),
            cpus=int(re.sub(r"\D.*", "", cpus) or 0),
            nodes=int(count),
            gpu_type=gpu_type_of(gres),
            limit_s=limit_s,
        )
        # sinfo prints a line for each kind of node of a partition
        earlier_kind = by_name.get(name, kind)
        largest = max(earlier_kind, kind, key=lambda partition: (partition.gpus, partition.cpus))
        if name in by_name:
            largest = replace(largest, nodes=earlier_kind.nodes + kind.nodes)
        by_name[name] = largest
    return by_name


def smallest_partition(candidates: Sequence[Partition]) -> Partition:
    """A partition with the minimum of each number (GPUs, CPUs, nodes, time limit) over several partitions, because
    Slurm starts a job in whichever partition is free first."""
    limits = [partition.limit_s for partition in candidates if partition.limit_s is not None]
    return Partition(
        name=",".join(partition.name for partition in candidates),
        gpus=min(partition.gpus for partition in candidates),
        cpus=min(partition.cpus for partition in candidates),
        nodes=min(partition.nodes for partition in candidates),
        gpu_type=_only({partition.gpu_type for partition in candidates}),
        limit_s=min(limits, default=None),
    )


def gpus_of(gres: str) -> int:
    """GPUs in Slurm's description of a node's generic resources, such as `gpu:h100:8(S:0-1),tmp:1`.

    >>> gpus_of("gpu:a100:4(S:0,1),gpu:h100:8,nvme:1T"), gpus_of("(null)"), gpus_of("gpu:2")
    (12, 0, 2)
    """
    return sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)(?=$|[,(])", gres))


def gpu_type_of(gres: str) -> str | None:
    """The type of a node's GPUs in Slurm's description; None without a type or with several types.

    >>> gpu_type_of("gpu:h100:8(S:0-1),tmp:1"), gpu_type_of("gpu:8"), gpu_type_of("gpu:a100:4,gpu:h100:4")
    ('h100', None, None)
    """
    return _only(set(re.findall(r"(?:^|,)gpu:([^:,()]+):\d+", gres)))


def _only(types: set[str | None]) -> str | None:
    """The only element of `types`; None if `types` is empty or has several elements."""
    return types.pop() if len(types) == 1 else None


def seconds_of(limit: str) -> int:
    """Seconds of a time limit in Slurm's notation.

    Raises ValueError for any other text.

    >>> [seconds_of(text) for text in ("90", "5:30", "24:00:00", "1-12", "1-0:30", "2-1:00:01")]
    [5400, 330, 86400, 129600, 88200, 176401]
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if match is None:
        raise ValueError(f"--time: {limit!r} is not a time limit; write MINUTES, H:MM:SS or D-HH:MM:SS")
    parts = [int(part) for part in match.groups()[1:] if part is not None]
    # after days the first number is hours; without days a single number is minutes
    if match[1] is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return int(match[1] or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def queued() -> list[Job]:
    """This user's queued and running jobs, with a job for each task of an array. Raises RuntimeError if squeue
    fails."""
    me = str(os.getuid())
    # --array: one line for each task; without --array all waiting tasks of an array share a line
    output = _ask("squeue", "--noheader", "--array", "--user", me, "-o", "%i|%T|%o|%R")
    return [_job(line) for line in output.splitlines() if line.count("|") >= 3]


def _job(line: str) -> Job:
    job_id, state, script, reason = line.strip().split("|", 3)
    return Job(job_id=job_id, state=state, reason=reason.strip("()"), script=script)


def last_state(job_id: str) -> str | None:
    """State of a job that ended, as long as Slurm remembers the job (MinJobAge), else None."""
    states = re.findall(r"\bJobState=(\w+)", _job_description(job_id))
    return next(iter(states), None)


def _job_description(job_id: str) -> str:
    """The line that scontrol shows of a job; empty for an unknown job."""
    done = _run("scontrol", "show", "job", "--oneliner", job_id)
    return "" if done.returncode else done.stdout


def test_only(script: Path) -> str:
    """Slurm's estimate for the job, without a submission. Raises ValueError with Slurm's reason for a refusal."""
    done = _run("sbatch", "--test-only", str(script))
    # sbatch prints the estimate to stderr, and errors as well
    answer = _reason(done.stderr + done.stdout)
    if done.returncode:
        raise ValueError(f"{script}: the cluster does not accept this job: {answer}")
    return answer


def submit(script: Path, options: Sequence[str] = ()) -> str:
    """Submit a job script; returns the job's id. Raises RuntimeError with Slurm's reason."""
    done = _run("sbatch", "--parsable", *options, str(script))
    if done.returncode:
        raise RuntimeError(f"{script}: sbatch failed: {_reason(done.stderr + done.stdout)}")
    # with --parsable sbatch prints ID, or ID;CLUSTER
    return done.stdout.strip().split(";")[0]


def cancel(job_ids: Iterable[str]) -> None:
    """Cancel the jobs by scancel. Jobs that have ended do not change."""
    for job_id in job_ids:
        _run("scancel", job_id)


def check_syntax(script: Path) -> None:
    """Raises ValueError for a script that bash cannot parse."""
    done = _run("bash", "-n", str(script))
    if done.returncode:
        raise ValueError(f"{script}: bash cannot parse this script: {_reason(done.stderr)}")


def _reason(output: str) -> str:
    return " ".join(output.replace("sbatch: error: ", "").replace("sbatch: ", "").split())


def _ask(*argv: str) -> str:
    done = _run(*argv)
    if done.returncode:
        raise RuntimeError(f"{argv[0]} failed: {_reason(done.stderr + done.stdout)}")
    return done.stdout


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{argv[0]} did not answer within {TIMEOUT_S:g} s") from None
