"""The data of the list of runs: a row and a curve of each run below a folder, and the keys in which recipes differ.

A run's state, newest validation, fit and hours are read without its completions. A run that is damaged or incomplete
is a row with a line about the damage. Every row has the number of its last change, so that a page asks for new rows
only.

The life of a row: `RunsData` finds the run, `RunSummary.update` reads its files, `made_fit` fits its curve in a
thread, and `payload` sends it until the page has it; a run that is gone leaves the order of the rows.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_scalerl.fit.arms import is_apart
from megatron_scalerl.fit.formatting import unit_name
from megatron_scalerl.fit.inputs import flattened
from megatron_scalerl.fit.outlook import RunFit, run_fit
from megatron_scalerl.page.find_runs import FoundRuns, find_runs
from megatron_scalerl.page.growing_file import MOST_TEXT, Rows, end_row, ending, json_row, one_line, validation_row
from megatron_scalerl.page.report import last_step
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.recipe.file import read_run_recipe

PATH_POINTS = 32
"""Points of a forecast's path, at equal ratios of compute."""
SEARCH_S = 2.0
"""Least seconds between two searches for new runs; after a slow search, twenty times its duration."""
QUIET_S = 60.0
"""Seconds without a write to the ledger, which gets a heartbeat every 10 s, after which a run counts as stopped."""


class RunSummary:
    """The row of one run. Not safe for several threads."""

    def __init__(self, run_dir: Path, name: str):
        self.run_dir = run_dir
        self.name = printable(name)
        self.recipe: dict[str, Any] = {}
        """`recipe.file.read_run_recipe`; empty if it cannot be read."""
        self.settings: dict[str, str] = {}
        """Key path -> value as text, empty if the recipe cannot be read."""
        self.fit: RunFit | None = None
        self.fitted_rows = -1
        """Number of `rows` that the newest attempt to fit had; -1 before it."""
        self.problems: dict[str, str] = {}
        """File -> its damage, in one line."""
        self._validation = Rows(run_dir / "validation.jsonl", validation_row)
        self._attempts = Rows(run_dir / "attempts.jsonl", json_row)
        self._end = Rows(run_dir / "end.json", json_row)
        self._files: tuple[Rows[Any], ...] = (self._validation, self._attempts, self._end)
        self._newest: dict[str, dict[str, Any] | None] = {}
        self._signatures: dict[str, tuple[int, ...] | None] = {}
        self._state: tuple[str, str] = ("", "")
        self._unit = "device_hours"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of validation.jsonl with a step, a compute and a pass rate."""
        return self._validation.rows

    @property
    def unit(self) -> str:
        """Display name of the unit of compute."""
        unit = self._unit
        if self.rows:
            unit = self.rows[-1].get("unit") or unit
        return printable(unit_name(str(unit)))[:40]

    def update(self) -> bool:
        """Read the files that changed; True if the row in the list changed."""
        before = (self._state, dict(self.problems))
        changed = [self._reread("recipe.yaml", self._read_recipe), self._reread("metrics.jsonl", self._read_newest)]
        self._reread("ledger.jsonl", self._read_ledger)  # not in `changed`: it has a heartbeat every 10 s
        generation = self._validation.generation
        for rows in self._files:
            changed.append(rows.update())
            self._say(rows.path.name, rows.problem)
        if generation != self._validation.generation:  # as many rows as before may be other rows
            self.fitted_rows = -1
        self._state = self._found_state()
        return any(changed) or before != (self._state, self.problems)

    def needs_fit(self) -> bool:
        """Whether a validation has come since the last fit."""
        return self.fitted_rows != len(self.rows)

    def made_fit(self) -> tuple[int, RunFit | None, str]:
        """(rows fitted, the fit, why there is none): takes a fifth of a second and changes nothing."""
        rows = list(self.rows)
        start = self.recipe["forecast"]["fit_from_steps"] if self.recipe else 0
        try:
            fit = run_fit(rows, steps=self._steps(rows), fit_from_steps=start)
        except (ValueError, ArithmeticError) as error:
            return len(rows), None, str(error)
        return len(rows), fit, ""

    def add_fit(self, rows: int, fit: RunFit | None, problem: str) -> None:
        """Keep the result of `made_fit`."""
        self.fitted_rows = rows
        self.fit = fit
        self._say("forecast", problem)

    def row(self) -> dict[str, Any]:
        """The row of the list: JSON, with `None` for unknown values."""
        last = self.rows[-1] if self.rows else {}
        metrics = self._newest.get("metrics.jsonl") or {}
        totals = (metrics.get("device_hours_total"), last.get("compute_total"))
        # each file lags behind the other at times, and totals only grow: the larger one is newer
        hours = [float(total) for total in totals if total is not None]
        state, reason = self._state
        return {
            "name": self.name,
            "recipe": printable(str(self.recipe.get("name", "")))[:MOST_TEXT],
            "state": state,
            "reason": reason,
            "wrote": self._wrote(),
            "step": metrics.get("step") or last.get("step"),
            "steps": self._steps(self.rows) or None,
            "unit": self.unit,
            "hours": max(hours, default=None),
            "validation": [[row["step"], row["compute"], round(row["pass_rate"], 5)] for row in self.rows],
            "problem": "; ".join(self.problems.values()),
            "opens": bool(self.recipe),
        }

    def _steps(self, rows: list[dict[str, Any]]) -> int:
        return last_step(rows, self.recipe) if rows else self.recipe.get("steps", 0)

    def _found_state(self) -> tuple[str, str]:
        reason = ending(self._end.rows, self._attempts.rows)
        if reason is not None:
            return "finished", reason
        wrote = self._wrote()
        # abs: the clock of a file server may be ahead of this host's
        if wrote is not None and abs(time.time() - wrote) < QUIET_S:
            return "running", ""
        if self._attempts.rows or self.rows or self._newest.get("ledger.jsonl"):
            return "stopped", ""
        return "not started", ""

    def _wrote(self) -> float | None:
        """When the ledger was last written, as Unix time; None without one."""
        status = self._status("ledger.jsonl")
        return status and status.st_mtime

    def _status(self, file: str) -> os.stat_result | None:
        try:
            return os.stat(self.run_dir / file)
        except OSError:
            return None

    def _reread(self, file: str, read: Callable[[str], None]) -> bool:
        """Read a file again if it changed; True if it did."""
        status = self._status(file)
        signature = status and (status.st_ino, status.st_size, status.st_mtime_ns)
        # (): never looked at; None is the signature of a file that is missing
        if self._signatures.get(file, ()) == signature:
            return False
        self._signatures[file] = signature
        problem = ""
        try:
            read(file)
        except (ValueError, OSError) as error:
            self._newest.pop(file, None)
            problem = str(error)
        self._say(file, problem)
        return True

    def _read_newest(self, file: str) -> None:
        self._newest[file] = end_row(self.run_dir / file, -1)

    def _read_ledger(self, file: str) -> None:
        self._read_newest(file)
        self._unit = str((end_row(self.run_dir / file, 0) or {}).get("unit", self._unit))

    def _read_recipe(self, _: str) -> None:
        self.recipe = {}
        self.settings = {}
        self.recipe = read_run_recipe(self.run_dir)
        self.settings = {key: _text(value) for key, value in flattened(self.recipe).items()}

    def _say(self, file: str, problem: str) -> None:
        if problem:
            self.problems[file] = one_line(problem.replace(f"{self.run_dir}/", ""))
        else:
            self.problems.pop(file, None)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    text = str(value)
    if isinstance(value, bool):
        text = text.lower()  # as YAML writes it
    if len(text) > MOST_TEXT:
        text = f"{text[: MOST_TEXT - 1]}…"
    return printable(text)


class RunsData:
    """The runs below a folder. Not safe for several threads."""

    def __init__(self, folder: Path):
        """Raises ValueError for a folder without a run, OSError for one that cannot be read."""
        self.folder = folder
        self.runs: dict[int, RunSummary] = {}
        """Number -> run; a run keeps its number, also while it is gone."""
        self._numbers: dict[Path, int] = {}
        self._present: list[int] = []
        self._found: FoundRuns
        self._search_at = -1.0
        self._version = 0
        self._changed: dict[int, int] = {}
        self._recipes: dict[str, Any] = {}
        self._recipes_changed = 0
        self._horizons: dict[str, float] = {}
        self._drawn: dict[int, tuple[RunFit, float, dict[str, Any]]] = {}
        self._search()
        if not self.runs:
            raise ValueError(f"{self.folder}: it is no run (recipe.yaml), and no run is below it")

    def update(self) -> bool:
        """Read new runs and new rows; True if there are any."""
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
        """Keep the result of `RunSummary.made_fit` of this run."""
        self._version += 1
        self.runs[number].add_fit(rows, fit, problem)
        self._changed.update(dict.fromkeys({number} | self._new_horizons(), self._version))

    def payload(self, since: int = 0) -> dict[str, Any]:
        """The data of the page. since: `version` of an earlier payload; rows that have not changed are left out."""
        recipes = self._recipes if self._recipes_changed > since else None
        return {
            "version": self._version,
            "since": since,
            "folder": printable(str(self.folder)),
            "order": self._present,
            "runs": {str(n): self._row(n) for n in self._present if self._changed.get(n, 0) > since},
            "others": [[printable(path.name), printable(text)] for path, text in self._found.others],
            "left_out": self._found.left_out,
            "recipes": recipes,
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
                number = len(self._numbers)
                self._numbers[path] = number
                self.runs[number] = RunSummary(path, str(path.relative_to(self.folder)))
        self._present = [self._numbers[path] for path in self._found.runs]

    def _row(self, number: int) -> dict[str, Any]:
        run = self.runs[number]
        return run.row() | {"fit": self._fit_row(number, run), "pending": run.needs_fit()}

    def _fit_row(self, number: int, run: RunSummary) -> dict[str, Any] | None:
        if run.fit is None:
            return None
        horizon = self._horizons.get(run.unit, run.fit.end_compute)
        fit, until, row = self._drawn.get(number, (None, 0.0, {}))
        if fit is not run.fit or until != horizon:
            row = _drawn(run.fit, horizon)
            self._drawn[number] = (run.fit, horizon, row)
        return row

    def _new_horizons(self) -> set[int]:
        """Compute until which forecasts are drawn, by unit; returns the runs for which it has changed."""
        ends: dict[str, float] = {}
        for run in (self.runs[number] for number in self._present):
            if run.fit:
                ends[run.unit] = max(ends.get(run.unit, 0.0), run.fit.end_compute)
        # a power of two: a horizon that moves with every validation would send every row again
        horizons = {unit: float(2.0 ** np.ceil(np.log2(end))) for unit, end in ends.items()}
        moved = {unit for unit in horizons if horizons[unit] != self._horizons.get(unit)}
        self._horizons = horizons
        return {n for n in self._present if self.runs[n].fit and self.runs[n].unit in moved}

    def _compare_recipes(self) -> None:
        """Find the keys in which recipes differ, and their values."""
        readable = {number: self.runs[number].settings for number in self._present if self.runs[number].settings}
        keys = sorted({key for settings in readable.values() for key in settings})
        differing = [key for key in keys if len({settings.get(key) for settings in readable.values()}) > 1]
        recipes = {
            "keys": [[printable(key)[:120], is_apart(key)] for key in differing],
            "values": {str(n): [settings.get(key) for key in differing] for n, settings in readable.items()},
        }
        if recipes != self._recipes:
            self._recipes = recipes
            self._recipes_changed = self._version


def _drawn(fit: RunFit, horizon: float) -> dict[str, Any]:
    """The drawing of a fit: ceiling with interval, and the forecast from the last validation to `horizon`."""
    low, high = fit.result.intervals["asymptote"]
    compute = np.unique([*np.geomspace(fit.last_compute, horizon, PATH_POINTS), fit.end_compute])
    path = fit.result.predict(compute)
    forecast = fit.outlook.line() if fit.outlook else ""
    return {
        "ceiling": [round(value, 4) for value in (fit.result.asymptote, low, high)],
        "end": float(f"{fit.end_compute:.6g}"),
        "hours_per_step": fit.last_compute / max(1, fit.last_step),
        "forecast": forecast,
        "path": [[float(f"{p.compute:.6g}"), *(round(v, 4) for v in (p.pass_rate, p.lo, p.hi))] for p in path],
    }
