"""The report that closes a run: gain, cost, weight updates, and a forecast from the first part of the run.

Reads RUN/validation.jsonl, validation_by_prompt.jsonl, ledger.jsonl, metrics.jsonl and recipe.yaml.
Imports no torch.
"""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.fit.forecast import fit_curve
from megatron_scalerl.fit.formatting import money, unit_name
from megatron_scalerl.fit.inputs import curve_of_rows, unconfirmed
from megatron_scalerl.fit.outlook import Outlook, outlooks
from megatron_scalerl.fit.plot import plot_forecast
from megatron_scalerl.fit.result import ForecastEvaluation
from megatron_scalerl.fit.tables import Table, evaluation_table, outlook_table
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.recipe.file import read_run_recipe
from megatron_scalerl.record import record

BOOTSTRAP_DRAWS = 10_000
UPDATE_PHASES = ("needs", "connect", "pause", "start", "update", "finish", "verify", "resume")
"""Phases of a weight update, in order: `weight_PHASE_seconds` of metrics.jsonl."""
_NOTHING = "–"
Rows = Sequence[dict[str, Any]]
"""Rows of validation.jsonl."""


@record
class Gain:
    """Held-out pass rate at the end minus the pass rate at step 0, on the same prompts."""

    first: float
    """Mean pass rate at step 0."""
    last: float
    """Mean pass rate at `last_step`."""
    last_step: int
    """Step of the last validation."""
    low: float
    """Lower end of the 95 % paired bootstrap interval over prompts."""
    high: float
    """Upper end of the 95 % paired bootstrap interval over prompts."""


def report(run_dir: Path, console: Console) -> None:
    """Print the report and write RUN/forecast.png.

    Raises ValueError for a missing, empty or invalid file, OSError if the figure cannot be written.
    """
    rows = read_rows(run_dir / "validation.jsonl")
    recipe = read_run_recipe(run_dir)
    ledger = read_rows(run_dir / "ledger.jsonl")
    say = console.print
    for line in gain_lines(run_dir, rows[-1]):
        say(line)
    say(cost_text(hours_by_role(ledger), str(ledger[0]["unit"]), recipe["cost"]))
    try:
        for item in updates_of(read_jsonl(run_dir / "metrics.jsonl")) or ():
            say(item)
    except (ValueError, RecursionError) as error:
        # a damaged metrics.jsonl costs this table alone: the report goes on
        say(printable(f"Weight updates are not shown: {error}"))
    steps = last_step(rows, recipe)
    forecasts = outlooks(rows, steps=steps, fit_from_steps=recipe["forecast"]["fit_from_steps"])
    if forecasts:
        measured = measured_end(rows, recipe)
        say(outlook_table(forecasts, measured))
        say(moved_text(forecasts, measured))
    fitted, unseen = split(rows, recipe["forecast"])
    if not unseen:
        say("No forecast: validations are needed at step 0, at three steps of the first part, and at a later step.")
        return
    if rows[0]["pass_rate"] >= 1.0:
        say("No forecast: the pass rate at step 0 is already 1.")
        return
    name = recipe["name"]
    evaluation = evaluate(rows[0], fitted, unseen, method="robust", name=name)
    say(evaluation_table(evaluation))
    say(_error_text(evaluation))
    try:
        text = _error_text(evaluate(rows[0], fitted, unseen, method="paper", name=name))
    except ValueError as error:  # for example for pass rates above 0.8, the end of the paper's grid of A
        text = f"the method paper has no forecast: {error}"
    say(printable(text))
    compute = [prediction.compute for prediction in evaluation.predictions]
    path = plot_forecast(
        run_dir / "forecast.png",
        evaluation.fit,
        unseen={evaluation.fit.name: (compute, evaluation.measured)},
        until=compute[-1] * 1.15,
        title=f"{evaluation.fit.name}: forecast, and points that were not fitted",
    )
    say(f"plot: {path}")


def split(rows: Rows, section: dict[str, Any]) -> tuple[Rows, Rows]:
    """(rows to fit, later rows to forecast), by the recipe's section `forecast`. Both are empty if fewer than three
    rows can be fitted, or if the run has no validation at step 0."""
    until = section["fit_until_share"] * rows[-1]["step"]
    used = [row for row in rows[1:] if row["step"] >= section["fit_from_steps"]]
    fitted = [row for row in used if row["step"] <= until]
    unseen = [row for row in used if row["step"] > until]
    if rows[0]["step"] != 0 or len(fitted) < 3:  # `fit_curve` needs three points
        return [], []
    return fitted, unseen


def evaluate(start: dict[str, Any], fitted: Rows, unseen: Rows, *, method: str, name: str) -> ForecastEvaluation:
    """Fit the rows of the first part and compare the forecast with the unseen rows. start: the row of step 0."""
    result = fit_curve(curve_of_rows([start, *fitted], name=name), method=method)
    completions = None
    if all("prompts" in row and "generations" in row for row in (*fitted, *unseen)):
        completions = [row["prompts"] * row["generations"] for row in unseen]
    return result.evaluate(
        [row["compute"] for row in unseen],
        [row["pass_rate"] for row in unseen],
        completions=completions,
    )


def gain_lines(run_dir: Path, last: dict[str, Any]) -> list[str]:
    """Lines on the gain, on the share of answers that a second judge confirmed, and on each task's gain in a mixture.

    last: the last row of validation.jsonl. Raises ValueError where `read_rows` does.
    """
    lines = [gain_text(gain(run_dir))]
    if last.get("confirmed_share") is not None:
        line = f"a second judge confirms {last['confirmed_share']:.1%} of the correct answers at step {last['step']}"
        lines.append(unconfirmed(last) or line)
    for task, task_gain in gains_by_task(run_dir, last).items():
        lines.append(f"{task}: {gain_text(task_gain)}")
    return lines


def gains_by_task(run_dir: Path, last: dict[str, Any]) -> dict[str, Gain]:
    """The gain of each task of a mixture; empty for one task. last: the last row of validation.jsonl."""
    gains = {}
    start = 0
    for column, count in last.items():
        if column.startswith("prompts/"):  # tasks in the order of the prompts in a validation
            gains[column.removeprefix("prompts/")] = gain(run_dir, slice(start, start + count))
            start += count
    return gains


def gain(run_dir: Path, part: slice = slice(None)) -> Gain:
    """The gain over step 0 with a paired bootstrap over held-out prompts. Raises ValueError where `read_rows` does.
    part: slice of the held-out prompts in the order of validation_by_prompt.jsonl.
    """
    rows = read_rows(run_dir / "validation_by_prompt.jsonl")
    first = np.array(rows[0]["by_prompt"])[part]
    last = np.array(rows[-1]["by_prompt"])[part]
    difference = last - first
    # the seed is fixed so that two reports of a run agree
    draws = np.random.default_rng(0).integers(0, len(difference), (BOOTSTRAP_DRAWS, len(difference)))
    lower, upper = np.quantile(difference[draws].mean(axis=1), [0.025, 0.975])
    return Gain(first=first.mean(), last=last.mean(), last_step=rows[-1]["step"], low=float(lower), high=float(upper))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's JSONL file. Raises ValueError for a missing, empty or invalid file."""
    rows = read_jsonl(path)
    if not rows:
        problem = "is empty" if path.exists() else "does not exist"
        raise ValueError(f"{path} {problem}")
    return rows


def gain_text(measured: Gain) -> str:
    """The gain in one line."""
    return (
        f"held-out pass rate {measured.first:.3f} at step 0, {measured.last:.3f} at step {measured.last_step}: "
        f"gain {measured.last - measured.first:+.3f}, 95 % interval [{measured.low:+.3f}, {measured.high:+.3f}] "
        "(paired bootstrap over prompts)"
    )


def hours_by_role(ledger: Rows) -> dict[str, float]:
    """Role -> device-hours. ledger: rows of ledger.jsonl; the header and heartbeats have no role and do not count."""
    hours: dict[str, float] = {}
    for row in ledger:
        if row.get("role"):
            hours[row["role"]] = hours.get(row["role"], 0.0) + row["hours"]
    return hours


def cost_text(hours: Mapping[str, float], unit: str, cost: Mapping[str, Any]) -> str:
    """The device-hours of each role in one line. hours: by role; unit: of the ledger; cost: the recipe's section
    cost."""
    total = math.fsum(hours.values())
    divisor = total or 1.0
    parts = ", ".join(f"{role} {value:.4g} ({value / divisor:.0%})" for role, value in hours.items())
    return f"ledger, {unit_name(unit)}: {total:.4g} in total{money(total, cost)}: {parts}"


def moved_text(forecasts: Sequence[Outlook], measured: float | None) -> str:
    """A line on how far the forecasts of a run's end moved. measured: the final pass rate; None before the end."""
    change = forecasts[-1].pass_rate - forecasts[0].pass_rate
    text = f"the forecast of the run's end moved by {change:+.3f} from the first forecast to the last"
    if measured is not None:
        inside = sum(forecast.lo <= measured <= forecast.hi for forecast in forecasts)
        text += f"; measured at the end: {measured:.3f}, inside {inside} of {len(forecasts)} forecast intervals"
    return text


def last_step(rows: Rows, recipe: Mapping[str, Any]) -> int:
    """The recipe's number of steps; without this number, the step of the last validation."""
    return int(recipe.get("steps") or rows[-1]["step"])


def measured_end(rows: Rows, recipe: Mapping[str, Any]) -> float | None:
    """The pass rate at the run's last step; None before this step."""
    if rows[-1]["step"] < last_step(rows, recipe):
        return None
    return float(rows[-1]["pass_rate"])


def _error_text(evaluation: ForecastEvaluation) -> str:
    errors = np.abs(evaluation.errors)
    return (
        f"{evaluation.fit.method}: error of the forecast: mean {errors.mean():.3f}, max {errors.max():.3f}, "
        f"last {evaluation.errors[-1]:+.3f}; {evaluation.covered.mean():.0%} of the unseen points inside its "
        "90 % interval"
    )


def updates_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Table, str] | None:
    """(table, note on the table) of the weight updates in rows of metrics.jsonl; None if there was no update.

    The table has medians: one column for updates that sent whole tensors, one for updates that sent only changes.
    """
    updates = [row for row in rows if finite_number(row.get("weight_bytes")) is not None]
    if not updates:
        return None
    columns: dict[str, list[Mapping[str, Any]]] = {"whole": []}
    for update in updates:
        if update["weight_bytes"] >= (finite_number(update.get("weight_whole_bytes")) or 0):
            columns["whole"].append(update)
        else:
            columns.setdefault("of changes", []).append(update)
    lines = [("updates", *(str(len(column)) for column in columns.values()))]
    for label, name, form in _LINES:
        medians = [_median(column, name, form) for column in columns.values()]
        if any(median != _NOTHING for median in medians):  # no line for a phase without values
            lines.append((label, *medians))
    table = Table(title="Weight updates", columns=("", *columns), rows=tuple(lines))
    return table, f"Medians over the {len(updates)} weight updates in metrics.jsonl."


def finite_number(value: Any) -> float | None:
    """The value as a finite float; None if the value is no number, not finite, or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # the comparison is False for a NaN, for an infinity, and for an integer too large to be converted
    if abs(value) <= sys.float_info.max:
        return float(value)
    return None


def _median(rows: Sequence[Mapping[str, Any]], name: str, form: Callable[[float], str]) -> str:
    values = (finite_number(row.get(name)) for row in rows)
    numbers = [value for value in values if value is not None]
    if not numbers:
        return _NOTHING
    return form(statistics.median(numbers))


def _size(value: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.4g} bytes"


_SECONDS = "{:.3g} s".format
_LINES = (
    ("bytes of all senders", "weight_bytes", _size),
    ("most sent by a rank", "weight_most_sent_bytes", _size),
    ("most received by a worker", "weight_most_received_bytes", _size),
    ("elements that changed", "weights_changed", lambda share: f"{100 * share:.3g} %"),
    ("GB/s", "weight_gb_per_s", "{:.3g}".format),
    *((f"phase {phase}", f"weight_{phase}_seconds", _SECONDS) for phase in UPDATE_PHASES),
    ("engines paused", "engine_paused_seconds", _SECONDS),
    ("whole update, failed attempts included", "publish_seconds", _SECONDS),
)
"""(label, column of metrics.jsonl, function that formats a number) of each line of the table of weight updates."""
