"""The verifier `math`: math-verify on the text after thinking."""

from __future__ import annotations

import logging
from typing import Any


def extract_answer(text: str, think_end: str) -> str | None:
    """The text after the first closing think tag, or None if thinking never ended."""
    _, tag, answer = text.partition(think_end)
    return answer if tag else None


def verify_math(answer_text: str, reference: str, extra: dict[str, Any]) -> bool:
    """True if the last expression, formula or \\boxed{} of the answer equals the reference mathematically.

    The reference may be a bare number or expression, LaTeX with or without dollars, or hold a \\boxed{}.
    math-verify's own time limits are off, since they need signals: the pool kills what takes too long.
    """
    del extra
    # Imported here: it takes sympy along, which only the verifier processes need.
    from math_verify import parse, verify

    delimited = "$" in reference or "\\boxed" in reference
    expected = parse(reference if delimited else f"\\boxed{{{reference}}}", parsing_timeout=None)
    found = parse(answer_text, parsing_timeout=None)
    return bool(verify(expected, found, timeout_seconds=None))


def warm_up() -> None:
    """Load grammars and caches, so that the first completion's time limit does not pay for them."""
    # math-verify warns once that its limits are off, which is our intention.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    assert verify_math("\\boxed{\\frac{1}{2}}", "0.5", {})
