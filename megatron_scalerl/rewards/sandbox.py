"""Runs programs in a sandbox, from the process of a verifier.

    process started -> "unshared" received -> id maps written -> request sent -> "ready" received
        -> a result for each run received -> closed

Each `Sandbox` is a set of processes with separate user, process, network, mount, IPC and UTS namespaces
(`sandbox_init`). The file system has nothing of the host but the Python interpreter (`sandbox_root`). A filter allows
only the system calls of a list (`sandbox_seccomp`), and limits bound processor time, memory, files and threads. The
verifier compares the programs' output outside of the sandbox. Closing a sandbox ends all of the sandbox's processes.

A sandbox that cannot be made is an error (`SandboxError`): no program runs without a sandbox.
"""

from __future__ import annotations

import marshal
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalerl.rewards.limits import Limits, TimeLimitExceeded, VerifierUnavailable
from megatron_scalerl.rewards.sandbox_guest import PASSED

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
UNPRIVILEGED = 65534
"""User id under which programs run in a sandbox that root has started."""
END_TIMEOUT_S = 10.0
"""Time limit for the processes of a closed sandbox to end (s)."""


class SandboxError(VerifierUnavailable):
    """A sandbox could not be made; the message is one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of a program's run."""

    code: int
    """Exit status; negative: the signal that ended the run, which is SIGKILL if the output exceeded the limit."""
    output: bytes
    """Standard output, cut off beyond the limit; for a run of tests, `PASSED` if all tests passed, else empty."""
    cpu_left_s: float
    """The run's limit of processor time minus the used time (s); negative if the run exceeded the limit."""


class Sandbox:
    """A sandbox for the runs of one request, one after another. Leaving the `with` block closes the sandbox."""

    def __init__(self, limits: Limits, *, deadline: float | None = None):
        """Raises SandboxError if the sandbox cannot be made.

        deadline: value of time.monotonic() (s) until which the sandbox waits for results; None: no deadline.
        """
        assert limits.memory_mb is not None
        self._limits = limits
        self._deadline = deadline
        self._buffer = b""
        command = [sys.executable, "-S", "-m", "megatron_scalerl.rewards.sandbox_init", str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PYTHONPATH": PACKAGE_ROOT},
                bufsize=0,
            )
        except OSError as error:
            raise SandboxError(f"the process of a sandbox cannot be started: {error}") from None
        try:
            self._expect("unshared")
            self._map_ids()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the sandbox and wait until all are gone."""
        pipes = (self._process.stdin, self._process.stdout)
        for pipe in pipes:
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(self, program: str, inputs: Sequence[str], output_bytes: Sequence[int]) -> Iterator[Result]:
        """Run the program once for each standard input; yields each result as the run ends.

        output_bytes: the limit of each run's standard output. Raises SandboxError if the sandbox cannot be built or
        the program cannot be started.
        """
        self._request(program, tests=None, entry_point="", inputs=list(inputs), output_bytes=list(output_bytes))
        for _ in inputs:
            result = self._result()
            if result is None:
                return
            yield result

    def run_tests(self, program: str, tests: str, entry_point: str = "") -> bool:
        """True if the program passes the tests. Program and tests run in separate processes (`sandbox_guest`).

        entry_point: the function that the tests' `check` is called with. Raises SandboxError if the sandbox cannot be
        built.
        """
        self._request(program, tests=tests, entry_point=entry_point, inputs=[], output_bytes=[])
        result = self._result()
        if result is not None and result.cpu_left_s < 0:
            raise TimeLimitExceeded
        return result is not None and result.output == PASSED

    def _request(self, program: str, **run_settings: Any) -> None:
        executable = os.path.realpath(sys.executable)
        request = {
            "program": program,
            "executable": executable,
            "libraries": [f"{sys.base_prefix}/{name}" for name in ("lib", "lib64")],
            "cpu_s": self._limits.cpu_s,
            "memory_mb": self._limits.memory_mb,
            "file_mb": self._limits.file_mb,
            "uid": UNPRIVILEGED if os.geteuid() == 0 else None,
            **run_settings,
        }
        unsent = marshal.dumps(request)  # not JSON: in the sandbox's process the import of json takes time
        assert self._process.stdin is not None
        try:
            while unsent:
                unsent = unsent[self._process.stdin.write(unsent) or 0 :]
        except BrokenPipeError:
            raise SandboxError("the sandbox's process ended before the program was sent") from None
        self._expect("ready")

    def _map_ids(self) -> None:
        """Map this user's and group's ids into the sandbox's user namespace; for root, also the id UNPRIVILEGED."""
        user = os.geteuid()
        group = os.getegid()
        folder = Path(f"/proc/{self._process.pid}")
        extra = f"{UNPRIVILEGED} {UNPRIVILEGED} 1\n"
        try:
            if user:
                extra = ""
                # The kernel lets an unprivileged user write gid_map only after "deny" in setgroups.
                (folder / "setgroups").write_text("deny")
            (folder / "uid_map").write_text(f"{user} {user} 1\n{extra}")
            (folder / "gid_map").write_text(f"{group} {group} 1\n{extra}")
        except OSError as error:
            raise SandboxError(f"user {user} cannot map user ids into the sandbox: {error.strerror}") from None

    def _expect(self, word: str) -> None:
        words = self._line()
        if words != [word]:
            reason = " ".join(words[1:]) or "its process has ended"
            raise SandboxError(f"a sandbox (user namespaces of Linux) cannot be made: {reason}")

    def _result(self) -> Result | None:
        """The result of the next run; None if the program has ended the sandbox's processes.

        Raises SandboxError for a program that could not be started.
        """
        line = self._line()
        if not line:
            return None
        if line[0] == "failed":
            raise SandboxError(f"a program cannot be started in its sandbox: {' '.join(line[1:])}")
        _, code, cpu_left_s, size = line
        while len(self._buffer) < int(size):
            if not self._read():
                return None
        output = self._buffer[: int(size)]
        self._buffer = self._buffer[int(size) :]
        return Result(code=int(code), output=output, cpu_left_s=float(cpu_left_s))

    def _line(self) -> list[str]:
        """The words of the next line from the sandbox; an empty list if the sandbox's output has ended."""
        while b"\n" not in self._buffer:
            if not self._read():
                return []
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode().split()

    def _read(self) -> bool:
        """Read more of the sandbox's output into the buffer; returns False if the output has ended.

        Raises SandboxError if no output comes before the deadline.
        """
        assert self._process.stdout is not None
        remaining_s = None
        if self._deadline is not None:
            remaining_s = max(0.0, self._deadline - time.monotonic())
        if not select.select([self._process.stdout], [], [], remaining_s)[0]:
            raise SandboxError("a sandbox has not answered before the check's deadline")
        part = self._process.stdout.read(1 << 20) or b""
        self._buffer += part
        return bool(part)
