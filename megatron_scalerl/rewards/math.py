"""The verifier `math`: math-verify on the text after thinking.

No text is ever executed as code. math-verify passes text to sympy's `parse_expr`, which evaluates Python, in one
place only: for a match of the regular expression for plain arithmetic, of digits, spaces and `.+-*/^()×÷`, which
cannot form a name. (Python 3.12 treats digits of other scripts as names, which sympy quotes as Symbols.) All other
text is parsed by a grammar (latex2sympy2), whose names become sympy Symbols and Functions.
tests/rewards/test_math_attacks.py checks what Python compiles.
"""

import logging
import multiprocessing
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from megatron_scalerl.processes.parent_death import die_with_parent
from megatron_scalerl.rewards.math_answer import (
    compact_form,
    is_denied,
    is_numeral,
    is_open,
    last_members,
    leaves_number,
    open_box,
    repeats,
    stated_number,
    statement,
    without_delimiters,
)
from megatron_scalerl.rewards.math_compare import NOTHING, Reading, is_equal, is_text, number_forms, parts_of, read
from megatron_scalerl.rewards.math_text import latex, split_unit, whole_answer

TAIL = 10_000
"""Number of characters at the end of an answer; without a box, only this text is searched for the last expression."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""Matches a brace, or an escaped character, which the caller skips, as an escaped brace opens and closes nothing."""
_FORMULA_START = ("$", "\\(", "\\[")
_TO_FORMULA_END = re.compile(r"[^\n$]+?(?=\$|\\\)|\\\])")
_WORD = re.compile(r"(?:(?!\\\)|\\\])[^\s$])+")
_MARKED_ANSWER = re.compile(
    r"<answer>((?:(?!<answer>).)*?)</answer>|^####(?!#)[ \t]*([^\n]+)\s*\Z", re.DOTALL | re.MULTILINE
)
_CHOICE = re.compile(r"\(? ?[A-J](?::| ?[.)])\s+[^=\n]+")
_STYLE = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|sf)|boxed|fbox)(?![a-z])|\\[ ,;:!()\[\]]|[{}$~*\s]")
"""Matches commands and signs that may stand around a word or the letter of a choice, as in \\textbf{(B)}\\ 12."""
_LETTER = re.compile(r"\(? ?([A-J]) ?(?:\)|[.:,;](?!\d)|$)(?!.*(?<![A-Za-z])[A-J](?![A-Za-z]))")
"""Matches the letter of a choice, as in (B), with or without the choice's text, if no second letter follows."""
_NAME = re.compile(r"\([A-J]\)|[^\W\d_]+(?:[ '-][^\W\d_]+)*")
_STATEMENT = re.compile(r"(?:[Aa]nswer|[Oo]ption|[Cc]hoice)[*_\s]*(?:is|:)([^\n]*)")
_NO_ANSWER = re.compile(
    r"(?i:n/a|none|nan|null|proof|unknown|not ?found|omitted)\.?|[\[{]\s*\".*|\[\s*\]"
    r"|\d{4}-\d\d?-\d\d?|\d\d?/\d\d?/\d{4}|\d\d?:(0\d|\d\d ?[ap]\.?m\.?|\d\d:\d\d)"
)
"""Matches a reference such as n/a or null, a date or a time, which math-verify would read as an expression."""
_NUMBER = re.compile(r"-?(?:[0-9]{1,30}(?:\.[0-9]{1,30})?|\\[dt]?frac\{[0-9]{1,30}\}\{[1-9][0-9]{0,29}\})")
_LATEX = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mbox|hbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+"
)
"""Matches texts, environments and commands of LaTeX: a word inside does not make a reference a text."""
_DIGIT = re.compile(r"[0-9](?![0-9])")
_NOT_COMPUTED = re.compile(
    r"\^[\s{(]*[^\s{}()]*(?:\^|\d{5})|\d{5}[)\s]*!|![)\s]*!|\\?(?:[lr]?floor|[lr]?ceil|max|min|mod)(?![a-z])"
)
"""Matches powers and factorials that take long to compute, and functions such as floor, with equal values for several
numbers.

`check_references` skips the comparisons of a reference in which the pattern matches.
"""
_WORDS = re.compile(r"[^\W\d_]{3,}|(?!ln)[^\W\d_]{2} [^\W\d_]{2}")
_FUNCTION = re.compile(
    r"sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|exp|sqrt|abs|min|max|mod|pmod|gcd|lcm|inf|infty"
    r"|infinity|det|deg|and|percent"
)
_LIST = re.compile(r"[,;]|\\[{}]|\\cup|\\pm|\\in(?![a-z])|\\begin|\b(?:and|or)\b|\\text")
"""Matches signs of several values, such as a comma, a union or a plus-minus sign.

An expression with a match is not read as a chain a = b. If the reference has a match, several formulas of a sentence
together may be the answer.
"""
_OPERATORS = re.compile(r"\\(?:int|sum|prod|lim)(?![a-z])|\\frac\{?d\}?\{?d|/dx")
"""Matches integrals, sums, products, limits and derivatives: an answer with a match is still to be computed."""
_FORMULA = re.compile(r"\$[^$]+\$|\\\([^$]{1,500}?\\\)")
_FEW = 200
"""Smallest number of references that several processes parse, instead of this process alone."""
_PARSE_S = 5
"""Time limit to parse a reference (s)."""
_LONGEST = 2000
"""Largest number of characters of a reference; a longer reference is refused."""
_PERCENT = re.compile(r"\s*(?:\$|\\\)|\\\])\s*(\\?%|[Pp]ercent(?:age)?|[Pp]ct)")


def extract_answer(text: str, think_end: str) -> str | None:
    """The text after the first closing think tag; None if thinking did not end."""
    _, tag, answer = text.partition(think_end)
    return answer if tag else None


def last_box(text: str) -> str | None:
    """The content of the last \\boxed or \\fbox of a text, None without a box (`_found_box`)."""
    return _found_box(text)[1]


def _found_box(text: str) -> tuple[int, str | None, int]:
    """(start, content, end) of the last \\boxed or \\fbox in a text; the content is None without a box.

    A nested box is part of the outer box, and an unclosed box does not count. A box without braces at the start of a
    formula contains the whole formula, and elsewhere the next word. The content includes a percent sign that follows
    the formula with the box.
    """
    closing = _closing_braces(text)
    content = None
    begin = 0
    box_end = 0
    end = 0
    while (box := _BOX.search(text, end)) is not None:
        opening = end = box.end()
        if text[opening : opening + 1] == "{":
            if opening in closing:
                end = closing[opening]
                content = text[opening + 1 : end]
                begin = box.start()
                box_end = end + 1
            continue
        begins_formula = text[max(0, box.start() - 2) : box.start()].endswith(_FORMULA_START)
        unbraced = (begins_formula and _TO_FORMULA_END.match(text, opening)) or _WORD.match(text, opening)
        if unbraced:
            content = unbraced.group().rstrip(".,;:")
            begin = box.start()
            box_end = unbraced.end()
    if content is not None and _PERCENT.match(text, box_end):
        content = f"{content}\\%"
    return begin, content, box_end


def last_mark(text: str) -> str | None:
    """The content of the last <answer>34</answer> or "#### 34", at most TAIL characters; None without either."""
    marks = _MARKED_ANSWER.findall(text)
    return next(filter(None, marks[-1]), "")[-TAIL:] if marks else None


def is_number(reference: str) -> bool:
    """Whether a reference is a written-out number; then only a written-out number can be the right answer."""
    return is_numeral(split_unit(whole_answer(stated_reference(reference)))[0])


def _closing_braces(text: str) -> dict[int, int]:
    """Position of each closed opening brace -> position of the closing brace."""
    closing = {}
    opened = []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def verify_math(answer_text: str, reference: str, extra: dict[str, Any]) -> bool:
    """True if the answer equals the reference.

    The answer is the last \\boxed{}: "\\boxed{3}, no, \\boxed{5}" is 5, and a set of solutions must be in one box.
    Without a box the answer is the last <answer>34</answer> or "#### 34", else the content of the last statement in
    the last TAIL characters ("The answer is 34."; `math_answer.statement`). The reference may be a bare number or
    expression, LaTeX with or without dollars, contain a \\boxed{}, or end in "#### 34".

    If the reference is a number, only a numeral can be right, and the text beside the numeral must neither leave the
    number open nor contradict the number. For any other reference an equal expression is right. An expression that
    stands in the question (`extra["prompt"]`) and is not written as the reference is wrong. docs/tasks.md has a table
    of forms that answers may have.

    If the reference is a word or the letter of a choice, the box has to be the same word or letter, or the word or
    letter has to follow "The answer is". math_compare.py and docs/tasks.md say how numbers, units and sets are
    compared.

    math-verify's own time limits, which use signals, are off: the pool kills a process whose check takes too long,
    such as a check of 9^(9^9).
    """
    stated = stated_reference(reference)
    begin, box, box_end = _found_box(answer_text)
    answer = box
    if box is None:
        answer = last_mark(answer_text)
    end = answer_text[-TAIL:]
    if box is not None and open_box(answer_text[:begin], answer_text[box_end:], box):
        return False
    _, end_tag, text_after = answer_text.rpartition("</answer>")
    if box is None and end_tag and open_box("", text_after, answer or ""):
        return False
    if name := _name(stated):
        statements = _STATEMENT.findall(end) or [end]
        if not answer and is_denied(statements[-1]):
            return False
        return _says(answer or statements[-1], name)
    if is_number(stated):
        candidates = _numerals(end if box is None and not answer else answer or "", stated, box is not None)
    else:
        candidates = _expressions(answer or end, stated, is_answer=bool(answer))
    question = str(extra.get("prompt", ""))
    expected = read(stated)
    for text, reading in candidates:
        if _leaves_work(text, stated) or repeats(whole_answer(text), stated, question):
            continue
        both_signs = "\\pm" in stated and is_equal(read(_both_signs(stated)), read(_both_signs(text)))
        if both_signs or is_equal(expected, reading):
            return True
    return False


def _leaves_work(text: str, reference: str) -> bool:
    """Whether an answer leaves something to compute, such as an integral or a sum, and the reference does not."""
    if _OPERATORS.search(text) and not _OPERATORS.search(reference):
        return True
    parts = _parts(text)
    references = _parts(reference)
    return len(parts) == len(references) > 1 and all(map(is_numeral, references)) and not all(map(is_numeral, parts))


def _parts(text: str) -> list[str]:
    """The members of a list, a tuple, a set, an interval or a matrix."""
    inner = re.sub(r"\\(?:begin|end)\{\w+\}|\\(?:left|right)|[a-z]\s*=|\$", "", whole_answer(text)).strip()
    bracketed = re.fullmatch(r"\\?[\[({](.*?)\\?[\])}]", inner, re.DOTALL)
    return [part.strip() for part in re.split(r"[,;&]|\\\\", bracketed[1] if bracketed else inner)]


def _both_signs(text: str) -> str:
    """The two values of an expression with one plus-minus sign, separated by a comma; else the text, unchanged."""
    if text.count("\\pm") != 1:
        return text
    return ", ".join(text.replace("\\pm", sign) for sign in ("+", "-"))


def _numerals(text: str, reference: str, is_answer: bool) -> Iterator[tuple[str, Reading]]:
    """(numeral, math-verify's reading) of each numeral that a text gives as the answer.

    is_answer: the text is the content of a box, and so the answer and nothing else.
    """
    own_form = compact_form(text) == compact_form(reference)
    numerals = [member for member in _members(text) if own_form or is_numeral(split_unit(member)[0])]
    if not numerals and not is_answer:
        expression, words = stated_number(text, exact="." not in reference)
        for stated_text, unit in ((expression + words, True), (expression, False)):
            if not numerals and leaves_number(words, unit):
                numerals = [member for member in _members(stated_text) if is_numeral(split_unit(member)[0])]
    for member in numerals:
        yield member, read(member)


def _members(text: str) -> tuple[str, ...]:
    inner = last_box(text)
    return last_members(whole_answer(without_delimiters(text if inner is None else inner)))


def _expressions(text: str, reference: str, is_answer: bool) -> Iterator[tuple[str, Reading]]:
    """(expression, math-verify's reading) of each expression that a text gives as the answer.

    is_answer: whether the text is from a box, <answer> or ####; without words, the whole text is then the answer.
    """
    has_list = _LIST.search(reference)
    if is_answer and not _has_words(split_unit(text)[0]):
        members: tuple[str, ...] = (text,)
        if "=" not in reference and not _LIST.search(text):
            members = last_members(text)
        readings = [(member, read(member)) for member in members]
        if not all(is_text(reading) for _, reading in readings):
            yield from readings
            return
        if is_answer and not members:
            return
    sentence = statement(text)
    formulas = list(_FORMULA.finditer(sentence))
    if is_denied(sentence):
        return
    if not formulas:
        stated_text = re.split(r"(?:\b(?:is|are)\b|:)\s", sentence)[-1].strip(" .")
        if not _has_words(stated_text) and not is_text(read(stated_text)):
            yield stated_text, read(stated_text)
            return
    if formulas and not has_list:
        last = formulas[-1]
        if is_open(sentence[: last.start()], sentence[last.end() :]):
            return
        sentence = last.group()
        if "=" not in reference:
            for member in last_members(without_delimiters(sentence)):
                yield member, read(member)
            return
    yield sentence, NOTHING._replace(whole=parts_of(latex(sentence)))


def stated_reference(reference: str) -> str:
    """The reference itself, or the answer in a worked solution: the content of the last box, or text after ####."""
    _, mark, text_after = reference.rpartition("####")
    text = text_after.strip()
    if mark:
        text = text.partition("\n")[0]  # MetaMathQA has a further sentence after the line with ####
    if _has_words(text):
        return last_box(text) or text
    return text


def _unstyled(text: str) -> str:
    return " ".join(_STYLE.sub(" ", whole_answer(text)).split()).strip(" .,;:")


def _name(reference: str) -> str:
    """A reference that is a word, a text or the letter of a choice, in the form for comparison; else empty."""
    bare_text = _unstyled(reference)
    if not _NAME.fullmatch(bare_text):
        return ""
    is_text = not _LATEX.sub("", reference).strip("$ ")
    is_word = " " not in bare_text and (_has_words(bare_text) or bare_text.casefold() in ("yes", "no"))
    is_letter = _LETTER.fullmatch(bare_text)
    return _singular(bare_text.strip("()")) if is_text or is_word or is_letter else ""


def _singular(text: str) -> str:
    """A word without a leading article and without the s of a plural, in small letters."""
    word = re.sub(r"^(?:an?|the) (?=..)", "", text.casefold())
    return re.sub(r"(?<=[a-z]{3}[^s])s$", "", word)


def _says(text: str, name: str) -> bool:
    """True if a text is the word `name` and nothing more, or the letter `name` of a choice, with or without the
    choice's text."""
    bare_text = _unstyled(text)
    letter = _LETTER.match(bare_text)
    return name in (_singular(bare_text), letter and letter[1].casefold())


def _has_words(text: str) -> bool:
    return any(not _FUNCTION.fullmatch(word.lower()) for word in _WORDS.findall(_LATEX.sub(" ", text)))


def check_references(references: Sequence[str]) -> list[str]:
    """For each reference, the reason why answers cannot be compared with the reference; empty if usable.

    A reference has to compare as equal to the same text and to the same value as fraction and decimal, and as
    different from a neighbour, in which one number is changed. Plain numbers, words and letters need no such try. A
    reference takes about 20 ms of a CPU, so several processes share many references.
    """
    other_references = sorted({text for text in references if not _NUMBER.fullmatch(text)})
    if len(other_references) < _FEW:
        reasons = [_problem_of(text) for text in other_references]
    else:
        with ProcessPoolExecutor(
            min(8, len(os.sched_getaffinity(0))),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=die_with_parent,
            initargs=(os.getpid(),),
        ) as pool:
            reasons = list(pool.map(_problem_of, other_references, chunksize=64))
    problems = dict(zip(other_references, reasons))
    return [problems.get(text, "") for text in references]


def _problem_of(reference: str) -> str:
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    shown_reference = repr(reference[:60])
    reference = stated_reference(reference)
    if len(reference) > _LONGEST:
        return f"{shown_reference} has {len(reference)} characters; a reference may have at most {_LONGEST}"
    if _NO_ANSWER.fullmatch(reference.strip()) or _CHOICE.fullmatch(_STYLE.sub(" ", reference).strip()):
        return f"{shown_reference} is a date, a time, a missing answer, or a choice with text (give the letter alone)"
    if _name(reference):
        return ""
    text = whole_answer(reference)
    if _has_words(split_unit(text)[0]):
        return f"{shown_reference} is text; give a number, an expression or LaTeX"
    expected = read(reference, _PARSE_S)
    if is_text(expected):
        return f"{shown_reference} cannot be parsed by math-verify; give a number, an expression or LaTeX"
    if _NOT_COMPUTED.search(reference):
        return ""
    for form in (reference.strip("$"), *number_forms(expected)):
        if not is_equal(expected, read(form, _PARSE_S), _PARSE_S):
            return f"{shown_reference} and {form[:60]!r} do not compare as equal; a right answer might get no reward"
    other_text = _DIGIT.sub(lambda digit: str((int(digit[0]) + 1) % 10), text, 1)
    for neighbour in number_forms(expected, 1) or {other_text} - {text}:
        if is_equal(expected, read(neighbour, _PARSE_S), _PARSE_S):
            return f"{shown_reference} and {neighbour[:60]!r} compare as equal; a wrong answer might get a reward"
    return ""


def warm_up() -> None:
    """Load math-verify's grammars and fill caches now, since the first check has a time limit."""
    # The log level hides math-verify's warning that the time limits are off, as intended.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    assert verify_math("\\boxed{\\frac{1}{2}}", "0.5", {})
