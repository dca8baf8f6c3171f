"""The evaluations of a run as a table: the newest first, one row for each file, and one for each that was lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_scalerl.processes.logs import printable

MOST_ROWS = 500
"""Rows on the page, the newest."""
COLUMNS = ("step", "file", "problems", "mean@k", "95 %", "pass@k", "weights")


def evaluation_table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Columns and rows for the page; None without a row. rows: of RUN/evaluation.jsonl."""
    if not rows:
        return None
    shown = [_lost(row) if "lost" in row else _cells(row) for row in reversed(rows[-MOST_ROWS:])]
    left = len(rows) - len(shown)
    notes = [
        "Every completion has tokens of this step's policy version alone; the digest is that of the weights on which "
        "trainer and engines agreed. Intervals are over problems."
    ]
    if left > 0:
        notes.append(f"{left} earlier rows are in evaluation.jsonl.")
    return {"columns": COLUMNS, "rows": shown, "notes": notes}


def _cells(row: Mapping[str, Any]) -> list[str]:
    low, high = row.get("low"), row.get("high")
    interval = "–" if low is None or high is None else f"{low:.3f}-{high:.3f}"
    pass_at_k = ", ".join(f"@{k} {value:.3f}" for k, value in (row.get("pass_at_k") or {}).items())
    weights = ", ".join(filter(None, (f"version {row['policy_version']}", row["weight_digest"][:12])))
    cells = (
        *(str(row["step"]), row["file"], str(row["problems"])),
        *(f"@{row['k']} {row['mean_at_k']:.3f}", interval, pass_at_k or "–", weights),
    )
    return [printable(cell)[:200] for cell in cells]


def _lost(row: Mapping[str, Any]) -> list[str]:
    return [str(row["step"]), printable(f"lost: {row['lost']}")[:300], "", "", "", "", ""]
