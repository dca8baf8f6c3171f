"""Waiting for what processes of a part write, and for their end."""

import asyncio
import time
from pathlib import Path

from megatron_scalerl.check_gpu import programs


def gone(pid):
    """True once the process has ended, a zombie included."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def limits_count_from(monkeypatch, log, text):
    """Time limits of programs begin when the log has this text: how long a start takes is the machine's affair."""
    start = programs.ChildProcess.start

    async def started(*arguments, **options):
        process = await start(*arguments, **options)
        async with asyncio.timeout(60):
            while text not in programs.read_log(log):
                await asyncio.sleep(0.05)
        return process

    monkeypatch.setattr(programs.ChildProcess, "start", started)
