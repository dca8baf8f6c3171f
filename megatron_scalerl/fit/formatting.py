"""Numbers and units as text."""

from collections.abc import Mapping
from typing import Any


def short_number(value: float) -> str:
    """A compute in short form: 0.05, 2, 500, 2k, 100k, 1.5M; "never" for inf."""
    if value == float("inf"):
        return "never"
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def shortened(name: str, max_length: int) -> str:
    """A name of at most `max_length` characters; a longer name loses the middle, as both ends tell runs apart."""
    if len(name) <= max_length:
        return name
    return f"{name[: max_length // 2]}…{name[len(name) - (max_length - max_length // 2) + 1 :]}"


def unit_label(unit: str) -> str:
    """Axis label of a unit of compute, such as "gpu_hours", or of the name of a file's column."""
    labels = {key: f"training compute, {name}" for key, name in _NAMES.items()}
    labels |= {"steps": "training steps", "seconds": "training time, seconds"}
    return labels.get(unit, f"training, {unit}")


_NAMES = {"gpu_hours": "GPU-hours", "device_hours": "device-hours", "compute": "compute", "flops": "FLOPs"}


def unit_name(unit: str) -> str:
    """Display name of a unit of compute; an unknown unit, such as the name of a file's column, stays as given."""
    return _NAMES.get(unit, unit)


def money(hours: float, cost: Mapping[str, Any] | None) -> str:
    """Text with the price of `hours` device-hours, to be printed after the hours; empty without a price.

    cost: the section `cost` of a recipe.

    >>> money(931, {"price_per_device_hour": 2.5, "currency": "USD"})
    ', 2,327.50 USD'
    """
    if not cost or not cost.get("price_per_device_hour"):
        return ""
    return f", {hours * cost['price_per_device_hour']:,.2f} {cost['currency']}"
