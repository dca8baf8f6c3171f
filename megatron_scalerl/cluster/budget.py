"""The GPU-hours of a run: spent, by its ledger, and what is left of a budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.fit.formatting import unit_name
from megatron_scalerl.recipe.file import load_recipe


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The total of a ledger. Produced by `spent`."""

    hours: float
    """Device-hours of all roles, up to the last heartbeat."""
    unit: str
    """GPU-hours or device-hours, as it is printed."""


def spent(run: Path) -> Spent:
    """What a run has been charged so far; 0 before its first start."""
    header, *rows = read_jsonl(run / "ledger.jsonl") or [{}]
    hours = sum(row["hours"] for row in rows if "role" in row)
    if rows and "heartbeat" in rows[-1]:
        hours += rows[-1]["heartbeat"] * rows[-1]["devices"] / 3600
    return Spent(hours=hours, unit=unit_name(str(header.get("unit", "device_hours"))))


def seconds_left(recipe_file: str | Path, budget: float) -> int:
    """How long the fleet of a recipe's run may still be held (s). budget: device-hours. Raises ValueError."""
    recipe = load_recipe(recipe_file)
    return max(0, int((budget - spent(Path(recipe.run_dir)).hours) * 3600 / recipe.devices))
