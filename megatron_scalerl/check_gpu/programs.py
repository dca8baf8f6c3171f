"""Runs the programs that a part needs, each with a log and a time limit, and reads their logs.

Every program is a `ChildProcess`: it leads a process group of its own, which is killed as a whole at the end, only
its owner can read its log, and it dies with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.processes.child_process import ChildProcess

GRACE_S = 4.0
"""Between SIGTERM and SIGKILL."""
_KILLED_S = 30.0
"""After SIGKILL."""
CAPTURED = "captured"
"""The fact `cuda_graphs` starts with this word if CUDA graphs were captured."""
_LEVEL = "(?:ERROR|WARNING|INFO|DEBUG)"
_PREFIX = re.compile(
    rf"^\s*(?:\([^)]*pid=\d+\)\s*)?(?:[\d-]+ [\d:,]+ {_LEVEL} +\S+ [\w.]+: |{_LEVEL} [\d-]+ [\d:.]+ \[[^\]]*\]\s*)?"
)
"""vLLM's name of the process, then the format of `processes.logs`, or vLLM's own before logging is configured."""
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Died|Interrupt|OutOfMemory\w*)\b: \S|megatron-scalerl: )")
_UNINFORMATIVE = ("Engine core initialization failed", "engine_core.py", "KeyboardInterrupt")
_BACKEND = re.compile(r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+) (?:attention backend\b|backend\.)")
"""vLLM logs the first form for a backend that it selected, the second for one that an option selected."""
_GRAPHS = re.compile(r"Graph capturing finished in (\d+) secs, took (-?[\d.]+) GiB")
_EAGER = re.compile(r"enforce_eager=(True|False)")


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """How a program ended. Produced by `run_command`."""

    seconds: float
    """The time limit if it was reached."""
    code: int | None
    """Exit code, negative for a signal; None if it was stopped at its time limit."""
    output: str
    """Standard output and standard error."""
    survived: str = ""
    """Error from a process that outlived SIGKILL, "" otherwise."""

    def failure(self, explain: Callable[[str], str] | None = None) -> str:
        """Why the program failed, in one line; "" for exit code 0. explain: of the log; `cause` by default."""
        if self.code is None:
            return f"stopped at its time limit after {self.seconds:.0f} s; last log line: {last_line(self.output)}"
        return f"exit code {self.code}: {(explain or cause)(self.output)}" if self.code else ""


async def run_command(
    argv: Sequence[str], log: Path, *, limit_s: float, env: Mapping[str, str] | None = None, grace_s: float = GRACE_S
) -> CommandResult:
    """Run `argv` with its output in `log`, which is replaced; everything it started is stopped on return.

    env: the whole environment; this process's by default. grace_s: seconds between SIGTERM and SIGKILL.
    """
    log.unlink(missing_ok=True)
    begin = time.monotonic()
    process = await ChildProcess.start(log.stem, argv, os.environ if env is None else env, log)
    code: int | None = None
    seconds, survived = 0.0, ""
    try:
        with contextlib.suppress(TimeoutError):
            code = await asyncio.wait_for(process.wait(), max(0.0, limit_s))
        seconds = limit_s if code is None else time.monotonic() - begin
    finally:
        survived = await stop(process, grace_s)
    return CommandResult(seconds=seconds, code=code, output=read_log(log), survived=survived)


async def stop(process: ChildProcess, grace_s: float) -> str:
    """Stop the process's whole group; returns the error if it could not be stopped, "" otherwise.

    A process that releases the memory of a whole GPU, or hangs in the driver, outlives SIGKILL for a while.
    """
    problem = ""
    for grace in (grace_s, _KILLED_S):
        try:
            await process.stop(grace)
            return ""
        except RuntimeError as error:
            problem = str(error)
    return problem


def read_log(path: Path) -> str:
    """The text of a log; "" if the file does not exist."""
    return path.read_text(encoding="utf8", errors="replace") if path.exists() else ""


def cause(text: str) -> str:
    """The log line that explains why a process ended: the last error, otherwise the last line."""
    return last_error(text) or last_line(text)


def last_line(text: str) -> str:
    """The last nonempty line of a log without vLLM's prefix, at most 300 characters."""
    return next((line[:300] for line in _reversed_lines(text) if line), "empty log")


def last_error(text: str) -> str:
    """The last line of a log that reports a specific error; "" if there is none."""
    errors = (line for line in _reversed_lines(text) if _ERROR.match(line))
    return next((line for line in errors if not any(word in line for word in _UNINFORMATIVE)), "")


def _reversed_lines(text: str) -> list[str]:
    return [_PREFIX.sub("", line).strip() for line in reversed(text.splitlines())]


def serving_facts(text: str) -> dict[str, str]:
    """Attention backend and CUDA graphs from vLLM's log; "not found in its log" if it does not report them."""
    unknown = "not found in its log"
    backend, graphs, eager = _BACKEND.search(text), _GRAPHS.search(text), _EAGER.search(text)
    state = unknown if eager is None else "off (eager)" if eager[1] == "True" else "on, no capture in its log"
    if graphs is not None:
        state = f"{CAPTURED} in {graphs[1]} s, {graphs[2]} GiB"
    return {"attention_backend": unknown if backend is None else backend[1], "cuda_graphs": state}
