"""What the weight updates of a run took.

Reads rows of metrics.jsonl. Imports no torch.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_scalerl.fit.tables import Table

UPDATE_PHASES = ("needs", "connect", "stage", "pause", "start", "update", "finish", "verify", "resume")
"""Phases of a weight update, in their order: `weight_PHASE_seconds` of metrics.jsonl."""
KEPT = (
    *("weight_bytes", "weight_whole_bytes", "weight_most_sent_bytes", "weight_most_received_bytes"),
    *("weight_gb_per_s", "weights_changed", "engine_paused_seconds", "publish_seconds"),
    *(f"weight_{phase}_seconds" for phase in UPDATE_PHASES),
)
"""Columns of metrics.jsonl that the table is made from."""
_NOTHING = "–"
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Updates:
    """The table and what has to be said of it."""

    table: Table
    notes: tuple[str, ...]


def updates_of(rows: Sequence[Row]) -> Updates | None:
    """Medians of the updates in rows of metrics.jsonl, of whole ones and of those of changes; None without one."""
    known = [row for row in rows if finite(row.get("weight_bytes")) is not None]
    if not known:
        return None
    columns: dict[str, list[Row]] = {"whole": []}
    for row in known:
        is_whole = row["weight_bytes"] >= (finite(row.get("weight_whole_bytes")) or 0)
        columns.setdefault("whole" if is_whole else "of changes", []).append(row)
    cells = [("updates", *(str(len(of)) for of in columns.values()))]
    cells += [(what, *(_median(of, name, form) for of in columns.values())) for what, name, form in _LINES]
    cells = [row for row in cells if not {*row[1:]} <= {_NOTHING}]
    notes = (f"{len(known)} updates in metrics.jsonl, medians.",)
    return Updates(table=Table(title="Weight updates", columns=("", *columns), rows=tuple(cells)), notes=notes)


def finite(value: Any) -> float | None:
    """The number; None for anything else, and for one that no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
        return None
    return float(value) if math.isfinite(value) else None


def _median(rows: Sequence[Row], name: str, form: Callable[[float], str]) -> str:
    numbers = [number for row in rows if (number := finite(row.get(name))) is not None]
    return form(statistics.median(numbers)) if numbers else _NOTHING


def _size(value: float) -> str:
    unit, scale = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if value >= s), ("bytes", 1))
    return f"{value / scale:.4g} {unit}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _plain(value: float) -> str:
    return f"{value:.3g}"


_LINES = (
    ("bytes of all senders", "weight_bytes", _size),
    ("most sent by a rank", "weight_most_sent_bytes", _size),
    ("most received by a worker", "weight_most_received_bytes", _size),
    ("elements that changed", "weights_changed", _percent),
    ("GB/s", "weight_gb_per_s", _plain),
    *((f"phase {phase}", f"weight_{phase}_seconds", _seconds) for phase in UPDATE_PHASES),
    ("engines paused", "engine_paused_seconds", _seconds),
    ("in all, with attempts that failed", "publish_seconds", _seconds),
)
"""What, its column of metrics.jsonl, how it is shown."""
