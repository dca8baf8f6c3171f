"""Child processes of a run: started in a group of their own, watched, stopped whole."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

LOG_LINES = 12


class ProcessDied(RuntimeError):
    """A process of the run ended by itself; the text ends with the last lines of its log."""


class ChildProcess:
    """One process with a log file."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    async def start(cls, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> "ChildProcess":
        """Start `argv` with `env` over this process's environment."""
        with open(log, "ab") as output:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env={**os.environ, **env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self._process.pid

    async def died(self) -> ProcessDied:
        """Wait until the process has ended and say how."""
        code = await self._process.wait()
        return ProcessDied(f"{self.name} ended with exit code {code}; {self.log}:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(encoding="utf8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    async def stop(self, grace_s: float = 10.0) -> None:
        """Ask the whole group to end, and end it."""
        for sig in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, sig)
            except ProcessLookupError:
                return
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                continue
