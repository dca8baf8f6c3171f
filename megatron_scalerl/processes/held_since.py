"""Since when a Slurm job holds its devices without a charge in the ledger.

The job's script sets the variable to its start, and `train --supervise` to the end of the program that it starts
again, if that one has charged anything. It is in seconds of /proc/uptime, which no change of the time of day moves.
"""

from __future__ import annotations

import os
from pathlib import Path

HELD_SINCE = "MSRL_HELD_SINCE"


def held_uncharged() -> float:
    """Seconds for which this job has held its devices uncharged; 0 outside of a job."""
    try:
        since = float(os.environ.get(HELD_SINCE, "inf"))
    except ValueError:
        return 0.0
    return max(0.0, _uptime() - since)


def held_from_now() -> dict[str, str]:
    """The variable for a program that is started after another one of this job has charged; none outside of a job."""
    if HELD_SINCE not in os.environ:
        return {}
    return {HELD_SINCE: f"{_uptime():.2f}"}


def _uptime() -> float:
    """Read where the job's script reads it: a container may have a /proc/uptime of its own, and no clock like it."""
    return float(Path("/proc/uptime").read_text("ascii").split()[0])
