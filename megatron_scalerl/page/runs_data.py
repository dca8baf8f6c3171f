"""What the list of runs shows: a row and a curve of each run below a folder, and where their recipes differ.

Every row has the number of the change that it last had, so that a page asks for what is new only.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_scalerl.fit.arms import is_apart
from megatron_scalerl.fit.outlook import RunFit
from megatron_scalerl.page.find_runs import FoundRuns, find_runs
from megatron_scalerl.page.run_summary import RunSummary
from megatron_scalerl.processes.logs import printable

PATH_POINTS = 32
"""Points of a forecast's path, at equal ratios of compute."""
SEARCH_S = 2.0
"""Least seconds between two searches for new runs; of a search that is slow, twenty times what it took."""


class RunsData:
    """The runs below a folder. Not for several threads at a time."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ValueError for a folder without a run, OSError for one that cannot be read."""
        self.folder = Path(folder)
        self.runs: dict[int, RunSummary] = {}
        """By a number that a run keeps as long as this lives."""
        self._numbers: dict[Path, int] = {}
        self._present: list[int] = []
        self._found: FoundRuns | None = None
        self._search_at = -1.0
        self._version = 0
        self._changed: dict[int, int] = {}
        self._recipes: dict[str, Any] = {}
        self._recipes_changed = 0
        self._horizons: dict[str, float] = {}
        self._drawn: dict[int, tuple[RunFit, float, dict[str, Any]]] = {}
        self._search()
        if not self.runs:
            raise ValueError(f"{self.folder}: expected a run (recipe.yaml) or a folder of runs, found neither")

    def update(self) -> bool:
        """Read what is new; True if anything is."""
        self._version += 1
        before = self._present
        self._search()
        changed = {number for number in self._present if self.runs[number].update()}
        if changed or before != self._present:
            self._compare_recipes()
            changed |= self._new_horizons()
        self._changed.update(dict.fromkeys(changed, self._version))
        return bool(changed) or before != self._present

    def next_without_fit(self) -> int | None:
        """A run with validations that are not in its fit; None if there is none."""
        return next((number for number in self._present if self.runs[number].needs_fit()), None)

    def add_fit(self, number: int, rows: int, fit: RunFit | None, problem: str) -> None:
        """Keep what `RunSummary.made_fit` of this run returned."""
        self._version += 1
        self.runs[number].add_fit(rows, fit, problem)
        self._changed.update(dict.fromkeys({number} | self._new_horizons(), self._version))

    def payload(self, since: int = 0) -> dict[str, Any]:
        """What the page draws. since: `version` of an earlier payload; rows that have not changed are left out."""
        found = self._found
        return {
            "version": self._version,
            "since": since,
            "folder": printable(str(self.folder)),
            "order": self._present,
            "runs": {str(n): self._row(n) for n in self._present if self._changed.get(n, 0) > since},
            "others": [[printable(path.name), printable(text)] for path, text in found.others] if found else [],
            "left_out": found.left_out if found else "",
            "recipes": self._recipes if self._recipes_changed > since else None,
            "waiting": sum(self.runs[number].needs_fit() for number in self._present),
        }

    def _search(self) -> None:
        """Look for runs that have come or gone."""
        began = time.monotonic()
        if began < self._search_at:
            return
        self._found = find_runs(self.folder)
        self._search_at = began + max(SEARCH_S, 20.0 * (time.monotonic() - began))
        for path in self._found.runs:
            if path not in self._numbers:
                number = self._numbers[path] = len(self._numbers)
                self.runs[number] = RunSummary(path, str(path.relative_to(self.folder)))
        self._present = [self._numbers[path] for path in self._found.runs]

    def _row(self, number: int) -> dict[str, Any]:
        run = self.runs[number]
        return run.row() | {"fit": self._fit_row(number, run), "pending": run.needs_fit()}

    def _fit_row(self, number: int, run: RunSummary) -> dict[str, Any] | None:
        if run.fit is None:
            return None
        horizon = self._horizons.get(run.unit, run.fit.end_compute)
        drawn = self._drawn.get(number)
        if drawn is None or drawn[0] is not run.fit or drawn[1] != horizon:
            self._drawn[number] = drawn = run.fit, horizon, _drawn(run.fit, horizon)
        return drawn[2]

    def _new_horizons(self) -> set[int]:
        """How far forecasts are drawn, by unit: a power of two, so that it seldom changes. Runs that it changes."""
        ends: dict[str, float] = {}
        for run in (self.runs[number] for number in self._present):
            if run.fit:
                ends[run.unit] = max(ends.get(run.unit, 0.0), run.fit.end_compute)
        horizons = {unit: float(2.0 ** np.ceil(np.log2(end))) for unit, end in ends.items()}
        moved = {unit for unit in horizons if horizons[unit] != self._horizons.get(unit)}
        self._horizons = horizons
        return {n for n in self._present if self.runs[n].fit and self.runs[n].unit in moved}

    def _compare_recipes(self) -> None:
        """The keys in which recipes differ, and their values."""
        known = {number: self.runs[number].settings for number in self._present if self.runs[number].settings}
        keys = sorted({key for settings in known.values() for key in settings})
        differing = [key for key in keys if len({settings.get(key) for settings in known.values()}) > 1]
        recipes = {
            "keys": [[printable(key)[:120], is_apart(key)] for key in differing],
            "values": {str(n): [settings.get(key) for key in differing] for n, settings in known.items()},
        }
        if recipes != self._recipes:
            self._recipes, self._recipes_changed = recipes, self._version


def _drawn(fit: RunFit, horizon: float) -> dict[str, Any]:
    """A fit as the page draws it: ceiling with interval, and the forecast from the last validation to `horizon`."""
    low, high = fit.result.intervals["asymptote"]
    at = np.unique([*np.geomspace(fit.last_compute, horizon, PATH_POINTS), fit.end_compute])
    path = fit.result.predict(at)
    return {
        "ceiling": [round(value, 4) for value in (fit.result.asymptote, low, high)],
        "end": float(f"{fit.end_compute:.6g}"),
        "hours_per_step": fit.last_compute / max(1, fit.last_step),
        "forecast": fit.outlook.line() if fit.outlook else "",
        "path": [[float(f"{p.compute:.6g}"), *(round(v, 4) for v in (p.pass_rate, p.lo, p.hi))] for p in path],
    }
