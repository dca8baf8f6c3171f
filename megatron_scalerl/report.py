"""The closing report of a run: what it gained, what it cost, and how its first half forecast the second.

Reads RUN/validation.jsonl, validation_by_prompt.jsonl, ledger.jsonl and recipe.yaml; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.fit.forecast import FitResult, fit
from megatron_scalerl.fit.plot import plot_forecast
from megatron_scalerl.recipe.file import read_run_recipe

BOOTSTRAP_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Held-out pass rate at the end minus the one at step 0, on the same prompts."""

    first: float
    last: float
    last_step: int
    low: float
    """Lower end of the 95 % paired bootstrap interval over prompts."""
    high: float


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How a forecast from the first part of a run met the rest."""

    method: str
    result: FitResult
    rows: tuple[dict[str, Any], ...]
    """The unseen validations, each with `forecast`, `lo`, `hi`."""

    @property
    def errors(self) -> np.ndarray:
        """Measured minus forecast."""
        return np.array([row["pass_rate"] - row["forecast"] for row in self.rows])


def report(run_dir: str | Path, console: Console) -> None:
    """Print the report and write RUN/forecast.png. Raises ValueError where a file is missing or too short."""
    run_dir = Path(run_dir)
    rows = read_rows(run_dir / "validation.jsonl")
    recipe = read_run_recipe(run_dir)
    unit = str(read_rows(run_dir / "ledger.jsonl")[0]["unit"])
    _print_gain(console, gain(run_dir))
    _print_ledger(console, run_dir, unit)
    meetings = forecasts(rows, recipe["forecast"], name=recipe["name"], unit=unit)
    if not meetings:
        console.print("Too few validations for a forecast.", highlight=False)
        return
    _print_meeting(console, meetings[0], unit)
    for meeting in meetings:
        errors = np.abs(meeting.errors)
        inside = np.mean([row["lo"] <= row["pass_rate"] <= row["hi"] for row in meeting.rows])
        console.print(
            f"{meeting.method}: error of the forecast mean {errors.mean():.3f}, max {errors.max():.3f}, "
            f"last {meeting.errors[-1]:+.3f}; {inside:.0%} of the unseen points inside its 90 % interval",
            highlight=False,
        )
    path = plot(run_dir, meetings[0])
    console.print(f"picture: {path}", highlight=False)


def forecasts(rows: Sequence[dict[str, Any]], section: dict[str, Any], *, name: str, unit: str) -> list[Meeting]:
    """Fit the first part of the run, robustly and as the paper does, and predict the rest; [] if too short."""
    start, later = rows[0], rows[1:]
    last = rows[-1]["step"]
    used = [r for r in later if r["step"] >= section["fit_from_steps"]]
    seen = [r for r in used if r["step"] <= section["fit_until_share"] * last]
    unseen = [r for r in used if r["step"] > section["fit_until_share"] * last]
    if start["step"] != 0 or len(seen) < 3 or not unseen:
        return []
    meetings = []
    for method in ("robust", "paper"):
        result = fit(
            [r["gpu_hours"] for r in seen],
            [r["pass_rate"] for r in seen],
            initial=start["pass_rate"],
            method=method,
            prompts=seen[0]["prompts"],
            generations=seen[0]["generations"],
            name=name,
            unit=unit,
        )
        predictions = result.predict([r["gpu_hours"] for r in unseen])
        met = tuple(r | {"forecast": p.pass_rate, "lo": p.lo, "hi": p.hi} for r, p in zip(unseen, predictions))
        meetings.append(Meeting(method=method, result=result, rows=met))
    return meetings


def gain(run_dir: str | Path) -> Gain:
    """The gain over step 0 with a paired bootstrap over held-out prompts."""
    rows = read_rows(Path(run_dir) / "validation_by_prompt.jsonl")
    first, last = np.array(rows[0]["by_prompt"]), np.array(rows[-1]["by_prompt"])
    difference = last - first
    draws = np.random.default_rng(0).integers(0, len(difference), (BOOTSTRAP_DRAWS, len(difference)))
    low, high = np.quantile(difference[draws].mean(axis=1), [0.025, 0.975])
    return Gain(first=first.mean(), last=last.mean(), last_step=rows[-1]["step"], low=float(low), high=float(high))


def plot(run_dir: str | Path, meeting: Meeting) -> Path:
    """RUN/forecast.png: fitted points, curve, band, and the points that the fit did not see."""
    unseen = ([r["gpu_hours"] for r in meeting.rows], [r["pass_rate"] for r in meeting.rows])
    return plot_forecast(
        Path(run_dir) / "forecast.png",
        meeting.result,
        unseen={meeting.result.name: unseen},
        until=meeting.rows[-1]["gpu_hours"] * 1.15,
        title=f"{meeting.result.name}: forecast from the first half of the run",
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's JSONL file. Raises ValueError where it is missing or empty."""
    rows = read_jsonl(path)
    if not rows:
        raise ValueError(f"{path}: expected at least one line, found {'none' if path.exists() else 'no file'}")
    return rows


def _print_gain(console: Console, found: Gain) -> None:
    console.print(
        f"held-out pass rate {found.first:.3f} at step 0, {found.last:.3f} at step {found.last_step}: "
        f"gain {found.last - found.first:+.3f}, 95 % interval [{found.low:+.3f}, {found.high:+.3f}] "
        "(paired bootstrap over prompts)",
        highlight=False,
    )


def _print_ledger(console: Console, run_dir: Path, unit: str) -> None:
    hours: dict[str, float] = {}
    for row in read_rows(run_dir / "ledger.jsonl"):
        if "role" in row:  # the others: the head, and heartbeats of a run under way
            hours[row["role"]] = hours.get(row["role"], 0.0) + row["hours"]
    total = sum(hours.values())
    parts = ", ".join(f"{role} {value:.4g} ({value / total:.0%})" for role, value in hours.items())
    console.print(f"ledger, {unit.replace('_', '-')}: {total:.4g} held: {parts}", highlight=False)


def _print_meeting(console: Console, meeting: Meeting, unit: str) -> None:
    table = Table(title=f"Forecast from {meeting.result.n_points} validations against the rest", title_justify="left")
    for column in ("step", unit.replace("_", "-"), "forecast", "90 % interval", "measured", "error", ""):
        table.add_column(column, justify="right")
    for row, error in zip(meeting.rows, meeting.errors):
        outside = not row["lo"] <= row["pass_rate"] <= row["hi"]
        table.add_row(
            str(row["step"]),
            f"{row['gpu_hours']:.4g}",
            f"{row['forecast']:.3f}",
            f"{row['lo']:.3f} - {row['hi']:.3f}",
            f"{row['pass_rate']:.3f}",
            f"{error:+.3f}",
            "outside" if outside else "",
        )
    console.print(table)
