"""The rows of the list of runs: state, step and last validation of each run, from the last rows of its files."""

import os
import time
from pathlib import Path

from megatron_scalerl.page.growing_file import ending, last_row, one_line, validation_row
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.record import record

QUIET_S = 60.0
"""Seconds without a write to the ledger after which a run counts as stopped; a heartbeat is written every 10 s."""


@record
class RunRow:
    """A row of the list of runs."""

    name: str
    """Path of the run below the folder, control characters escaped."""
    address: str
    """Address of the run's page, relative to the list; empty if the list is written to a file."""
    state: str = ""
    """"running", "stopped", "not started", or "finished: " with the reason of the end."""
    step: str = ""
    """Step of the last row of metrics.jsonl; empty without a row."""
    validation: str = ""
    """Pass rate and step of the last validation; empty without a validation."""
    problem: str = ""
    """A line about an unreadable file; empty if every file is readable."""


def run_row(run_dir: Path, name: str, address: str = "") -> RunRow:
    """The row of a run. If a file is damaged, the row has a line about the damage."""
    name = printable(name)
    try:
        metrics = last_row(run_dir / "metrics.jsonl") or {}
        validation = last_row(run_dir / "validation.jsonl", validation_row)
        validation_text = ""
        if validation:
            validation_text = f"{validation['pass_rate']:.3f} at step {validation['step']}"
        return RunRow(
            name=name,
            address=address,
            state=_state(run_dir, bool(validation)),
            step=one_line(str(metrics.get("step", ""))),
            validation=validation_text,
        )
    except (ValueError, OSError) as error:
        problem = one_line(str(error).replace(f"{run_dir}/", ""))
        return RunRow(name=name, address=address, problem=problem)


def _state(run_dir: Path, validated: bool) -> str:
    """State of the run, from end.json, attempts.jsonl and the age of the ledger."""
    ends = [row for row in [last_row(run_dir / "end.json")] if row]
    attempts = [row for row in [last_row(run_dir / "attempts.jsonl")] if row]
    reason = ending(ends, attempts)
    if reason is not None:
        return f"finished: {reason}"
    ledger = run_dir / "ledger.jsonl"
    # abs: a file server whose clock is ahead of this host's clock makes the age negative
    if ledger.exists() and abs(time.time() - os.stat(ledger).st_mtime) < QUIET_S:
        return "running"
    if attempts or validated or last_row(ledger):
        return "stopped"
    return "not started"
