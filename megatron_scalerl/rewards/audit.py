"""The second judge of the verifier `math` (`validation.audit`), which confirms what is plainly right.

It has no part of math-verify: the last box, mark or number of an answer is compared with the reference as a number
that is written out, or as the same text. What the first judge pays and this one does not confirm is a reason to read.
"""

import re
from typing import Any

from megatron_scalerl.rewards.math import last_box, last_mark, stated_reference
from megatron_scalerl.rewards.math_answer import numeral_value, plain
from megatron_scalerl.rewards.math_text import split_unit, whole_answer

TAIL = 2000
"""Characters at the end of an answer in which a number is searched."""
_NUMBER = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_LAST_NUMBER = re.compile(
    rf"-?\s?(?:\\[dt]?frac\s*(?:\{{-?\d+\}}|\d)\s*(?:\{{\d+\}}|\d)|{_NUMBER}(?:\s?/\s?{_NUMBER})?)"
    rf"(?:\s?(?:\\times|\\cdot|[x×*])\s?10\^\{{?-?\d+\}}?|[eE][-+]?\d+)?(?:\s?\\?%)?"
)
_OPEN = re.compile(r"(?:[\d)}]\s*(?:[-+*/^×÷·(,]|\\times|\\cdot|\\div|\bor\b|\band\b)|\\sqrt\{?|\^\{?)\s*$")
"""Text before a number that leaves something to compute or to choose."""


def confirm_math(answer_text: str, reference: str, extra: dict[str, Any]) -> bool:
    """True if the answer that a text ends with is plainly the reference."""
    del extra
    stated = whole_answer(stated_reference(reference))
    box = last_box(answer_text)
    answer = answer_text[-TAIL:]
    if box is not None or last_mark(answer_text):
        answer = (last_mark(answer_text) if box is None else box) or ""
    expected = numeral_value(split_unit(stated)[0])
    if expected is None:
        wanted = plain(stated).casefold().strip(".()")
        said = plain(whole_answer(answer)).casefold().strip(".()")
        return said == wanted or (box is None and said.endswith(wanted))
    last = None
    for number in _LAST_NUMBER.finditer(answer):
        last = number
    if last is None or _OPEN.search(answer[: last.start()]):
        return False
    value = numeral_value(whole_answer(last[0].replace("/ ", "/").replace(" /", "/")))
    if value is None:
        return False
    rounded = len(last[0].partition(".")[2]) >= 6 and abs(value - expected) <= abs(expected) / 10**5
    in_percent = "%" in stated + last[0] and value in (100 * expected, expected / 100)
    return value == expected or rounded or in_percent
