"""How long a study will take: from its finished runs, or from the first steps of the run under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from megatron_scalerl.checkpoints.commit import latest
from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.commands.study.folder import PlannedRun, StudyFolder

LEAST_STEPS, LEAST_SHARE = 5, 0.05
"""Steps after the first one from which a run's own speed is extrapolated: at least so many, and this share of all."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The time that one run takes, from its own steps."""

    startup_s: float
    """Until the first step was made (seconds)."""
    step_s: float
    """A step, validations included (seconds)."""
    steps: int
    """Steps that this was measured on."""

    def seconds(self, steps: int) -> float:
        """Of a run of so many steps."""
        return self.startup_s + self.step_s * (steps - 1)


class PaceMeter:
    """Measures the pace of the run under way; it is asked now and then."""

    def __init__(self, run: PlannedRun, started: float) -> None:
        """started: time.monotonic() at the start of its process."""
        self._run, self._started = run, started
        self._first: tuple[float, int] | None = None
        self._before = steps_made(run)

    def look(self, now: float) -> Pace | None:
        """The pace, once enough steps are made; None before, and for a run that was resumed."""
        made = steps_made(self._run)
        if self._before or made == 0:
            return None
        if self._first is None:
            self._first = (now, made)
        since, first = self._first
        enough = max(LEAST_STEPS, LEAST_SHARE * self._run.recipe.steps)
        if made - first < enough:
            return None
        step_s = (now - since) / (made - first)
        startup = since - self._started - step_s * (first - 1)
        return Pace(startup_s=max(startup, 0.0), step_s=step_s, steps=made - first)


def steps_made(run: PlannedRun) -> int:
    """Optimizer steps that the run's metrics have."""
    rows = read_jsonl(run.folder / "metrics.jsonl")
    return max((int(row.get("step", 0)) for row in rows), default=0)


def seconds_left(study: StudyFolder, runs: Sequence[PlannedRun], pace: Pace | None = None) -> float | None:
    """Seconds that `runs` still take; None if nothing is known.

    A run takes as long as finished runs of its recipe, else as all finished ones, in proportion to its steps; without
    any, `pace`. Of a run that was begun, what is left after its newest checkpoint counts.
    """
    times = study.times()
    total = 0.0
    for run in runs:
        steps = run.recipe.steps
        own = [seconds / made * steps for arm, made, seconds in times if arm == run.arm]
        found = own or [seconds / made * steps for _, made, seconds in times]
        if not found and pace is None:
            return None
        whole = fmean(found) if found else pace.seconds(steps) if pace is not None else 0.0
        total += whole * (1.0 - min(_saved(run.folder), steps) / steps)
    return total


def _saved(folder: Path) -> int:
    """Step of a run's newest checkpoint; 0 without one."""
    newest = latest(folder / "checkpoints")
    return 0 if newest is None else int(newest.name.rpartition("_")[2])


def in_words(seconds: float) -> str:
    """35 s, 12:05 min, 3 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
