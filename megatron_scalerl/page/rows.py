"""A line of a run's records as the row that it has to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from megatron_scalerl.fit.outlook import checked_row
from megatron_scalerl.page.update_report import finite


def json_row(line: bytes, what: str = "a JSON object") -> dict[str, Any]:
    """The object in a line. Raises ValueError, without the place, for another line. what: was expected."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected {what}, found {error}") from None


def validation_row(line: bytes) -> dict[str, Any]:
    """A row of validation.jsonl as `checked_row` gives it. Raises ValueError, without the place."""
    return checked_row(json_row(line, "a validation (step, compute, pass_rate)"))


def step_row(line: bytes) -> dict[str, Any]:
    """A row of metrics.jsonl. Raises ValueError, without the place, for one without a step."""
    row = json_row(line)
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1e15:
        raise ValueError(f"expected the record of a step, found {f'step {str(step)[:40]!a}' if step else 'no step'}")
    return row


def evaluation_row(line: bytes) -> dict[str, Any]:
    """A row of evaluation.jsonl: a result, or with `lost` why there is none. Raises ValueError, without the place."""
    what = "an evaluation (step, file, problems, k, mean_at_k)"
    row = json_row(line, what)
    whole: Sequence[str] = ("step",) if "lost" in row else ("step", "problems", "k")
    wrong = [key for key in whole if not isinstance(row.get(key), int)]
    if "lost" not in row:
        wrong += [key for key in ("mean_at_k",) if finite(row.get(key)) is None]
        wrong += [key for key in ("file",) if not isinstance(row.get(key), str)]
    if wrong:
        shown = f"{wrong[0]} {str(row[wrong[0]])[:40]!a}" if wrong[0] in row else f"no {wrong[0]}"
        raise ValueError(f"expected {what}, found {shown}")
    return row
