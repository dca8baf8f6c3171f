"""Since when a Slurm job holds its devices without a charge in the ledger.

The job's script sets the variable to its start, and `train --supervise` to the end of the program that it starts
again. It is in seconds since the host's boot (/proc/uptime), which no change of the time of day moves.
"""

from __future__ import annotations

import os
import time

HELD_SINCE = "MSRL_HELD_SINCE"


def held_uncharged() -> float:
    """Seconds for which this job has held its devices uncharged; 0 outside of a job."""
    try:
        since = float(os.environ.get(HELD_SINCE, "inf"))
    except ValueError:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since)


def held_from_now() -> dict[str, str]:
    """The variable for a program that is started after another one of this job has charged; none outside of a job."""
    if HELD_SINCE not in os.environ:
        return {}
    return {HELD_SINCE: f"{time.clock_gettime(time.CLOCK_BOOTTIME):.3f}"}
