"""`submit --status RUN`: the job, progress, cost and last error of a run; the remainder of a budget."""

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.cluster import cluster
from megatron_scalerl.cluster.doctor_nodes import BAD, program_line
from megatron_scalerl.cluster.submission import JOBS, jobs_of
from megatron_scalerl.controller.run_folder import END, SLURM
from megatron_scalerl.fit.formatting import money, unit_name
from megatron_scalerl.recipe.file import load_recipe, read_run_recipe
from megatron_scalerl.record import record

ROLES = ("setup", "preflight", "controller")
"""Programs that an attempt starts, in this order; each program leaves ROLE.exit and ROLE.log."""
FIRST_NODE = "first-node.log"
"""File in an attempt's folder. If the job's first node was lost, a further node writes a line about the loss."""
_LONGEST = 500
"""Largest number of characters of a reason that is printed."""


@record
class LedgerTotal:
    """The total of a ledger. Produced by `ledger_total`."""

    hours: float
    """Device-hours of all roles, up to the last heartbeat."""
    unit: str
    """Name of the unit of `hours` for printing: GPU-hours or device-hours."""


def ledger_total(run: Path) -> LedgerTotal:
    """The device-hours that the run's ledger has charged so far; 0 before the first start."""
    header, *rows = read_jsonl(run / "ledger.jsonl") or [{}]
    hours = sum(row["hours"] for row in rows if "role" in row)
    if rows and "heartbeat" in rows[-1]:
        hours += rows[-1]["heartbeat"] * rows[-1]["devices"] / 3600
    return LedgerTotal(hours=hours, unit=unit_name(str(header.get("unit", "device_hours"))))


def seconds_left(recipe_file: Path, budget: float) -> int:
    """Seconds for which the budget still pays for the run's fleet. budget: device-hours. Raises ValueError for a
    wrong recipe."""
    recipe = load_recipe(recipe_file)
    return max(0, int((budget - ledger_total(recipe.run_dir).hours) * 3600 / recipe.devices))


def status(run_dir: Path) -> Iterator[str]:
    """The lines of the status. Raises ValueError for a folder without a submission, RuntimeError if Slurm fails."""
    run = run_dir.absolute()
    submissions = read_jsonl(run / SLURM / JOBS)
    if not submissions and not (run / SLURM / "job.sbatch").exists():
        raise ValueError(f"{run_dir}: this run was not submitted to Slurm; it has no {SLURM}/job.sbatch")
    newest: dict[str, Any] = next(reversed(submissions), {})
    jobs = []
    if cluster.slurm_is_present():
        jobs = jobs_of(run, cluster.queued())
        yield from _job_lines(run, newest, jobs)
    else:
        yield "sbatch is not on the path: the job's state is unknown, and the next lines are from the run's folder"
    if not jobs:
        yield from (f"finished: {row.get('reason')}" for row in read_jsonl(run / END)[-1:])
    for attempt in attempts(run):
        for node, reason in unfit_nodes(attempt).items():
            yield f"attempt {attempt.name}: {node} was unfit: {reason[:_LONGEST]}"
        yield from (f"attempt {attempt.name}: {line}" for line in _lines(attempt / FIRST_NODE))
    yield from _progress(run, newest.get("gpu_hours"), running=any(job.state == "RUNNING" for job in jobs))
    if (error := last_error(run)) is not None:
        yield f"last error: {error}"


def attempts(run: Path) -> list[Path]:
    """Folders of the attempts since the last submission, in the order of the starts.

    Folders are chosen by time, not by name: squeue and the job's environment have different ids for a task of an
    array.
    """
    script = run / SLURM / "job.sbatch"
    submitted = os.path.getmtime(script) if script.exists() else 0.0
    started = sorted((os.path.getmtime(file), file.parent) for file in (run / SLURM).glob("*/started"))
    return [folder for start_time, folder in started if start_time >= submitted]


def unfit_nodes(attempt: Path) -> dict[str, str]:
    """Name of each node that the attempt's check found unfit and excluded -> the reason."""
    return dict(line.split("\t", 1) for line in _lines(attempt / "nodes" / BAD) if "\t" in line)


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf8", errors="replace").splitlines() if file.is_file() else []


def _job_lines(run: Path, newest: dict[str, Any], jobs: list[cluster.Job]) -> Iterator[str]:
    for job in jobs:
        yield f"job {job.job_id}: {job.state} ({job.reason}), {_requeues(run, newest)}"
    if not jobs and newest:
        job = newest["jobs"][-1]
        state = cluster.last_state(job) or "no longer known to Slurm"
        yield f"job {job}: {state}, {_requeues(run, newest)}"
    elif not jobs:
        yield "no job: the script was written, but not submitted"


def _requeues(run: Path, newest: dict[str, Any]) -> str:
    jobs = {job.split("_")[0] for job in newest.get("jobs", ())}
    count = len([line for line in _lines(run / SLURM / "requeues") if line.partition(" ")[0] in jobs])
    if not newest:
        return f"queued again {count} times"
    return f"queued again {count} of at most {newest['max_requeues']} times"


def _progress(run: Path, budget: float | None, *, running: bool) -> Iterator[str]:
    if not (run / "recipe.yaml").exists():
        yield "not started yet"
        return
    recipe = read_run_recipe(run)
    metrics: dict[str, Any] = next(reversed(read_jsonl(run / "metrics.jsonl")), {})
    rate = ""
    if "pass_rate" in metrics:
        rate = f", pass rate {metrics['pass_rate']:.3f} in training"
    yield f"step {metrics.get('step', 0)} of {recipe.get('steps')}{rate}"
    for row in read_jsonl(run / "validation.jsonl")[-1:]:
        yield f"held-out pass rate {row['pass_rate']:.3f} at step {row['step']}"
    if running and metrics:  # the controller's event loop writes a heartbeat to the ledger every HEARTBEAT_S
        since = timedelta(seconds=max(0, int(time.time() - os.path.getmtime(run / "ledger.jsonl"))))
        lag = metrics.get("loop_lag_seconds", 0.0)
        yield f"last heartbeat {since} ago; the event loop was up to {lag:.1f} s late in the last batch"
    cost = ledger_total(run)
    remainder = ""
    if budget:
        remainder = f", {max(0.0, budget - cost.hours):.4g} left of {budget:g}"
    yield f"{cost.hours:.4g} {cost.unit} spent{money(cost.hours, recipe['cost'])}{remainder}"


def last_error(run: Path) -> str | None:
    """The last error of the newest attempt, with the path of the log; None after a good end or during the attempt.

    Exit codes 0 and 75 (saved) are good ends. The first role that failed is the cause: no later role starts.
    """
    started = sorted((run / SLURM).glob("*/started"), key=os.path.getmtime)
    details = {"controller": run / "logs" / "controller.log"}
    for newest in started[-1:]:
        for role in ROLES:
            exit_file = newest.with_name(f"{role}.exit")
            if not exit_file.exists():
                continue
            code = exit_file.read_text().strip()
            if code not in ("0", "75"):
                log = newest.with_name(f"{role}.log")
                detail = details.get(role, newest.with_name("nodes"))
                return f"{role}: exit code {code}: {program_line(log)} ({log}, {detail})"
    return None
