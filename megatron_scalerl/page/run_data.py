"""The data of a run's page: steps, validations, ledger and events, read by offset from growing files.

The life of a page: `RunData.update` reads new rows, once a second; `payload` is the data that the browser draws, with
the steps that the browser lacks. After a restart `generation` rises, and all steps are sent again.

A damaged line hides no other line: `RunData.damage` names the damaged line, and the page shows this text. Every value
is JSON. Columns are lists over the rows of a file, `None` where a row has no such number.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_scalerl.fit.formatting import unit_name
from megatron_scalerl.page.forecasts import Forecasts
from megatron_scalerl.page.growing_file import Rows, ending, json_row, one_line, validation_row
from megatron_scalerl.page.report import (
    UPDATE_PHASES,
    cost_text,
    finite_number,
    gain_lines,
    hours_by_role,
    last_step,
)
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.recipe.file import read_run_recipe

PROBE = ("probe_mismatch_mean", "probe_mismatch_max")
"""Columns of metrics.jsonl that only some steps have: weights.probe_every sets how many steps apart."""
COLUMNS = (
    *("step", "batches", "reward", "train_pass_rate", "entropy", "mismatch_mean", "mismatch_max"),
    *("truncated_share", "interrupted_share", "staleness_mean", "staleness_max", "generated_tokens_per_second"),
    *("step_seconds", "train_seconds", "publish_seconds", "device_hours", "grad_norm", "learning_rate"),
    "completion_tokens_mean",
    *PROBE,
)
"""Columns of metrics.jsonl that the page shows unchanged."""
VALIDATION_COLUMNS = ("step", "compute", "pass_rate", "entropy", "mean_completion_tokens", "truncated_share")
WAITS = {
    "trainer_waits": ("wait_for_batch_seconds", "pinned_seconds", "send_seconds"),
    "engines_wait": ("engine_paused_seconds", "engine_idle_seconds"),
}
"""Column of the page (seconds of a step) -> the columns of metrics.jsonl that are summed for the column."""
STEP_COLUMNS = (*COLUMNS, *WAITS, "degenerate", *(f"weight_{phase}" for phase in UPDATE_PHASES))
"""Columns of a step on the page; `payload` adds `seconds`, the time of all steps so far, and tasks' pass rates."""
MOST_EVENTS = 300
MOST_TASKS = 32
"""Most tasks with a pass rate on the page."""
MOST_EVALUATIONS = 500
"""Most rows of evaluations on the page. The newest rows are shown."""
EVALUATION_COLUMNS = ("step", "file", "problems", "mean@k", "95 %", "pass@k", "weights")


class RunData:
    """The records of one run. Reads new rows at each `update`. Not safe for several threads."""

    def __init__(self, run_dir: Path):
        """Raises ValueError for a folder that is no run."""
        self.run_dir = run_dir
        self.recipe = read_run_recipe(self.run_dir)
        self.forecasts = Forecasts()
        prompts = self.recipe.get("prompts")
        tasks = prompts.get("tasks") if isinstance(prompts, dict) else None
        names = list(tasks)[:MOST_TASKS] if isinstance(tasks, dict) else []
        self._task_columns = [f"pass_rate/{task}" for task in names if printable(str(task)) == task]
        train_columns = [f"train_{column}" for column in self._task_columns]
        self._step_columns = (*STEP_COLUMNS, *train_columns)
        self._metrics = Rows(self.run_dir / "metrics.jsonl", partial(_step, train_columns))
        self._ledger = Rows(self.run_dir / "ledger.jsonl", _charge)
        self._validation = Rows(self.run_dir / "validation.jsonl", validation_row)
        files = ("attempts.jsonl", "engines.jsonl", "evaluation.jsonl", "end.json")
        self._other_records = {name: Rows(self.run_dir / name, json_row) for name in files}
        # the last result is cached: the arguments (number of rows, generation) change whenever a row is added or
        # dropped
        self._gain = lru_cache(1)(self._gain_lines)

    @property
    def generation(self) -> int:
        """A counter that rises when a restart of the run drops step records."""
        return self._metrics.generation

    @property
    def validations(self) -> list[dict[str, Any]]:
        """The rows of validation.jsonl so far."""
        return self._validation.rows

    @property
    def steps(self) -> int:
        """Number of step records."""
        return len(self._metrics.rows)

    @property
    def _files(self) -> list[Rows[Any]]:
        return [self._metrics, self._ledger, self._validation, *self._other_records.values()]

    @property
    def damage(self) -> list[str]:
        """One line for each damaged file."""
        lines = [*(file.problem for file in self._files), one_line(self.forecasts.problem)]
        return [line for line in lines if line]

    def update(self) -> bool:
        """Read the appended rows; True for a new row. `damage` names damaged rows."""
        # a list, since `any` of a generator would stop at the first file with a new row and read no further file
        new = [file.update() for file in self._files]
        return any(new)

    def payload(self, since: int = 0) -> dict[str, Any]:
        """The data of the page. since: number of step records that the page has; the payload holds later records."""
        rows = self.validations
        steps = self._metrics.rows
        hours = hours_by_role(self._ledger.rows)
        columns = {name: [row[name] for row in steps[since:]] for name in self._step_columns}
        # the time is summed from the first step, although only steps from `since` are sent
        columns["seconds"] = [*accumulate(row["seconds"] for row in steps)][since:]
        return {
            "generation": self.generation,
            "since": since,
            "steps": columns,
            "validation": {
                name: [_number(row.get(name)) for row in rows] for name in (*VALIDATION_COLUMNS, *self._task_columns)
            },
            "forecasts": self.forecasts.payload(),
            "header": self._header(hours),
            "ledger": [{"role": role, "hours": charged} for role, charged in hours.items()],
            "events": self._events(),
            "evaluations": evaluation_table(self._other_records["evaluation.jsonl"].rows),
        }

    def _header(self, hours: dict[str, float]) -> dict[str, Any]:
        rows = self.validations
        unit = next((row["unit"] for row in reversed(self._ledger.rows) if row["unit"]), "device_hours")
        lines = [*self._gain(len(rows), self._validation.generation)]
        if hours:
            lines.append(cost_text(hours, unit, self.recipe["cost"]))
        lines += self.forecasts.lines(rows, self.recipe)
        step = 0
        if self.steps:
            step = int(self._metrics.rows[-1]["step"] or 0)
        steps = step
        if rows or self.recipe.get("steps"):
            steps = last_step(rows, self.recipe)
        return {
            "name": printable(str(self.recipe.get("name", self.run_dir.resolve().name))),
            "folder": printable(str(self.run_dir)),
            "unit": unit_name(unit),
            "step": step,
            "steps": steps,
            "ended": ending(self._other_records["end.json"].rows, self._other_records["attempts.jsonl"].rows),
            **self._newest_forecast(),
            "lines": lines,
            "damage": self.damage,
        }

    def _newest_forecast(self) -> dict[str, Any]:
        projections = self.forecasts.projections
        if not projections:
            return {"verdict": "", "forecast": "", "forecast_step": None}
        outlook = projections[-1].outlook
        return {"verdict": outlook.verdict, "forecast": outlook.line(), "forecast_step": outlook.step}

    def _gain_lines(self, *_version: int) -> list[str]:
        """The lines of `report` on the gain; empty before the second validation. Computed once per validation."""
        rows = self.validations
        if len(rows) < 2 or rows[0].get("step") != 0:
            return []
        try:
            return [printable(line) for line in gain_lines(self.run_dir, rows[-1])]
        except (ValueError, OSError, LookupError) as error:
            return [f"the gain cannot be computed: {one_line(f'{type(error).__name__}: {error}')}"]

    def _events(self) -> list[dict[str, Any]]:
        """Starts of the run and changes of engines' states, in the order of time; at most the latest MOST_EVENTS."""
        events = []
        kind = "start"
        for row in self._other_records["attempts.jsonl"].rows:
            events.append(_event(row.get("unix_time"), kind, f"attempt {row.get('incarnation', '')}"))
            kind = "restart"
        kinds = {"draining": "fault", "lost": "fault"}
        for row in self._other_records["engines.jsonl"].rows:
            state = row.get("state", "")
            text = f"{row.get('name', '')} {state}"
            if row.get("reason"):
                text += f": {row['reason']}"
            if row.get("lost_tokens"):
                text += f", {row['lost_tokens']} tokens lost"
            events.append(_event(row.get("unix_time"), kinds.get(str(state), "engine"), text))
        return sorted(events, key=lambda event: event["time"] or 0.0)[-MOST_EVENTS:]


def evaluation_table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The page's table of evaluations; None without an evaluation. rows: the rows of RUN/evaluation.jsonl."""
    if not rows:
        return None
    cells = [_evaluation_cells(row) for row in reversed(rows[-MOST_EVALUATIONS:])]
    earlier_count = len(rows) - len(cells)
    notes = [
        "All tokens of a completion come from the policy version of the row's step. The digest is of the weights, on "
        "which trainer and engines agreed. Intervals are over problems."
    ]
    if earlier_count > 0:
        notes.append(f"{earlier_count} earlier evaluations are not shown; read evaluation.jsonl in the run's folder.")
    return {"columns": EVALUATION_COLUMNS, "rows": cells, "notes": notes}


def _evaluation_cells(row: Mapping[str, Any]) -> list[str]:
    if "lost" in row:
        return [str(row["step"]), printable(f"lost: {row['lost']}")[:300], "", "", "", "", ""]
    lower = row.get("low")
    upper = row.get("high")
    interval = "–"
    if lower is not None and upper is not None:
        interval = f"[{lower:.3f}, {upper:.3f}]"
    pass_at_k = ", ".join(f"@{k} {value:.3f}" for k, value in (row.get("pass_at_k") or {}).items())
    weights = ", ".join(filter(None, (f"version {row['policy_version']}", row["weight_digest"][:12])))
    cells = (
        *(str(row["step"]), row["file"], str(row["problems"])),
        *(f"@{row['k']} {row['mean_at_k']:.3f}", interval, pass_at_k or "–", weights),
    )
    return [printable(cell)[:200] for cell in cells]


def _event(time: Any, kind: str, text: str) -> dict[str, Any]:
    if not isinstance(time, float):
        time = None
    return {"time": time, "kind": kind, "text": printable(text)[:500]}


def _step(task_columns: Sequence[str], line: bytes) -> dict[str, Any]:
    """The columns that the page shows, from a row of metrics.jsonl. task_columns: names of the tasks' pass rates."""
    row = json_row(line)
    groups = _number(row.get("batch/groups"))
    kept_groups = _number(row.get("batch/groups_kept"))
    degenerate = None
    if groups is not None and kept_groups is not None:
        degenerate = groups - kept_groups
    return {
        **{name: _number(row.get(name)) for name in (*COLUMNS, *task_columns)},
        **{name: _sum(_number(row.get(part)) for part in parts) for name, parts in WAITS.items()},
        **{f"weight_{phase}": _number(row.get(f"weight_{phase}_seconds")) for phase in UPDATE_PHASES},
        "degenerate": degenerate,
        "seconds": _number(row.get("step_seconds")) or 0.0,
    }


def _charge(line: bytes) -> dict[str, Any] | None:
    """Unit, role and hours of a row of ledger.jsonl; None for a heartbeat. A value that the row lacks becomes "", ""
    and 0."""
    row = json_row(line)
    unit = printable(str(row.get("unit", "")))
    role = printable(str(row.get("role", "")))
    if not unit and not role:
        return None
    return {"unit": unit, "role": role, "hours": _number(row.get("hours")) or 0.0}


def _number(value: Any) -> float | None:
    """The number, rounded to the six significant digits that a chart needs; None for a value that is no number."""
    number = finite_number(value)
    if number is None:
        return None
    # a whole number stays exact: six digits would change a step above a million
    if isinstance(value, int):
        return value
    return float(f"{number:.6g}")


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum of the values that are not None; None if all are None."""
    numbers = [value for value in values if value is not None]
    return _number(math.fsum(numbers)) if numbers else None
