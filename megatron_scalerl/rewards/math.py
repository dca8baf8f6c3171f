"""The verifier `math`: math-verify on the text after thinking.

From text to code there is no way. math-verify hands text to sympy's `parse_expr`, which evaluates Python, in one
place: for a match of its regular expression for plain arithmetic, of digits, blanks and `.+-*/^()×÷` alone, in which
no name can be written. (Digits of other scripts are names to Python 3.12, which sympy quotes as Symbols.) Everything
else goes through a grammar (latex2sympy2), whose names become sympy Symbols and Functions.
tests/rewards/test_math_attacks.py watches what Python compiles.
"""

from __future__ import annotations

import logging
import re
from typing import Any

TAIL = 10_000
"""Characters at the end of an answer without a box in which its last expression is looked for."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or what is escaped: such a brace groups nothing."""
_FORMULA_START = ("$", "\\(", "\\[")
_TO_FORMULA_END = re.compile(r"[^\n$]+?(?=\$|\\\)|\\\])")
_WORD = re.compile(r"(?:(?!\\\)|\\\])[^\s$])+")
_PERCENT = re.compile(r"\s*(?:\$|\\\)|\\\])\s*(\\?%|[Pp]ercent(?:age)?|[Pp]ct)")


def extract_answer(text: str, think_end: str) -> str | None:
    """The text after the first closing think tag, or None if thinking never ended."""
    _, tag, answer = text.partition(think_end)
    return answer if tag else None


def last_box(text: str) -> str | None:
    """The last \\boxed or \\fbox of a text as "\\boxed{content}", or None if there is none.

    A box within a box belongs to it, and one that is never closed is none. A box without braces holds the rest of its
    formula if it begins it, else the next word. A percent sign behind the formula that holds the box stays.
    """
    closing = _closing_braces(text)
    content, end = None, 0
    while (box := _BOX.search(text, end)) is not None:
        opening = end = box.end()
        if text[opening : opening + 1] == "{":
            if opening in closing:
                end = closing[opening]
                content, behind = text[opening + 1 : end], end + 1
            continue
        begins_formula = text[max(0, box.start() - 2) : box.start()].endswith(_FORMULA_START)
        held = (begins_formula and _TO_FORMULA_END.match(text, opening)) or _WORD.match(text, opening)
        if held:
            content, behind = held.group().rstrip(".,;:"), held.end()
    if content is None:
        return None
    percent = _PERCENT.match(text, behind)
    return f"$\\boxed{{{content}}}$\\%" if percent else f"\\boxed{{{content}}}"


def _closing_braces(text: str) -> dict[int, int]:
    """Position of the closing brace for each opening one that has one."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def verify_math(answer_text: str, reference: str, extra: dict[str, Any]) -> bool:
    """True if the last \\boxed{} of the answer, or its last expression or formula, equals the reference.

    A box counts before all else, and only the last one: "\\boxed{3}, no, \\boxed{5}" answers 5, and a set of
    solutions belongs into one box. Without a box it is what math-verify finds in the last TAIL characters. The
    reference may be a bare number or expression, LaTeX with or without dollars, or hold a \\boxed{}.

    math-verify's own time limits are off, since they need signals: the pool kills what takes too long. Numbers too
    large to be written out are not evaluated if they are proven to differ (magnitude.py).
    """
    del extra
    # Imported here: both take sympy along, which only the verifier processes need.
    from math_verify import parse, verify

    from megatron_scalerl.rewards.magnitude import proven_unequal

    delimited = "$" in reference or "\\boxed" in reference
    expected = parse(reference if delimited else f"\\boxed{{{reference}}}", parsing_timeout=None)
    found = parse(last_box(answer_text) or answer_text[-TAIL:], parsing_timeout=None)
    return not proven_unequal(expected, found) and bool(verify(expected, found, timeout_seconds=None))


def warm_up() -> None:
    """Load grammars and caches, so that the first completion's time limit does not pay for them."""
    # math-verify warns once that its limits are off, which is our intention.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    assert verify_math("\\boxed{\\frac{1}{2}}", "0.5", {})
