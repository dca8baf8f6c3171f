"""`submit --status RUN`: the job of a run, its progress, what it costs, its last error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.cluster import cluster
from megatron_scalerl.cluster.budget import spent
from megatron_scalerl.cluster.slurm_checks import ENGINE_JOBS, JOBS, jobs_of
from megatron_scalerl.cluster.slurm_nodes import node_lines
from megatron_scalerl.controller.run_folder import END, SLURM
from megatron_scalerl.recipe.file import read_run_recipe

ROLES = ("preflight", "controller")
"""What an attempt starts, in this order; each leaves ROLE.exit and ROLE.log."""
_TAIL_BYTES = 100_000


def status(run_dir: str | Path) -> Iterator[str]:
    """The lines of the status. Raises ValueError for a folder without a submission, RuntimeError if Slurm fails."""
    run = Path(run_dir).absolute()
    cluster.require()
    submissions = read_jsonl(run / SLURM / JOBS)
    if not submissions and not (run / SLURM / "job.sbatch").exists():
        raise ValueError(f"{run_dir}: expected a run that was submitted to Slurm, found no {SLURM}/job.sbatch")
    newest = submissions[-1] if submissions else None
    queued = cluster.queued()
    jobs = jobs_of(run, queued)
    yield from _job_lines(run, newest, jobs)
    yield from node_lines(run, jobs)
    yield from _engine_lines(run, queued)
    yield from _progress(run, (newest or {}).get("gpu_hours"))
    error = last_error(run)
    if error is not None:
        yield f"last error: {error}"


def _job_lines(run: Path, newest: dict[str, Any] | None, jobs: list[cluster.Job]) -> Iterator[str]:
    ended = read_jsonl(run / END)
    for job in jobs:
        yield f"job {job.job_id}: {job.state} ({job.reason}), {_requeues(run, newest)}"
        if job.state == "RUNNING" and job.end is not None:
            left = job.end - datetime.now() - timedelta(seconds=newest["lead_s"] if newest else 0)
            what = "saves and goes on in the next job" if newest and newest["chain"] else "saves and is queued again"
            yield f"{what} in {_duration(left)}"
    if not jobs and newest is not None:
        job = newest["jobs"][-1]
        state = cluster.last_state(job) or "no longer known to Slurm"
        yield f"job {job}: {state}, {_requeues(run, newest)}"
    elif not jobs:
        yield "no job: the script was written and not submitted"
    if ended and not jobs:
        yield f"finished: {ended[-1].get('reason')}"


def _requeues(run: Path, newest: dict[str, Any] | None) -> str:
    file = run / SLURM / "requeues"
    mine = {job.split("_")[0] for job in newest["jobs"]} if newest else set()
    count = sum(line.split()[0] in mine for line in file.read_text().splitlines() if line) if file.exists() else 0
    bound = f" of at most {newest['max_requeues']} times" if newest else " times"
    return f"queued again {count}{bound}"


def _engine_lines(run: Path, queued: list[cluster.Job]) -> Iterator[str]:
    """Jobs of engines that join the run."""
    mine = {str(job) for row in read_jsonl(run / SLURM / ENGINE_JOBS) for job in row["jobs"]}
    for job in queued:
        if job.job_id in mine:
            yield f"job {job.job_id}, engines: {job.state} ({job.reason})"


def _progress(run: Path, budget: float | None) -> Iterator[str]:
    if not (run / "recipe.yaml").exists():
        yield "not started yet"
        return
    steps = read_run_recipe(run).get("steps")
    metrics = read_jsonl(run / "metrics.jsonl")
    rate = f", pass rate {metrics[-1]['pass_rate']:.3f} in training" if metrics and "pass_rate" in metrics[-1] else ""
    yield f"step {metrics[-1]['step'] if metrics else 0} of {steps}{rate}"
    if validations := read_jsonl(run / "validation.jsonl"):
        last = validations[-1]
        yield f"held-out pass rate {last['pass_rate']:.3f} at step {last['step']}"
    cost = spent(run)
    left = f", {max(0.0, budget - cost.hours):.4g} left of {budget:g}" if budget else ""
    yield f"{cost.hours:.4g} {cost.unit} spent{left}"


def last_error(run: Path) -> str | None:
    """The error with which the newest attempt in a job ended, with its log; None after a good end or while it runs.

    Exit codes 0 and 75 (saved) are good ends. The first role that failed is the cause: nothing starts after it.
    """
    started = sorted((run / SLURM).glob("*/started"), key=os.path.getmtime)
    for role in ROLES if started else ():
        file = started[-1].with_name(f"{role}.exit")
        if file.exists() and (code := file.read_text().strip()) not in ("0", "75"):
            log = file.with_suffix(".log")
            more = (run / "logs" / "controller.log") if role == "controller" else file.with_name("nodes")
            return f"{role}: exit code {code}: {_last_line(log)} ({log}, {more})"
    return None


def _last_line(log: Path) -> str:
    """The last line of the program itself, else the last one at all."""
    if not log.exists():
        return "no output"
    with open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode("utf8", "replace").splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("megatron-scalerl: ")]
    line = (own or lines or ["no output"])[-1].removeprefix("megatron-scalerl: ")
    return "".join(each if each.isprintable() else "?" for each in line)[:500]


def _duration(left: timedelta) -> str:
    return str(timedelta(seconds=max(0, int(left.total_seconds()))))
