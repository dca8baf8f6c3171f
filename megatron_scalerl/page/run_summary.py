"""One run in a list of runs: its state, newest validation, fit and hours, read without its completions.

A run that is damaged, or only half there, is a row with one line that says what was found; nothing is raised.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from megatron_scalerl.fit.formatting import unit_name
from megatron_scalerl.fit.inputs import flattened
from megatron_scalerl.fit.outlook import RunFit, run_fit
from megatron_scalerl.page.growing_file import GrowingFile, first_row, newest_row, validation_row
from megatron_scalerl.page.report import last_step
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.recipe.file import read_run_recipe

QUIET_S = 60.0
"""Seconds without a write to the ledger, which gets a heartbeat every 10 s, after which a run counts as stopped."""
MOST_TEXT = 200
"""Characters of a value that are shown."""


class RunSummary:
    """One run. Not for several threads at a time."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self.run_dir = run_dir
        self.name = printable(name)
        self.recipe: dict[str, Any] = {}
        """`recipe.file.read_run_recipe`; empty if it cannot be read."""
        self.settings: dict[str, str] = {}
        """Key path -> value as text, empty if the recipe cannot be read."""
        self.rows: list[dict[str, Any]] = []
        """Rows of validation.jsonl with a step, a compute and a pass rate."""
        self.fit: RunFit | None = None
        self.fitted_rows = -1
        """Number of `rows` that the newest attempt to fit had; -1 before it."""
        self.problems: dict[str, str] = {}
        """By file: what is wrong with it, in one line."""
        self._validation = GrowingFile(run_dir / "validation.jsonl")
        self._generation = 0
        self._newest: dict[str, dict[str, Any] | None] = {}
        self._signatures: dict[str, tuple[int, ...]] = {}
        self._state: tuple[str, str] = ("", "")
        self._unit = "device_hours"

    @property
    def unit(self) -> str:
        """Display name of the unit of compute."""
        return printable(unit_name(str((self.rows[-1] if self.rows else {}).get("unit") or self._unit)))[:40]

    def update(self) -> bool:
        """Read what is new; True if the row in the list changed."""
        before = (self._state, dict(self.problems))
        changed = self._read_recipe()
        for file in ("metrics.jsonl", "ledger.jsonl", "attempts.jsonl", "end.json"):
            changed = self._read_newest(file) or changed
        changed = self._read_validations() or changed
        self._state = self._found_state()
        return changed or before != (self._state, self.problems)

    def needs_fit(self) -> bool:
        """Whether a validation has come since the last fit."""
        return self.fitted_rows != len(self.rows)

    def made_fit(self) -> tuple[int, RunFit | None, str]:
        """(rows fitted, the fit, what is wrong): takes a fifth of a second and changes nothing."""
        rows = list(self.rows)
        start = self.recipe["forecast"]["fit_from_steps"] if self.recipe else 0
        try:
            fit = run_fit(rows, steps=self._steps(rows), fit_from_steps=start)
        except (ValueError, ArithmeticError) as error:
            return len(rows), None, " ".join(str(error).split())
        return len(rows), fit, ""

    def add_fit(self, rows: int, fit: RunFit | None, problem: str) -> None:
        """Keep what `made_fit` returned."""
        self.fitted_rows, self.fit = rows, fit
        self._say("forecast", problem)

    def row(self) -> dict[str, Any]:
        """What the list shows of the run. JSON; `None` for what is not known."""
        last = self.rows[-1] if self.rows else None
        metrics = self._newest.get("metrics.jsonl") or {}
        totals = (metrics.get("device_hours_total"), last.get("compute_total") if last else None)
        held = [float(total) for total in totals if total is not None]
        state, reason = self._state
        return {
            "name": self.name,
            "recipe": printable(str(self.recipe.get("name", "")))[:MOST_TEXT],
            "state": state,
            "reason": reason,
            "wrote": self._wrote(),
            "step": metrics.get("step") or (last["step"] if last else None),
            "steps": self._steps(self.rows) or None,
            "unit": self.unit,
            "hours": max(held, default=None),
            "validation": [[each["step"], each["compute"], round(each["pass_rate"], 5)] for each in self.rows],
            "problem": "; ".join(self.problems.values()),
            "opens": bool(self.recipe),
        }

    def _steps(self, rows: list[dict[str, Any]]) -> int:
        return last_step(rows, self.recipe) if rows else self.recipe.get("steps", 0)

    def _found_state(self) -> tuple[str, str]:
        attempt, end = self._newest.get("attempts.jsonl"), self._newest.get("end.json")
        newest = (attempt or {}).get("incarnation")
        if end is not None and (newest is None or end.get("incarnation", newest) == newest):
            return "finished", printable(str(end.get("reason", "")))[:MOST_TEXT]
        wrote = self._wrote()
        if wrote is not None and abs(time.time() - wrote) < QUIET_S:
            return "running", ""
        return ("stopped", "") if attempt or self.rows or self._newest.get("ledger.jsonl") else ("not started", "")

    def _wrote(self) -> float | None:
        """When the ledger was last written, as Unix time; None without one."""
        try:
            return os.stat(self.run_dir / "ledger.jsonl").st_mtime
        except OSError:
            return None

    def _is_new(self, file: str) -> bool:
        try:
            found = os.stat(self.run_dir / file)
            signature: tuple[int, ...] = (found.st_ino, found.st_size, found.st_mtime_ns)
        except OSError:
            signature = ()
        if self._signatures.get(file) == signature:
            return False
        self._signatures[file] = signature
        return True

    def _read_newest(self, file: str) -> bool:
        if not self._is_new(file):
            return False
        problem = ""
        try:
            self._newest[file] = newest_row(self.run_dir / file)
            if file == "ledger.jsonl":
                self._unit = str((first_row(self.run_dir / file) or {}).get("unit", self._unit))
        except (ValueError, OSError) as error:
            self._newest[file], problem = None, " ".join(str(error).split())
        self._say(file, problem)
        return file != "ledger.jsonl"  # it gets a heartbeat every 10 s, which says nothing new

    def _read_validations(self) -> bool:
        problem = ""
        try:
            lines = self._validation.new_lines()
        except OSError as error:
            self._say("validation.jsonl", " ".join(str(error).split()))
            return False
        if self._generation != self._validation.generation:
            self._generation, self.rows, self.fitted_rows = self._validation.generation, [], -1
            self._say("validation.jsonl", "")
        for line, where in lines:
            try:
                row = validation_row(line)
            except ValueError as error:
                problem = problem or f"{where}: {error}"
                continue
            self.rows.append(row)
        if problem:
            self._say("validation.jsonl", problem)
        return bool(lines)

    def _read_recipe(self) -> bool:
        if not self._is_new("recipe.yaml"):
            return False
        self.recipe, self.settings, problem = {}, {}, ""
        try:
            self.recipe = read_run_recipe(self.run_dir)
            self.settings = {key: _text(value) for key, value in flattened(self.recipe).items()}
        except (ValueError, OSError) as error:
            problem = " ".join(str(error).split())
        self._say("recipe.yaml", problem)
        return True

    def _say(self, file: str, problem: str) -> None:
        if problem:
            self.problems[file] = printable(problem.replace(f"{self.run_dir}/", ""))[:500]
        else:
            self.problems.pop(file, None)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return printable(text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…")
