"""Numbers and units as text."""

from __future__ import annotations


def short_number(value: float) -> str:
    """A compute in short form: 0.05, 2, 500, 2k, 100k, 1.5M; "never" for inf."""
    if value == float("inf"):
        return "never"
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def unit_label(unit: str) -> str:
    """Axis label of a compute unit, given as the ledger names it."""
    return "training steps" if unit == "steps" else "training compute, " + unit_name(unit)


def unit_name(unit: str) -> str:
    """Display name of a compute unit, given as the ledger names it."""
    return {"gpu_hours": "GPU-hours", "device_hours": "device-hours"}.get(unit, unit.replace("_", " "))
