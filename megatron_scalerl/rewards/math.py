"""The verifier `math`: math-verify on the text after thinking.

No text is ever executed as code. math-verify passes text to sympy's `parse_expr`, which evaluates Python, in one
place only: for a match of its regular expression for plain arithmetic, of digits, spaces and `.+-*/^()×÷`, which
cannot form a name. (Python 3.12 treats digits of other scripts as names, which sympy quotes as Symbols.) All other
text is parsed by a grammar (latex2sympy2), whose names become sympy Symbols and Functions.
tests/rewards/test_math_attacks.py checks what Python compiles.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

TAIL = 10_000
"""In an answer without a box, the last expression is searched in this many characters at its end."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace or an escaped character: an escaped brace does not group."""
_FORMULA_START = ("$", "\\(", "\\[")
_TO_FORMULA_END = re.compile(r"[^\n$]+?(?=\$|\\\)|\\\])")
_WORD = re.compile(r"(?:(?!\\\)|\\\])[^\s$])+")
_THOUSANDS, _IN_THOUSANDS = re.compile(r"(?<=\d) (?=\d)"), re.compile(r"-?\d{1,3}( \d{3})+(\.\d+)?")
_MIXED = re.compile(r"^\s*(\d+) (\d+)/(\d+)\s*$")
_BARE = re.compile(
    r"\\(?:text[a-z]*|mathrm|operatorname|mbox)\*?\s*\{[^{}]*\}"
    r"|(?<![\\A-Za-z])(pi|ln|log|exp|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh)(?![A-Za-z])"
)
"""Texts of LaTeX, which stay, and names that math-verify would read as products of their letters."""
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")
"""1e-07, as Python writes a small number, which math-verify would read as 1 times e minus 7."""
_MARKED = re.compile(
    r"<answer>((?:(?!<answer>).)*?)</answer>|^####(?!#)[ \t]*([^\n]+)\s*\Z", re.DOTALL | re.MULTILINE
)
_CHOICE = re.compile(r"\(? ?[A-J](?::| ?[.)])\s+[^=\n]+")
_STYLE = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|sf)|boxed|fbox)(?![a-z])|\\[ ,;:!]|[{}$~\s]")
"""What may stand around the letter of a choice, as in \\textbf{(B)}\\ 12."""
_NO_ANSWER = re.compile(r"[Nn]o\.?|N/A|\d{4}-\d\d?-\d\d?|\d\d?/\d\d?/\d{4}|\d\d?:(0\d|\d\d ?[ap]\.?m\.?|\d\d:\d\d)")
"""References that math-verify reads as products, quotients and differences."""
_NUMBER = re.compile(r"-?\d{1,30}(\.\d{1,30})?")
_LATEX = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mbox|hbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+"
)
"""Texts, environments and commands of LaTeX."""
_WORDS = re.compile(r"[^\W\d_]{3,}")
_FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "exp")
    + ("sqrt", "abs", "min", "max", "mod", "pmod", "gcd", "lcm", "inf", "infty", "infinity", "det", "deg")
    + ("and", "percent")
)
_FEW, _PARSE_S, _LONGEST = 200, 5, 2000
"""References that one process parses, and seconds and characters of one of them."""
_PERCENT = re.compile(r"\s*(?:\$|\\\)|\\\])\s*(\\?%|[Pp]ercent(?:age)?|[Pp]ct)")


def extract_answer(text: str, think_end: str) -> str | None:
    """The text after the first closing think tag, or None if thinking did not end."""
    _, tag, answer = text.partition(think_end)
    return answer if tag else None


def last_box(text: str) -> str | None:
    """The last \\boxed or \\fbox of a text as "\\boxed{content}", or None if there is none.

    A nested box is part of the outer one, and an unclosed one does not count. A box without braces contains the rest
    of its formula if it begins it, else the next word. A percent sign after the formula with the box is kept.
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
    """Position of each opening brace that is closed -> position of its closing brace."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def verify_math(answer_text: str, reference: str, extra: dict[str, Any]) -> bool:
    """True if the answer equals the reference.

    The answer is the last \\boxed{}: "\\boxed{3}, no, \\boxed{5}" is 5, and a set of solutions must be in one box.
    Without a box it is the last <answer>34</answer> or "#### 34", else the last expression or formula that
    math-verify finds in the last TAIL characters ("The answer is 34."). The reference may be a bare number or
    expression, LaTeX with or without dollars, contain a \\boxed{}, or end in "#### 34".

    math-verify's own time limits are off, since they use signals: the pool kills a check that takes too long, as
    one of 9^(9^9) does.
    """
    del extra
    expected = parsed_reference(reference)
    # Imported here: both import sympy, which only the verifier processes need.
    from math_verify import parse, verify

    answer, marked = last_box(answer_text), None
    if answer is None and (marks := _MARKED.findall(answer_text)):
        marked = next(filter(None, marks[-1]), "")[-TAIL:]
        found = [] if _has_words(marked) else parsed_reference(marked)
    if marked is None or _is_text(found):
        found = parse(_spelled(answer) if answer else marked or answer_text[-TAIL:], parsing_timeout=None)
    return bool(verify(expected, found, timeout_seconds=None))


def parsed_reference(reference: str, timeout_s: int | None = None) -> list[Any]:
    """What math-verify reads in a reference. timeout_s: of the main thread alone, by a signal; None: no limit."""
    from math_verify import parse

    text = _stated(reference)
    text = text.replace("\\$", "")  # an escaped dollar is an amount of money, no delimiter
    text = _THOUSANDS.sub("", text) if _IN_THOUSANDS.fullmatch(text) else text
    text = _MIXED.sub(r"\1+\\frac{\2}{\3}", text)  # which would be read as a product
    text = _spelled(text)
    delimited = "$" in text or "\\boxed" in text
    expected: list[Any] = parse(text if delimited else f"\\boxed{{{text}}}", parsing_timeout=timeout_s)
    return expected


def _spelled(text: str) -> str:
    """An expression with functions and powers of ten as LaTeX has them."""
    text = _BARE.sub(lambda name: f"\\{name[1]} " if name[1] else name[0], text)
    return _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)


def _stated(reference: str) -> str:
    """A reference, or the answer of one that is a worked solution: its last box, or what stands after ####."""
    _, mark, after = reference.rpartition("####")
    text = after.strip()
    if mark:
        text = text.partition("\n")[0]  # MetaMathQA adds a sentence
    return (last_box(text) if _has_words(text) else None) or text


def _is_text(parsed: Sequence[Any]) -> bool:
    """What math-verify returns where it reads nothing as mathematics."""
    return all(isinstance(part, str) for part in parsed)


def _has_words(text: str) -> bool:
    return any(word.lower() not in _FUNCTIONS for word in _WORDS.findall(_LATEX.sub(" ", text)))


def check_references(references: Sequence[str]) -> list[str]:
    """For each reference why no answer can be scored right against it; empty for those that are mathematical objects.

    Plain numbers are not parsed. Many others are parsed in several processes: each takes about 10 ms.
    """
    rest = sorted({text for text in references if not _NUMBER.fullmatch(text)})
    if len(rest) < _FEW:
        reasons = [_problem_of(text) for text in rest]
    else:
        with ProcessPoolExecutor(
            min(8, len(os.sched_getaffinity(0))), mp_context=multiprocessing.get_context("spawn")
        ) as pool:
            reasons = list(pool.map(_problem_of, rest, chunksize=64))
    problems = dict(zip(rest, reasons))
    return [problems.get(text, "") for text in references]


def _problem_of(reference: str) -> str:
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    said = f"expected a number, an expression or LaTeX, found {reference[:60]!r}"
    reference = _stated(reference)
    if len(reference) > _LONGEST:
        return f"{said}, {len(reference)} characters"
    if _NO_ANSWER.fullmatch(reference.strip()) or _CHOICE.fullmatch(_STYLE.sub(" ", reference).strip()):
        return f"{said}, which is a date, a time, or a choice with its text (give the letter alone)"
    if _has_words(reference):
        return f"{said}, which is text"
    try:
        if isinstance(json.loads(reference), (dict, bool)) or json.loads(reference) is None:
            return f"{said}, which is JSON"
    except (ValueError, RecursionError):
        pass
    parsed = parsed_reference(reference, _PARSE_S)
    if _is_text(parsed):
        return f"{said}, which math-verify cannot parse"
    from math_verify import verify

    return "" if verify(parsed, parsed, timeout_seconds=_PARSE_S) else f"{said}, which does not equal itself"


def warm_up() -> None:
    """Load grammars and fill caches, so that this does not count against the first check's time limit."""
    # math-verify warns once that its time limits are off, which is intended.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    assert verify_math("\\boxed{\\frac{1}{2}}", "0.5", {})
