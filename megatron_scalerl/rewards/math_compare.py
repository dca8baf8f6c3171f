"""Reads texts with math-verify, and compares the readings exactly.

math-verify itself compares decimals after rounding to 6 places, and everything else after `evalf(chop=True)`, which
takes 1e-20 for 0. Here a decimal is the fraction that the digits write. Two numbers are equal if the difference is 0,
or if one number is a decimal of at least 6 places and 6 digits, to which the second number rounds: 0.333333 equals
1/3, and 0.33 does not.
"""

import functools
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, NamedTuple

from megatron_scalerl.rewards.math_text import split_unit, whole_answer

_ZERO = 1e-40
"""Bound below which a difference of two irrational numbers, evaluated to 50 digits, counts as 0."""


class Reading(NamedTuple):
    """The expressions that math-verify reads in an answer without a sentence around the answer."""

    whole: list[Any]
    """math-verify's parse of the whole text: sympy expressions, and the text as a str."""
    values: list[Any]
    """math-verify's parse of the text without the unit; empty for a text that has no unit."""
    unit: str


NOTHING = Reading([], [], "")
LONGEST = 2000
"""Largest number of characters of a text that is parsed, since the grammar takes seconds for longer texts."""


@functools.lru_cache(maxsize=64)
def read(text: str, timeout_s: int | None = None) -> Reading:
    """math-verify's reading of an answer or a reference; `NOTHING` for a text of more than LONGEST characters.

    timeout_s: time limit of each parse; None: no limit. The limit works by a signal, so only in the main thread.
    """
    if len(text) > LONGEST:
        return NOTHING
    text = whole_answer(text)
    value, unit = split_unit(text)
    delimited = "$" in value or "\\boxed" in value
    whole_parts = parts_of(text if delimited else f"\\boxed{{{text}}}", False, timeout_s)
    values = []
    if value != text:
        values = parts_of(f"\\boxed{{{value}}}", False, timeout_s)
    return Reading(whole_parts, values, unit)


def parts_of(text: str, units: bool = True, timeout_s: int | None = None) -> list[Any]:
    """The sympy expressions that math-verify finds in a text, and the text as a str.

    units: leave out the words that math-verify takes for units.
    """
    # The imports are here because both modules import sympy, which only verifier processes need.
    from latex2sympy2_extended.math_normalization import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    rules = NormalizationConfig(units=units, malformed_operators=True, nits=True)
    configs = (LatexExtractionConfig(normalization_config=rules), ExprExtractionConfig())
    return parse(text, configs, parsing_timeout=timeout_s)


def is_text(reading: Reading) -> bool:
    """Whether math-verify found no mathematics in a text: the reading then contains only strings."""
    return all(isinstance(part, str) for part in reading.whole + reading.values)


def is_equal(expected: Reading, answer: Reading, timeout_s: int | None = None) -> bool:
    """True if an answer equals the reference. Either may lack a unit, but two units have to be equal."""
    gold = expected.whole + expected.values
    answers = answer.whole + answer.values
    if answer.unit.startswith("_") and not expected.unit and answer.unit != "_10":
        # the answer has digits of a base that is not ten, and the reference has base ten
        return False
    if expected.unit and answer.unit:
        if expected.unit != answer.unit:
            return False
        gold = expected.values
        answers = answer.values
    variables = set().union(*(getattr(part, "free_symbols", ()) for part in gold))
    solved = [part for part in answers if variables <= getattr(part, "free_symbols", set())]
    return _exact_verify()(gold + _solutions(gold), answers + _solutions(solved), timeout_seconds=timeout_s)


def number_forms(reading: Reading, increment: int = 0) -> list[str]:
    """A rational number as LaTeX fraction and, if the decimal is finite, as decimal; empty for all else.

    increment: integer that is first added to the fraction's numerator, for a neighbour of the number.
    """
    from sympy import Expr, Rational

    (read_as, *_) = reading.values or reading.whole
    if not isinstance(read_as, Expr):
        return []
    value = _exact(read_as)
    if not isinstance(value, Rational) or not value.is_finite or max(abs(value.p), value.q) >= 10**LONGEST:
        return []
    value += Rational(increment, value.q)
    decimal = f"{Decimal(value.p) / value.q:f}"
    fraction = f"\\frac{{{value.p}}}{{{value.q}}}"
    return [fraction, decimal] if Rational(decimal) == value else [fraction]


def _solutions(parts: Iterable[Any]) -> list[Any]:
    """The solution sets of inequalities in which the variable stands alone, such as 0 <= x < 1, or x < 0, x > 1."""
    from sympy import Intersection, Set, Union

    sets = []
    for part in parts:
        if _is_solved(part):
            sets.append(part.as_set())
        relations = getattr(part, "_unsorted_args", [])
        solved = _solutions(relations)
        if len(solved) == len(relations) > 0:
            combined = Union if isinstance(part, Set) else Intersection
            sets.append(combined(*solved))
    return sets


def _is_solved(relation: Any) -> bool:
    from sympy import Eq
    from sympy.core.relational import Relational

    if not isinstance(relation, Relational) or isinstance(relation, Eq):
        return False
    bound, variable = sorted(relation.args, key=lambda side: len(side.free_symbols))
    return bool(variable.is_Symbol and bound.is_comparable)


@functools.cache
def _exact_verify() -> Callable[..., bool]:
    """math-verify's function `verify`, patched to compare numbers by `_equal`."""
    from math_verify import grader

    compare_matrices = grader.sympy_numeric_eq
    simplify = grader.sympy_symbolic_eq

    def compare(gold: Any, answer: Any, *precisions: int) -> bool:
        if isinstance(gold, grader.MatrixBase) or isinstance(answer, grader.MatrixBase):
            return compare_matrices(gold, answer, *precisions)
        return _equal(gold, answer)

    grader.sympy_numeric_eq = compare
    grader.sympy_symbolic_eq = lambda gold, answer: simplify(_exact(gold), _exact(answer))
    return grader.verify


def _exact(expression: Any) -> Any:
    """The value of an expression, with fractions for decimals and the imaginary unit for i."""
    from math_verify.grader import safe_sympy_doit
    from sympy import Float, I, Rational

    exact = {decimal: Rational(str(decimal)) for decimal in expression.atoms(Float)}
    exact |= {symbol: I for symbol in expression.free_symbols if str(symbol) == "i"}
    return safe_sympy_doit(expression.xreplace(exact))


def _equal(gold: Any, answer: Any) -> bool:
    from math_verify.grader import get_pct_val
    from sympy import Float, multiplicity

    expected = _exact(gold)
    value = _exact(answer)
    # An answer may lack the reference's percent sign (12.5 for 12.5 %). An integer answer may have a needless percent
    # sign (25 % for 25), but 0.5 % is not 0.5.
    bare = _exact(get_pct_val(answer, answer))
    if expected == value or (bare == _exact(get_pct_val(gold, gold)) and (bare == value or bare.is_Integer)):
        return True
    difference = expected - value
    size = 1 if difference.free_symbols or expected == 0 else abs(expected)
    if not difference.is_Rational and all((difference / unit).evalf(50, chop=_ZERO) == 0 for unit in (1, size)):
        return True
    decimal = value if answer.has(Float) else expected
    if not (decimal.is_Rational and difference.is_number and (answer.has(Float) or gold.has(Float))):
        return False
    places = max(multiplicity(2, decimal.q), multiplicity(5, decimal.q))
    error = 2 * abs(difference)
    return bool(places >= 6 and error <= 10**-places and error <= 1e-5 * size)
