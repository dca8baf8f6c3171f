"""Runs the runs of a study one after another, each by `megatron-scalerl train` in a process of its own.

The process ends with this one, however that exits (`processes.parent_death`). A run that fails is named with its log,
and the next one starts. SIGINT and SIGTERM end the run under way, which goes on from its newest checkpoint when the
study is started again; SIGUSR1 asks it to save first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.commands.study.folder import PlannedRun, StudyFolder
from megatron_scalerl.commands.study.warm_start import WarmStart, finish, prepare
from megatron_scalerl.processes.child_process import ChildProcess, log_tail
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.processes.signals import IN_USE_CODE, SAVE_SIGNAL, SAVED_CODE, Stopped

PROGRAM = (sys.executable, "-m")
"""What runs a module of this package."""
GRACE_S = 90.0
"""For a run to end after SIGTERM (seconds)."""


class Runner:
    """One process after another, with what is printed about them."""

    def __init__(self, study: StudyFolder, console: Console, *, verbose: bool) -> None:
        self._study, self._console = study, console
        self._options = ["--verbose"] if verbose else []
        self._child: ChildProcess | None = None
        self._saving = False

    async def warm_start(self, made: WarmStart) -> None:
        """Make what is missing. Raises RuntimeError, naming the log, if a program fails."""
        for step in made.missing:
            log = self._study.path / "logs" / f"warm_start_{step.name}.log"
            self._say(f"warm start: {step.name}, in {made.folder}; log: {log}")
            begin = time.monotonic()
            prepare(step)
            code = await self._run(f"warm start: {step.name}", [*PROGRAM, *step.argv], log)
            if code != 0:
                raise RuntimeError(f"warm start: {step.name} {_ended(code)}: {_last_line(log)}; log: {log}")
            finish(step)
            self._say(f"warm start: {step.name} made in {in_words(time.monotonic() - begin)}")

    async def runs(self, runs: Sequence[PlannedRun], after: Callable[[], None]) -> list[PlannedRun]:
        """Run all that are not finished, in their order; returns those that failed. after: called when one has ended.

        Raises Stopped after SIGUSR1.
        """
        finished, failed = self._study.finished(), []
        left = [run for run in runs if run.name not in finished]
        self._say(f"{len(runs)} runs, {len(runs) - len(left)} of them finished: {self._study.path}")
        while left:
            run = left.pop(0)
            code = await self._one(run)
            if code == SAVED_CODE or (self._saving and code != 0):
                raise Stopped(SAVE_SIGNAL)
            if code != 0:
                failed.append(run)
            after()
            self._say(f"{len(runs) - len(left)} of {len(runs)} runs have ended")
            if self._saving:
                raise Stopped(SAVE_SIGNAL)
        return failed

    @contextlib.asynccontextmanager
    async def handling_save_signal(self) -> AsyncIterator[None]:
        """A block in which SIGUSR1 goes to the run under way."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(SAVE_SIGNAL, self._save)
        try:
            yield
        finally:
            loop.remove_signal_handler(SAVE_SIGNAL)

    def _save(self) -> None:
        self._saving = True
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, SAVE_SIGNAL)

    async def _one(self, run: PlannedRun) -> int:
        made = steps_made(run)
        fresh = not (run.folder / "recipe.yaml").exists()
        self._say(f"{run.name}: " + ("starts" if fresh else f"goes on, {made} of {run.recipe.steps} steps recorded"))
        begin = time.monotonic()
        argv = [*PROGRAM, "megatron_scalerl", "train", *self._options, str(run.file)]
        code = await self._run(run.name, argv, run.log)
        seconds = time.monotonic() - begin
        self._study.ended(run, code=code, seconds=seconds)
        if code == 0:
            self._say(f"{run.name}: finished in {in_words(seconds)}")
        elif code != SAVED_CODE:
            self._say(f"{run.name}: {_ended(code)} after {in_words(seconds)}: {_last_line(run.log)}; log: {run.log}")
        return code

    async def _run(self, name: str, argv: Sequence[str], log: Path) -> int:
        """Exit code of a program, negative for a signal. It is stopped when this is cancelled."""
        self._child = child = await ChildProcess.start(name, argv, os.environ, log)
        try:
            return await child.wait()
        finally:
            self._child = None
            await child.stop(GRACE_S)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)


def in_words(seconds: float) -> str:
    """0:12:05."""
    return str(timedelta(seconds=round(seconds)))


def steps_made(run: PlannedRun) -> int:
    """Optimizer steps that the run's metrics have."""
    rows = read_jsonl(run.folder / "metrics.jsonl")
    return max((int(row.get("step", 0)) for row in rows), default=0)


def _ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return "was in use by another controller" if code == IN_USE_CODE else f"failed with exit code {code}"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in printable(log_tail(log)).splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
