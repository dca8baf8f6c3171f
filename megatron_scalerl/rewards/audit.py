"""The built-in second judge for the verifier `math` (`validation.audit`): confirms answers that are plainly right.

The judge uses no part of math-verify. The last box, `<answer>` tag, `####` line or number of an answer has to be the
reference: the same written-out number, or equal text. If the verifier accepts an answer that the judge does not
confirm, a person should look at the answer.
"""

import re
from typing import Any

from megatron_scalerl.rewards.math import last_box, last_mark, stated_reference
from megatron_scalerl.rewards.math_answer import compact_form, numeral_value
from megatron_scalerl.rewards.math_text import split_unit, whole_answer

TAIL = 2000
"""Number of characters at the end of an answer in which the judge searches for a number."""
_NUMBER = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_LAST_NUMBER = re.compile(
    rf"-?\s?(?:\\[dt]?frac\s*(?:\{{-?\d+\}}|\d)\s*(?:\{{\d+\}}|\d)|{_NUMBER}(?:\s?/\s?{_NUMBER})?)"
    rf"(?:\s?(?:\\times|\\cdot|[x×*])\s?10\^\{{?-?\d+\}}?|[eE][-+]?\d+)?(?:\s?\\?%)?"
)
_UNFINISHED_TEXT = re.compile(
    r"(?:[\d)}]\s*(?:[-+*/^×÷·(,]|\\times|\\cdot|\\div|\bor\b|\band\b)|\\sqrt\{?|\^\{?)\s*$"
)
"""Matches the text before a number that is only an operand or an alternative, as 4 is in "3 + 4" or "3 or 4"."""


def confirm_math(answer_text: str, reference: str, extra: dict[str, Any]) -> bool:
    """True if the last answer in a text equals the reference: as a number or, if the reference has none, as text."""
    del extra
    stated = whole_answer(stated_reference(reference))
    box = last_box(answer_text)
    answer = answer_text[-TAIL:]
    if box is not None or last_mark(answer_text):
        answer = (last_mark(answer_text) if box is None else box) or ""
    expected = numeral_value(split_unit(stated)[0])
    if expected is None:
        expected_text = compact_form(stated).casefold().strip(".()")
        stated_text = compact_form(whole_answer(answer)).casefold().strip(".()")
        return stated_text == expected_text or (box is None and stated_text.endswith(expected_text))
    last_number = None
    for number in _LAST_NUMBER.finditer(answer):
        last_number = number
    if last_number is None or _UNFINISHED_TEXT.search(answer[: last_number.start()]):
        return False
    value = numeral_value(whole_answer(last_number[0].replace("/ ", "/").replace(" /", "/")))
    if value is None:
        return False
    rounded = len(last_number[0].partition(".")[2]) >= 6 and abs(value - expected) <= abs(expected) / 10**5
    in_percent = "%" in stated + last_number[0] and value in (100 * expected, expected / 100)
    return value == expected or rounded or in_percent
