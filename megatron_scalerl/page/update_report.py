"""What the weight updates of a run took, beside what the planner predicts for its recipe.

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
NO_RATE = "no link rate stated"
"""Instead of a bound, where weights.link_gb_s is 0."""
KEPT = (
    *("weight_bytes", "weight_whole_bytes", "weight_most_sent_bytes", "weight_most_received_bytes"),
    *("weight_gb_per_s", "weights_changed", "engine_paused_seconds", "publish_seconds"),
    *(f"weight_{phase}_seconds" for phase in UPDATE_PHASES),
)
"""Columns of metrics.jsonl that the table is made from."""
_NOTHING = "–"
Row = Mapping[str, Any]
Value = Callable[[Row], float | None]


@dataclass(frozen=True, kw_only=True)
class PredictedUpdate:
    """A whole update of a recipe, as the planner predicts it. Produced by `page.predicted`."""

    bytes: int
    """Of all senders, padding included."""
    senders: int
    most_sent: int
    """Bytes of the rank that sends most."""
    most_received: int
    """Bytes of the worker that gets most."""
    seconds: float | None
    """Sent and received, at weights.link_gb_s; None if it is not stated."""


@dataclass(frozen=True, kw_only=True)
class Updates:
    """The table and what has to be said of it."""

    table: Table
    notes: tuple[str, ...]


def updates_of(rows: Sequence[Row], recipe: Mapping[str, Any], predicted: PredictedUpdate | str) -> Updates | None:
    """Medians of the updates in rows of metrics.jsonl; None without one. predicted: or why there is no prediction."""
    known = [row for row in rows if _number("weight_bytes")(row) is not None]
    if not known:
        return None
    whole, changes = [row for row in known if _is_whole(row)], [row for row in known if not _is_whole(row)]
    rate = recipe["weights"]["link_gb_s"]
    columns = {"predicted": None, "measured": whole} | ({"measured, of changes": changes} if changes else {})
    of_plan = predicted if isinstance(predicted, PredictedUpdate) else None
    lines = _lines(known, of_plan, rate)
    cells = [
        (name, expected, *(show(of) for of in columns.values() if of is not None)) for name, expected, show in lines
    ]
    cells = [row for row in cells if not {*row[1:]} <= {"", _NOTHING, NO_RATE}]
    notes = [f"{len(known)} updates in metrics.jsonl, medians; the prediction is of a whole one."]
    if isinstance(predicted, str):
        notes.append(predicted)
    if not rate:
        notes.append(f"{NO_RATE} (weights.link_gb_s), so no seconds are predicted.")
    return Updates(table=Table(title="Weight updates", columns=("", *columns), rows=tuple(cells)), notes=tuple(notes))


def _lines(
    known: Sequence[Row], plan: PredictedUpdate | None, rate: float
) -> list[tuple[str, str, Callable[[Sequence[Row]], str]]]:
    """(what, predicted, what is shown of the measured rows)"""
    wire = "stage" if any(_number("weight_stage_seconds")(row) is not None for row in known) else "update"
    bound = max(plan.most_sent, plan.most_received) / rate / 1e9 if plan and rate else None
    seconds = plan.seconds if plan else None
    most = (plan.most_sent, plan.most_received, plan.bytes) if plan else (None, None, None)

    def bound_of(row: Row) -> float | None:
        sent, received = (_number(f"weight_most_{way}_bytes")(row) for way in ("sent", "received"))
        return None if sent is None or received is None or not rate else max(sent, received) / rate / 1e9

    def over(row: Row) -> float | None:
        took, least = _number(f"weight_{wire}_seconds")(row), bound_of(row)
        return took / least if took is not None and least else None

    def share(row: Row) -> float | None:
        sent, of = _number("weight_bytes")(row), _number("weight_whole_bytes")(row)
        return sent / of if sent is not None and of else None

    def at_rate(value: float | None, form: Callable[[float], str]) -> str:
        return _shown(value, form) if rate else NO_RATE

    limit = f"lower bound at {rate:g} GB/s" if rate else "lower bound"
    speed = at_rate(most[2] / seconds / 1e9 if most[2] and seconds else None, _plain)
    ratio = at_rate(seconds / bound if seconds and bound else None, _plain)
    phases = [
        (
            f"phase {phase}",
            at_rate(seconds, _seconds) if phase == wire else "",
            _median(f"weight_{phase}_seconds", _seconds),
        )
        for phase in UPDATE_PHASES
        if any(_number(f"weight_{phase}_seconds")(row) is not None for row in known)
    ]
    return [
        ("updates", "", lambda rows: str(len(rows))),
        ("bytes of all senders", _shown(most[2], _size), _median("weight_bytes", _size)),
        ("most sent by a rank", _shown(most[0], _size), _median("weight_most_sent_bytes", _size)),
        ("most received by a worker", _shown(most[1], _size), _median("weight_most_received_bytes", _size)),
        ("bytes over those of all values", "", _median_of(share, _plain)),
        ("elements that changed", "", _median("weights_changed", _percent)),
        (limit, at_rate(bound, _seconds), _median_of(bound_of, _seconds)),
        ("GB/s", speed, _median("weight_gb_per_s", _plain)),
        *phases,
        (f"phase {wire} over the bound", ratio, _median_of(over, _plain)),
        ("engines paused", "", _median("engine_paused_seconds", _seconds)),
        ("in all, with attempts that failed", "", _median("publish_seconds", _seconds)),
    ]


def _is_whole(row: Row) -> bool:
    return bool(row["weight_bytes"] >= (_number("weight_whole_bytes")(row) or 0))


def _number(name: str) -> Value:
    def number(row: Row) -> float | None:
        return finite(row.get(name))

    return number


def finite(value: Any) -> float | None:
    """The number; None for anything else, and for one that no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
        return None
    return float(value) if math.isfinite(value) else None


def _median(name: str, form: Callable[[float], str]) -> Callable[[Sequence[Row]], str]:
    return _median_of(_number(name), form)


def _median_of(value: Value, form: Callable[[float], str]) -> Callable[[Sequence[Row]], str]:
    def median(rows: Sequence[Row]) -> str:
        found = [number for number in map(value, rows) if number is not None]
        return _shown(statistics.median(found) if found else None, form)

    return median


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return _NOTHING if value is None else form(value)


def _size(value: float) -> str:
    unit, scale = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if value >= s), ("bytes", 1))
    return f"{value / scale:.4g} {unit}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _plain(value: float) -> str:
    return f"{value:.3g}"
