r"""Rewrites the text of a mathematical answer into LaTeX that math-verify reads, and finds the answer's unit.

References and answers are rewritten by the same rules. All rules are regular expressions: no text is evaluated.

>>> latex(r"\boldsymbol{٣٤}"), latex(r"12\,345"), latex(r"0.1\overline{6}"), latex(r"\sin 30^\circ")
('34', '12345', '\\frac{15}{90}', '\\sin (\\frac{30\\pi}{180})')
>>> split_unit("9.8 m/s^2"), split_unit(r"5\text{ cm}"), split_unit("60 miles per hour"), split_unit("1011_{2}")
(('9.8', 'm/s2'), ('5', 'cm'), ('60', 'mi/h'), ('1011', '_2'))
"""

import re
import unicodedata
from collections.abc import Callable, Mapping

_Rewrites = Mapping[str, str | Callable[[re.Match[str]], str]]
_TEXT = r"\\(?:text[a-z]*|mathrm|operatorname|mbox)\*?\s*"
_DEGREE = r"\^\s*\{?\s*\\circ(?![a-z])\s*\}?"
_LONGEST = 200
"""Largest number of characters of a text in which `split_unit` looks for a unit."""
_COMBINATIONS = r"(?:\\mathrm\{C\}|C)"
_GAP = r"(?:\s|~|\\[,;:! ])*"
_MULTIPLES = {"dozen": "{12}", "hundred": "10^{2}", "thousand": "10^{3}", "million": "10^{6}"}
_MULTIPLES |= {"billion": "10^{9}", "trillion": "10^{12}"}
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASES |= {"twelve": 12, "sixteen": 16, "twenty": 20}
_COMMANDS_OF_SIGNS = (
    *("- ", "- ", r"\times ", r"\div ", r"\cdot ", r"\cdot ", r"^\circ ", r"\infty ", r"\le ", r"\ge ", r"\ne "),
    *(r"\in ", r"\cup ", r"\cap ", r"\emptyset ", r"\pm ", "/ "),
)
_SIGNS = str.maketrans(dict(zip("−–×÷·⋅°∞≤≥≠∈∪∩∅±⁄", _COMMANDS_OF_SIGNS)))
_CHARACTERS = {
    "([⁰¹²³⁴-⁹⁺⁻]+)": r"^{\1}",
    "([₀-₉]+)": r"_{\1}",
    "(?=[¼-¾⅐-⅞])": " ",
    r"√\s*(\w+)": r"\\sqrt{\1}",
}
"""Pattern -> LaTeX, for characters that Unicode's NFKC would turn into plain digits: x² into x2, 3½ into 31/2."""


def _fraction(decimal: re.Match[str]) -> str:
    """A repeating decimal as a fraction: 0.1666... is 15/90."""
    whole_digits, fixed, *blocks = decimal.groups()
    block = next(filter(None, blocks))
    numerator = int(whole_digits + fixed + block) - int(whole_digits + fixed)
    denominator = int("9" * len(block) + "0" * len(fixed))
    if numerator % denominator == 0:  # 0.999... is 1
        return str(numerator // denominator)
    return f"\\frac{{{numerator}}}{{{denominator}}}"


_REWRITES: _Rewrites = {
    r"(?![0-9])\d": lambda digit: str(int(digit[0])),
    # names of functions without a backslash, which math-verify would read as products of letters
    rf"({_TEXT}\{{[^{{}}]*\}})|(?<![\\A-Za-z])"
    r"(pi|ln|log|exp|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|sinh|cosh|tanh)(?![A-Za-z])": (
        lambda name: name[1] or f"\\{name[2]} "
    ),
    # 1e-07, as Python writes a small number, which math-verify would read as 1 times e minus 7
    r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])": r"\1 \\cdot 10^{\2}",
    rf"(?<=\d){_GAP}({_TEXT}\{{\s*)?({'|'.join(_MULTIPLES)})(?![A-Za-z])": (
        lambda word: f"\\cdot {_MULTIPLES[word[2]]} {word[1] or ''}"
    ),
    r"\\(?:left|right)\s*\.|\\(?:left|right|[bB]igg?[lr]?)(?=\s*(?:\\[{}|]|[(\[|\])]))": "",
    r"\\(?:(?:text)?color\s*\{[^{}]*\}|(?:boldsymbol|bm|math(?:bf|it|sf)|underline|displaystyle)(?![a-z]))"
    r"\s*(?:\{([^{}]*)\})?": r"\1",
    rf"{_TEXT}\{{\s*(-?\d[\d.,/]*|\\\$)\s*\}}": r"\1",
    r"\\[dt]?frac\s*(\d)\s*(\d)(?!\d)": r"\\frac{\1}{\2}",
    r"\\langle(?![a-z])": "(",
    r"\\rangle(?![a-z])": ")",
    r"\\textdollar(?![a-z])": r"\\$",
    r"\\varnothing|\\O(?![a-zA-Z])|\\\{\s*\\\}": r"\\emptyset ",
    rf"(\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\^\{{?-?\d\}}?)?)\s*[({{]?\s*(\d+(?:\.\d+)?)\s*{_DEGREE}\s*[)}}]?": (
        r"\1(\\frac{\2\\pi}{180})"
    ),
    rf"(?<![A-Za-z\\{{]){_COMBINATIONS}_\{{?(\d+)\}}?\^\{{?(\d+)\}}?": r"\\binom{\1}{\2}",
    rf"(?:\{{\}})?[_^]\{{?(\d+)\}}?{_COMBINATIONS}_\{{?(\d+)\}}?": r"\\binom{\1}{\2}",
    r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?": r"\\overline{\1\2\3}",
    r"(?<![\d.])(\d{1,30})\.(\d{0,30}?)(?:(?:\\(?:overline|bar|dot)\s*\{?\s*(\d{1,30})\s*\}?+|\((\d{1,30})\))(?!\d)"
    r"|(\d{1,12}?)\5\5+(?:\.{3}|\\[lc]?dots))": _fraction,
    r"(?:\(|(?<!\()\[)\s*\\begin\{array\}\{[lcr|]*\}((?:(?!\\end\{).)*)\\end\{array\}\s*[\])]": (
        lambda matrix: rf"\begin{{pmatrix}}{matrix[1]}\end{{pmatrix}}"
    ),
    rf"({_DEGREE})\s*{_TEXT}\{{\s*([CF])\s*\}}": r"\1 \2",
    rf"_\{{?\s*{_TEXT}\{{\s*({'|'.join(_BASES)})\s*\}}\s*\}}?": lambda base: f"_{{{_BASES[base[1]]}}}",
    r"(?:\\\{\s*)?\\begin\{(cases|aligned|array|gathered)\}(?:\{[lcr|]*\})?"
    r"((?:[^&]|&(?=\s*=)|(?<==)&)*?)\\end\{\1\}": (
        lambda system: re.sub(r"[,;]?\s*\\\\(?:\[\w*\])?", ", ", system[2].replace("&", ""))
    ),
    r"(?<=\d)(?:,?\\[,;:! ]|~|\{,\})(?=\d{3}(?!\d))": "",
}
"""Pattern that math-verify does not read or misreads (numbers, styles, degrees, systems, symbols) -> equal LaTeX."""
_INTRODUCTION = (
    r"(?:[Tt]he )?(?:(?:final|correct) )?(?:[Aa]nswer|[Oo]ption|[Cc]hoice|[Vv]alue|[Rr]esult)(?: is)?\s*:?\s*"
)
_DELIMITER_REWRITES: _Rewrites = {
    r"^(?:\$+|\\\(|\\\[)([^$]*?)(?:\$+|\\\)|\\\])$": r"\1",
    rf"^(?:{_TEXT}\{{\s*{_INTRODUCTION}\}}|({_TEXT}\{{\s*)?{_INTRODUCTION})\s*(?=\S)": r"\1",
    rf"^{_TEXT}\{{(?!(?i:[^{{}}]*\b(?:not|wrong|maybe|perhaps|less|more|than)\b))[^{{}}\d]*:\s*\}}\s*": "",
    rf"^{_TEXT}\{{\s*((?:\\?\$)?\d[^{{}}]*)\}}$": r"\1",
}
_ANSWER_REWRITES: _Rewrites = {
    r"(?<![.,;:\s~])(?:\\(?:[,;:! ]|$)|[.,;:\s~])+$|^\s+": "",
    r"(?<=\d)[ _](?=(?:\d{3}[ _])*\d{3}(?:\.\d+)?$)": "",
    r"^(-?\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)": r"\1\\frac{\2}{\3}",
    r"^(-?)(\d{1,30})\s*\\[dt]?frac\{(\d{1,30})\}\{(\d{1,30})\}\s*(\\?%)$": (
        lambda mixed: f"{mixed[1]}\\frac{{{int(mixed[2]) * int(mixed[4]) + int(mixed[3])}}}{{{mixed[4]}}}{mixed[5]}"
    ),
    rf"^(\d+)\s*(?:{_TEXT}\{{\s*to\s*\}}|to)\s*(\d+)$": r"\1:\2",
    rf"(?<=\S)\s*(?:{_TEXT}\{{\s*)?\((?:since|because|as)\b.*$": "",
    r"^\\?\{\s*[a-z]\s*(?:\\in\b[^|:<>]*)?(?:\\mid|\\vert|\||:)\s*((?=.*[<>]|.*\\[lg]).*?)\s*\\?\}$": r"\1",
    rf"\s*(?:{_TEXT}\{{)?\s*\(?(?:in )?base[\s~-]*\}}?\s*(\d+)\)?\s*\}}?$": r"_{\1}",
    rf"^(-?)\s*(?:{_TEXT}\{{)?(\\?\$|[€£¥₹]|Rs(?=\W))\.?\s*\}}?\s*([\d.][^$]*)$": r"\1\3 \2",
}

_UNIT = re.compile(
    r"(?P<prefix>kilo|centi|milli|[kcmdnμMG])?(?:(?P<m>met(?:er|re)s?|m)|(?P<g>grams?|g)|(?P<L>lit(?:er|re)s?|[lL])"
    r"|(?P<s>sec(?:ond)?s?|s)|(?P<W>watts?|W)|(?P<J>joules?|J)|(?P<N>newtons?|N)|(?P<V>volts?|V)|(?P<A>amp(?:ere)?s?|A)"
    r"|(?P<Hz>hertz|Hz)|(?P<Pa>[pP]ascals?|Pa)|(?P<mol>mol(?:es?)?)|(?P<eV>eV))(?![A-Za-z])"
    r"|(?:(?P<min>min(?:ute)?s?)|(?P<h>h(?:ou)?rs?|h)|(?P<day>days?)|(?P<week>weeks?)|(?P<month>months?)"
    r"|(?P<year>y(?:ea)?rs?)|(?P<in>inch(?:es)?|in)|(?P<ft>foot|feet|ft)|(?P<yd>yards?|yd)|(?P<mi>miles?|mi)"
    r"|(?P<lb>pounds?|lbs?)|(?P<oz>ounces?|oz)|(?P<gal>gallons?|gal)|(?P<cup>cups?)|(?P<acre>acres?)|(?P<cent>cents?)"
    r"|(?P<unit>units?)|(?P<am>[aA]\.?[mM]\.?)|(?P<pm>[pP]\.?[mM]\.?)|(?P<C>[cC]elsius|C)|(?P<F>[fF]ahrenheit|F)"
    r"|(?P<K>[kK]elvins?|K)|(?P<rad>rad(?:ian)?s?)|deg(?:ree)?s?)(?![A-Za-z])|"
    + _DEGREE
    + r"|(?P<dollar>[dD]ollars?(?![a-z])|USD|\\?\$)"
    r"|(?P<euro>€|[eE]uros?(?![a-z])|EUR)|(?P<sterling>£)|(?P<yen>¥|[yY]en(?![a-z]))|(?P<rupee>₹|[rR]upees?(?![a-z])|Rs)"
)
_ONE_UNIT = r"(?:\\unit\s*)?(?:" + re.sub(r"\?P<\w+>", "?:", _UNIT.pattern) + r")(?:\s*\^\s*\{?\s*-?\d(?:\s*\})?)?"
_UNITS = rf"(?<![A-Za-z\\]){_ONE_UNIT}(?:{_GAP}(?:(?:/|\\cdot|\*){_GAP})?{_ONE_UNIT})*"
_UNIT_WORDS: _Rewrites = {
    r"(?<![A-Za-z])(?:square|sq\.?)\s+([a-z]+)": r"\1^2",
    r"(?<![A-Za-z])(?:cubic|cu\.?)\s+([a-z]+)": r"\1^3",
    r"\s+per\s+": "/",
    r"(?<![A-Za-z])mph(?![a-z])": "mi/h",
    r"(?<![A-Za-z])(?:kph|kmp?h)(?![a-z])": "km/h",
    rf"([\w)}}\]/]){_GAP}{_TEXT}\{{\s*({_UNITS})\s*\.?\s*\}}": r"\1 \\unit \2",
}
_NUMBER_WITH_BASE = re.compile(r"\(?(-?\d+)\)?_\{?\(?(\d+)\)?\}?|\(?(\d\w*)\)?_\{?(\d+)\}?")
_VALUE_WITH_UNIT = re.compile(
    rf"(.*?[^\s\\]){_GAP}(\\unit.*)|((?:\w\s*=)?(?:\\[a-zA-Z]+|[^a-zA-Z\\])+?)(?:(?<=\d)\s+|{_GAP}(?![A-Za-z]$))({_UNITS})",
    re.DOTALL,
)
"""Matches a value and a unit. A letter alone is a unit only after a digit and space: 5t and 2\\pi h have no unit."""
_NOTE = (
    r"(?!\s*(?:[,;/]|\(?(?:and|not|to|plus|minus|times|half|halves|thirds|quarters|squared|cubed|negative"
    r"|divided|multiplied|factorial|over|less|added|increased|decreased|reduced|tens|lakh|crore|k"
    r"|(?:ten|hundred|thousand|million|billion)ths?"
    r"|alpha|beta|gamma|delta|theta|lambda|sigma|omega|phi|sqrt)\b))"
    r"(?![^{}]*\b(?:or|maybe|perhaps|possibly|wrong|incorrect|not)\b)"
)
_VALUE_WITH_NOTE = re.compile(
    rf"(.*[^\s\\~]){_GAP}{_TEXT}\{{{_NOTE}[^{{}}\d]*\}}(?:\^\{{?\d\}}?)?|(.*\d)\s+{_NOTE}[a-z]{{3,}}(?: [a-z]+)*",
    re.DOTALL,
)
"""Matches a value and a text that does not change the value, as in 7\\text{ apples} and 7 apples."""


def latex(text: str) -> str:
    """A text, rewritten so that math-verify reads all characters, numbers and commands."""
    text = unicodedata.normalize("NFKC", _rewritten_text(text, _CHARACTERS))
    return _rewritten_text(text.translate(_SIGNS), _REWRITES)


def whole_answer(text: str) -> str:
    """The bare answer in a text: no formula delimiters, no introduction such as "the answer is", no final point."""
    return _rewritten_text(latex(_rewritten_text(text.strip(), _DELIMITER_REWRITES)), _ANSWER_REWRITES)


def split_unit(text: str) -> tuple[str, str]:
    """(value, unit or base of the digits) of a bare answer. Leaves out text after the value that is no unit."""
    if len(text) > _LONGEST:
        return text, ""
    if base_match := _NUMBER_WITH_BASE.fullmatch(text):
        digits, base, word, base_of_word = base_match.groups()
        return (digits, f"_{base}") if digits else (f"\\text{{{word}}}", f"_{base_of_word}")
    text = _rewritten_text(text, _UNIT_WORDS)
    if unit_match := _VALUE_WITH_UNIT.fullmatch(text):
        value, units = filter(None, unit_match.groups())
        unit_names = _UNIT.sub(
            lambda unit: (unit["prefix"] or "")[:1] + (unit.lastgroup or ""), re.sub(r"\\(?:unit|cdot)", " ", units)
        )
        return value, re.sub(r"[^\w/]", "", unit_names)
    if note_match := _VALUE_WITH_NOTE.fullmatch(text):
        text = note_match[1] or note_match[2]
    return text, ""


def _rewritten_text(text: str, rewrites: _Rewrites) -> str:
    for pattern, replacement in rewrites.items():
        text = re.sub(pattern, replacement, text)
    return text
