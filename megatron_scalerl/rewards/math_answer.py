r"""Finds the answer in a text, and tells whether the answer is finished: nothing is left to compute or to choose.

math-verify evaluates expressions (9 + 5 is 14) and accepts any expression of a text. A policy that is trained on such
verdicts learns to repeat the question ("94 - 58 is an arithmetic operation."). Here only a written-out number counts.

>>> [is_numeral(text) for text in ("14", r"\frac{6}{4}", "1.4 x 10^1", "9 + 5", r"\frac{28}{2}", "4^5")]
[True, True, True, False, False, False]
>>> [stated_number(text) for text in ("So 9 + 5 = 14 apples.", "It is 14. Wait, it is 15.", "13 or 14", "14?")]
[('9 + 5 = 14', ' apples'), ('15', ''), ('', ''), ('', '')]
>>> last_members("x = 28/2 = 14"), last_members("13 = 14"), last_members(r"\frac{1}{3} \approx 0.33")
(('14',), (), ('0.33', '\\frac{1}{3}'))
"""

import re
from fractions import Fraction
from itertools import pairwise

_SPACE = re.compile(r"(?:\s|~|\\[,;:! ]|\\(?:left|right)(?![a-z]))+")
_DIGITS = r"\d+(?:,\d{3})*"
_PAIR = rf"\\[dt]?frac(?:\{{(-?{_DIGITS})\}}|(\d))(?:\{{(-?{_DIGITS})\}}|(\d))|({_DIGITS})/({_DIGITS})"
_NUMERAL = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<whole>{_DIGITS})?(?:{_PAIR})|(?P<decimal>{_DIGITS}(?:\.\d*)?|\.\d+))?"
    r"(?P<power>(?:(?:\\cdot|\\times|[*x])?10\^(?:\{?(-?\d{1,4})\}?))|\\cdot\{12\})?(?P<percent>\\?%)?"
)
"""Matches an integer, decimal, fraction or mixed number, perhaps with a power of ten (or a dozen) and a percent sign.

The text must have no spaces.
"""
_LINK = re.compile(r"(?<![<>!:\\])(=)(?!=)|(\\approx(?![a-z])|\\simeq(?![a-z])|≈)")
_MATH_SIGN = r"[-−–+*/^=×÷·⋅√π½⅓⅔¼¾⅛%€£¥₹°≈|!()\[\]{}]|\\[%$]|\\[a-zA-Z]+|\\[,;:! ]"
_WRITTEN_NUMBER = r"(?:\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
_EXPRESSION = re.compile(
    rf"(?:{_MATH_SIGN}|{_WRITTEN_NUMBER}|[a-zA-Z](?=\s*=))(?:\s*(?:{_MATH_SIGN}|{_WRITTEN_NUMBER}|x(?=\s*\d)))*"
)
"""Matches a run of numbers, mathematical signs and LaTeX commands."""
_SENTENCE_END = re.compile(r"(?<=[.!?])(?=[\s*$]|$)(?<!\d\.(?=\s\d))|\n+")
_DISPLAY = re.compile(r"\$\$([^$]{0,500})\$\$|\\\[((?:[^\\]|\\(?!\])){0,500})\\\]")
_MARKUP = re.compile(
    r"(?<!\w)[*_]{1,3}(?=\S)|(?<=\S)[*_]{1,3}(?!\w)|`|</?[a-z]{1,20}>|^\s*(?:[#>*-]+\s+)?(?:\d{1,3}[.)]\s+(?=\S))?",
    re.MULTILINE,
)
_STATEMENT_WORDS = re.compile(
    r"(?i)\b(?:answer|result|solution|total|value|sum|difference|product|option|choice|it|that)\b[^.]*?"
    r"(?:\b(?:is|are|equals|be|was)\b|[:=])|^\s*\W*(?:so|thus|hence|therefore|no|wait|actually)\b"
)
"""Matches words of a sentence that states the answer's value, such as "the answer is" or "so"."""
_OPEN_WORDS = re.compile(
    r"(?i)\b(?:or|either|neither|nor|not|never|cannot|maybe|perhaps|possibly|probably|might|may|could|guess|unsure"
    r"|unlikely|between|wrong|incorrect|except|but|wait|no)\b|n't\b|n’t\b|\?"
)
"""Matches words beside a number that leave the number open, withdraw the number or offer an alternative."""
_BOUND = re.compile(r"(?:[<>≤≥≠±]|\\(?:[lg]eq?|neq?|pm)(?![a-z])|\bthan)\s*$")
_DENIAL = re.compile(
    r"(?i)\b(?:not (?:sure|certain|right|correct)|never|maybe|perhaps|possibly|guess|unsure|wrong|incorrect)\b|\?"
)
"""Matches words that deny or doubt the answer, anywhere in the answer's sentence."""
_ABOUT_WORDS = re.compile(r"(?i)\b(?:about|around|approximately|roughly|nearly|almost|circa)\b|~|-?ish\b")
_WITHDRAWAL = re.compile(
    r"(?i)\b(?:wait|sorry|oops|correction|then again|wrong|incorrect|mistaken?"
    r"|(?:not|n't|n’t) (?:sure|right|correct|certain)|unsure|maybe|perhaps"
    r"|alternatively|instead|rather|hold on|never ?mind|scratch)\b|^\W*(?:no|or|actually|hmm|not|but)\b"
)
"""Matches words that withdraw the stated answer, in a sentence after the statement."""
_CHANGES_VALUE = re.compile(
    r"(?i)\s*(?:squared|cubed|times|plus|minus|to|halves|half|thirds|quarters|tens|factorial|divided"
    r"|multiplied|negative|alpha|beta|gamma|theta|and|mod(?:ulo)?|over|less|added|increased|decreased|reduced|lakh"
    r"|crore|(?:ten|hundred|thousand|million|billion)ths?)\b|[²³⁴-⁹]"
)
_SPOKEN_SIGNS = {
    r"(?i)\b(?:minus|negative)\s+(?=[\d$\\.])": "-",
    r"(?i)(?<=\d)\s+(?:plus|added to)\s+(?=[\d$\\.])": " + ",
    r"(?i)(?<=\d)\s+(?:times|multiplied by)\s+(?=[\d$\\.])": " * ",
    r"(?i)(?<=\d)\s+(?:divided by|over)\s+(?=[\d$\\.])": " / ",
    r"(?i)(?:\bsquare )?\broot of\s+(?=[\d$\\.])|\bsqrt\s*(?=[\d(])": "√",
    r"(?<=[\d%])\s+\((?=[^()]*[-+*/=a-zA-Z])(?!(?i:or|not|maybe|perhaps)\b)[^()]*\)": "",
}
"""Pattern -> replacement, for a sign that is written as a word and for a remark in brackets behind a number."""
_LIST_SIGN = re.compile(r"\s*(?:[,;&/]|,?\s*\b(?:and|or|to|through)\b)+\s*")
_CLAUSE = re.compile(r"[,;:](?!\d)")
_CLAUSE_END = re.compile(r"[,;:(]")
_FILLING = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])(?![a-z])|[\s$~{}]|(?<=\\)[dt](?=frac)")
_BEFORE_BOX = re.compile(
    r"(?i)(?:\b(?:or|not|never|maybe|perhaps|possibly|either|(?:might|could|may) be|guess|than)\b|n't|n’t)"
    r"(?:\s+(?:is|it|be|equal|to))*[\s$*:(\\]*$|(?<!answer)[<>]\s*\$?\s*$|[\d)}]\s*[-+*/^×·]\s*$|[-√]\$?$|\\sqrt\{$"
)
_BEHIND_BOX = re.compile(
    r"(?i)[\s$*)\]}\\,;]*\(?\s*(?:\b(?:or|but|maybe|perhaps|possibly|is (?:wrong|incorrect|not))\b|=).*", re.DOTALL
)
_COMPUTED_BOX = re.compile(r"\s*(?:[+*/^×·²³]|\\(?:cdot|times|div)(?![a-z])|-\s*\d)(?!\*)")
_CORRECTION = re.compile(
    r"(?i)(?:^|[.!?\n]\s*)\W{0,3}(?:(?:wait|no|actually|correction|sorry|oops)\b[\s,:.!]*)?"
    r"(?:(?:it|that|the (?:final |correct )?answer|i mean)\b[^\n.]{0,20}?(?:is|be|was)\s*:?)[\s$*]*(-?\d+(?:\.\d+)?)"
    r"|\b(?:wait|no|actually|correction|sorry|oops)\b[\s,:.!$]*(-?\d+(?:\.\d+)?)"
)
_SPLIT_DELIMITERS = re.compile(r"(?<!\\)\$+|\\[()\[\]]")


def is_numeral(text: str) -> bool:
    """Whether a text is a written-out number.

    A fraction need not be reduced, but a fraction of integral value (28/2) is a quotient that is still to be
    computed.
    """
    return numeral_value(text) is not None


def numeral_value(text: str) -> Fraction | None:
    """The value of a numeral, whose percent sign is ignored; None for a text that is no numeral."""
    text = _SPACE.sub("", text).strip(".")
    while len(text) > 1 and text[0] in "({" and text[-1] in ")}" and _depths(text)[-2] == 1:
        text = text[1:-1]
    signed = re.fullmatch(r"([+-])[({](.*)[)}]", text)
    if signed:
        text = signed[1] + signed[2]
    if len(text) > 400 or not any(map(str.isdigit, text)):
        return None
    match = _NUMERAL.fullmatch(text)
    if match is None:
        return None
    numbers = [int(group.replace(",", "")) for group in match.groups()[2:8] if group]
    value = Fraction(1)
    if numbers:
        numerator, denominator = numbers
        if denominator == 0 or (numerator % denominator == 0 and denominator != 1):
            return None
        value = int((match["whole"] or "0").replace(",", "")) + Fraction(numerator, denominator)
    elif match["decimal"]:
        value = Fraction(match["decimal"].replace(",", "").rstrip(".") or "0")
    if match["power"]:
        exponent = match.group(11)
        value *= 12 if exponent is None else Fraction(10) ** int(exponent)
    return -value if match["sign"] == "-" else value


def _depths(text: str) -> list[int]:
    """For each character of a text, the number of brackets that are open behind the character."""
    depths = []
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        depths.append(depth)
    return depths


def last_members(text: str) -> tuple[str, ...]:
    """The last member of a chain a = b = c; the last two if the chain ends in an approximation, as in 1/3 ≈ 0.33.

    Empty for a contradictory chain: numbers have to be equal, or to agree to half of the last decimal place if the
    chain has an approximation sign.
    """
    depths = _depths(text)
    members = [""]
    approximate = []
    end = 0
    for link in _LINK.finditer(text):
        if depths[link.start()]:
            continue
        members[-1] = text[end : link.start()].strip()
        members.append("")
        approximate.append(link[2] is not None)
        end = link.end()
    members[-1] = text[end:].strip()
    values = [(numeral_value(member), member) for member in members]
    known_values = [(value, member) for value, member in values if value is not None]
    for (value, member), (next_value, next_member) in pairwise(known_values):
        places = max((len(m.partition(".")[2].rstrip("\\% ")) for m in (member, next_member)), default=0)
        tolerance = Fraction(1, 2 * 10**places) if any(approximate) else 0
        scale = 100 if ("%" in member) != ("%" in next_member) else 1
        if min(abs(value - next_value), abs(scale * value - next_value), abs(value - scale * next_value)) > tolerance:
            return ()
    if approximate and approximate[-1] and members[-2]:
        return members[-1], members[-2]
    return (members[-1],)


def without_delimiters(text: str) -> str:
    r"""A text without the dollars and brackets that delimit formulas: -$34$ is -34."""
    return _SPLIT_DELIMITERS.sub("", text)


def statement(text: str) -> str:
    """The sentence of a text that states the answer; empty without a sentence, or if a later sentence withdraws it.

    The sentence is the last that states the value of the answer ("The answer is 34."), or else the last sentence with
    a number or a formula.
    """
    text = _DISPLAY.sub(lambda formula: " $" + (formula[1] or formula[2] or "").replace("\n", " ") + "$ ", text)
    sentences = [part for part in _SENTENCE_END.split(_MARKUP.sub("", text)) if part and part.strip()]
    stating = -1
    numbered = -1
    for number, sentence in enumerate(sentences):
        if not any(map(str.isdigit, sentence)) and "$" not in sentence and "\\" not in sentence:
            continue
        numbered = number
        if _STATEMENT_WORDS.search(sentence) or is_numeral(without_delimiters(sentence)):
            stating = number
    chosen_number = stating if stating >= 0 else numbered
    if chosen_number < 0 or any(_WITHDRAWAL.search(sentence) for sentence in sentences[chosen_number + 1 :]):
        return ""
    return sentences[chosen_number].strip()


def is_open(text_before: str, text_behind: str) -> bool:
    """Whether the words around an answer leave the answer open, withdraw the answer, or offer an alternative."""
    beside = " ".join(text_behind.split()[:3])
    return bool(
        _OPEN_WORDS.search(_CLAUSE.split(text_before)[-1])
        or _BOUND.search(text_before)
        or _OPEN_WORDS.search(beside)
        or _DENIAL.search(text_behind)
    )


def is_denied(sentence: str) -> bool:
    """Whether a sentence doubts or denies the answer in the sentence."""
    return bool(_DENIAL.search(sentence) or re.search(r"(?i)\bnot\b\s*\$?", sentence.split("$")[0][-12:]))


def stated_number(text: str, exact: bool = True) -> tuple[str, str]:
    """(number, words behind the number) that a text without a box states as the answer; else both are empty.

    The number is the last expression of the `statement`. The words may be a unit. exact: a number beside "about" or
    "approximately" does not count as stated.
    """
    sentence = without_delimiters(statement(text)).rstrip(" .!")
    for pattern, sign in _SPOKEN_SIGNS.items():
        sentence = re.sub(pattern, sign, sentence)
    units = re.sub(r"([a-zA-Z]\}?)(\^\{?[23]\}?)", lambda unit: unit[1] + "_" * len(unit[2]), sentence)
    runs = [run for run in _EXPRESSION.finditer(units) if any(map(str.isdigit, run.group()))]
    if not runs:
        return "", ""
    last = runs[-1]
    text_before = sentence[: last.start()]
    text_behind = sentence[last.end() :]
    listed = len(runs) > 1 and _LIST_SIGN.fullmatch(sentence[runs[-2].end() : last.start()])
    rounded = exact and _ABOUT_WORDS.search(_CLAUSE.split(text_before)[-1] + text_behind)
    # in x14, log14 and a_14 the number 14 is a part of a name
    of_a_word = text_before[-1:].isalpha() or units[last.end() :].startswith("_")
    if listed or rounded or of_a_word or is_open(text_before, text_behind):
        return "", ""
    return sentence[last.start() : last.end()].strip(), _CLAUSE_END.split(text_behind)[0]


def leaves_number(words: str, unit: bool = False) -> bool:
    """Whether the number's value stays the same with the words after the number, as with "apples", not "squared".

    unit: whether a letter may follow the number without a space, as in 5cm.
    """
    return not _CHANGES_VALUE.match(words) and (unit or not re.match(r"[a-zA-Z_!^(]", words))


def compact_form(text: str) -> str:
    """A text without spaces, dollars, braces, and commands of size or space, for the comparison of two texts."""
    return _FILLING.sub("", text)


def _comparison_form(text: str) -> str:
    """A text in `compact_form`, with all fractions and quotients written as a/b."""
    text = re.sub(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|(\d)\s*(\d))", _quotient_text, text)
    return re.sub(r"÷|\\div(?![a-z])|divided\s?by", "/", compact_form(text))


def _quotient_text(fraction: re.Match[str]) -> str:
    numerator, denominator, *digits = fraction.groups()
    return f"{numerator}/{denominator}" if numerator is not None else "/".join(digits)


def repeats(answer: str, reference: str, question: str) -> bool:
    """Whether an answer only repeats an expression of the question, and is not written as the reference is."""
    plain_answer = _comparison_form(answer)
    plain_question = _comparison_form(question)
    if plain_answer == _comparison_form(reference) or not re.search(r"[-+*/^(]|\\[a-z]", plain_answer.lstrip("+-")):
        return False
    return bool(re.search(rf"(?<![\d.]){re.escape(plain_answer)}(?!\d|\.\d)", plain_question))


def open_box(text_before: str, text_behind: str, value: str) -> bool:
    """Whether the text around a box leaves the box's value open, or offers a number that differs from the value."""
    if _BEFORE_BOX.search(text_before[-40:]):
        return True
    sentence = _SENTENCE_END.split(text_behind[:400])[0]
    offered_text = _BEHIND_BOX.match(without_delimiters(sentence))
    correction = _CORRECTION.search(text_behind[:2000])
    if _COMPUTED_BOX.match(text_behind) or (_DENIAL.search(text_behind[:300]) and not offered_text):
        return True
    words = offered_text[0] if offered_text else ""
    if correction:
        words += " " + (correction[1] or correction[2])
    other_numbers = [
        number for number in re.findall(r"-?\d+(?:\.\d+)?", words) if numeral_value(number) != numeral_value(value)
    ]
    return bool(other_numbers) or bool(
        offered_text and re.search(r"(?i)maybe|perhaps|possibly|\bis (?:wrong|incorrect|not)\b|\bor\b[^\d]*$", words)
    )
