"""A line of a run's records as the row that it has to be."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_scalerl.fit.outlook import checked_row


def json_row(line: bytes, what: str = "a JSON object") -> dict[str, Any]:
    """The object in a line. Raises ValueError, without the place, for another line. what: was expected."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected {what}, found {error}") from None


def validation_row(line: bytes) -> dict[str, Any]:
    """A row of validation.jsonl as `checked_row` gives it. Raises ValueError, without the place."""
    return checked_row(json_row(line, "a validation (step, compute, pass_rate)"))
