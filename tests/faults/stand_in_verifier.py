"""A stand-in for a verifier: a reward that every token of an answer decides, for policies that solve nothing."""

from typing import Any


def parity(answer_text: str, reference: str, extra: dict[str, Any]) -> bool:
    """True for half of all texts, whatever the reference."""
    return sum(answer_text.encode()) % 2 == 0
