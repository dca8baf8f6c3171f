"""Child processes of a run: started in a group of their own, watched, stopped whole.

A child dies with the controller, whatever ends that (`processes.child`); its own children are in its group, which
`stop` ends as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from megatron_scalerl.processes import child

LOG_LINES = 15
_TAIL_BYTES = 20_000

_started: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


class ProcessDied(RuntimeError):
    """A process of the run ended by itself; the text ends with the last lines of its log."""


class ChildProcess:
    """One process with a log file that only its owner may read."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process
        _started.add(self)

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, *, pass_fds: Sequence[int] = ()
    ) -> ChildProcess:
        """Start `argv`.

        env: its whole environment. log: where its output is appended. pass_fds: descriptors it inherits. Call it
        from a thread that lives as long as this process, best the main one: the child dies with the thread.
        """
        with open_log(log) as output:
            process = await asyncio.create_subprocess_exec(
                *child.command(list(argv)),
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """False once the end of the process was noticed."""
        return self._process.returncode is None

    async def ended(self) -> int:
        """Wait until the process has ended; its exit code, negative for a signal."""
        return await self._process.wait()

    async def died(self) -> ProcessDied:
        """Wait until the process has ended and say how."""
        code = await self.ended()
        return ProcessDied(f"{self.name} ended with exit code {code}; {self.log}:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of the log, nothing if it is gone."""
        if not self.log.exists():
            return ""
        with open(self.log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-LOG_LINES:])

    async def stop(self, grace_s: float = 10.0) -> None:
        """Ask the whole group to end, and after `grace_s` seconds end it; may be called twice.

        Raises RuntimeError if the process still runs after SIGKILL. Cancelling it ends the group at once.
        """
        try:
            for sig in (signal.SIGTERM, signal.SIGKILL):
                if not self._signal(sig):
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), grace_s)
        except asyncio.CancelledError:
            self.kill()
            raise
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            raise RuntimeError(f"{self.name} (process {self.pid}) still runs after SIGKILL") from None

    def kill(self) -> None:
        """Send SIGKILL to the whole group; does not wait."""
        self._signal(signal.SIGKILL)

    def _signal(self, sig: int) -> bool:
        """False if nothing is left of the group."""
        try:
            os.killpg(self.pid, sig)
        except ProcessLookupError:
            return False
        return True


def kill_all() -> None:
    """Send SIGKILL to the group of every child of this process that has not ended; does not wait."""
    for process in list(_started):
        if process.running:
            process.kill()


def open_log(path: Path) -> BinaryIO:
    """The log file for appending (binary), readable by its owner alone: a traceback may hold prompts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)  # one of an earlier start
    return os.fdopen(fd, "ab")
