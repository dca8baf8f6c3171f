"""One verifier process as the pool sees it: start, send checks, read verdicts under a time limit, kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_scalerl.rewards.worker import FRAME

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


class WorkerDied(Exception):
    """The verifier process ended while it was needed."""


class WorkerProcess:
    """A verifier process and its two pipes; `start` may be called again after `kill`."""

    def __init__(self, verifier: str, start_timeout_s: float) -> None:
        self._verifier = verifier
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None

    @property
    def alive(self) -> bool:
        """False before `start`, after `kill`, and once the end of the process was noticed."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process and wait until its verifier is loaded. Raises ValueError if that fails."""
        path = os.pathsep.join(filter(None, (PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
        # A session of its own: what the verifier starts dies with it, and Ctrl-C is the controller's affair.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "megatron_scalerl.rewards.worker", str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )  # fmt: skip
        try:
            await self._send({"verifier": self._verifier, "sys_path": sys.path})
            hello = await self.reply(self._start_timeout_s)
        except (TimeoutError, WorkerDied) as problem:
            await self.kill()
            found = "nothing" if isinstance(problem, TimeoutError) else "the end of its process"
            expected = f"expected its process to be ready within {self._start_timeout_s:g} s"
            raise ValueError(f"rewards.verifier {self._verifier!r}: {expected}, found {found}") from None
        if "error" in hello:
            await self.kill()
            raise ValueError(hello["error"])

    async def send_checks(self, checks: Sequence[bytes], timeout_s: float) -> None:
        """Hand over pickled checks; one `reply` comes for each. Raises TimeoutError and WorkerDied."""
        async with asyncio.timeout(timeout_s):
            await self._send(list(checks))

    async def reply(self, timeout_s: float) -> dict[str, Any]:
        """The next line of the process. Raises TimeoutError after timeout_s seconds, and WorkerDied."""
        assert self._process is not None and self._process.stdout is not None
        replies = self._process.stdout
        try:
            async with asyncio.timeout(timeout_s):
                line = await replies.readline()
        except TimeoutError:
            # Only the event loop may have been late: a reply that lies there already was in time.
            async with asyncio.timeout(0):
                line = await replies.readline()
        if not line.endswith(b"\n"):
            raise WorkerDied
        try:
            return json.loads(line)
        except ValueError:  # the verifier wrote into our pipe: this process cannot be trusted any more
            raise WorkerDied from None

    async def kill(self) -> None:
        """End the process and everything that it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None

    async def _send(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        body = pickle.dumps(message)
        try:
            self._process.stdin.write(FRAME.pack(len(body)) + body)
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError):
            raise WorkerDied from None
