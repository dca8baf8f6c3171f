"""Starts one trainer rank as a child process. Free of torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_scalerl.processes.child_process import ChildProcess


async def start_rank(env: Mapping[str, str], *, rank: int, local_rank: int, threads: int, log: Path) -> ChildProcess:
    """Start a rank on this host, which joins the trainer that `env` names.

    env: what `trainer.worker` reads but for the two numbers, and MSRL_RECIPE; it takes precedence over this
    process's environment. local_rank: its number on this host. threads: trainer.threads. log: its output.
    """
    numbers = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "OMP_NUM_THREADS": str(threads),
        # Megatron-Core warns at every import that Transformer Engine and apex are not installed
        "PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning",
    }
    argv = [sys.executable, "-m", "megatron_scalerl.trainer.worker"]
    return await ChildProcess.start(f"trainer-{rank}", argv, {**os.environ, **env, **numbers}, log)
