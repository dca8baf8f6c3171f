"""Refuses huge numbers without evaluating them, by proof: 9^(9^9) cannot equal 7.

math-verify compares numbers by evaluating them exactly. A power or factorial of more than about 10^7 digits exceeds
every limit, and one answer uses up all of its processor time. Here the binary logarithm of absolute values is bounded
from the parsed expressions instead. An answer is refused only if one of its values is proven to be above HUGE and
above every value of the reference. Without a known bound, or with a reference that is as large, math-verify compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import sympy

HUGE = 2.0**20
"""Bits of the smallest value that may be refused: 315,653 decimal digits."""
MARGIN = 1.0 + 1e-6
"""Factor between two compared bounds; more than the rounding error of floats."""
ROUNDING = 1e-9
"""More than the rounding error of a float's binary logarithm."""
CAP = 2.0**1000
"""Lower bounds are capped here, so that all of them are finite; an upper bound may be infinite."""


def proven_unequal(expected: list[Any], found: list[Any]) -> bool:
    """True if the answer is proven larger than the reference; both are results of math-verify's `parse`."""
    if not (expected and found):
        return False
    gold, answer = expected[0], found[0]
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
        return False  # 9^(9^9) x = 9^(9^9) may mean x = 1
    largest = max((_at_least(value) or 0.0 for value in _values(answer)), default=0.0)
    if largest < HUGE:
        return False
    bounds = [_at_most(value) for value in _values(gold)]
    return bool(bounds) and all(bound is not None and bound * MARGIN + 1 < largest for bound in bounds)


def _values(expression: Any) -> list[Any]:
    """The compared values: the elements of a collection, the right side of an equation, or the number itself."""
    if isinstance(expression, sympy.Eq):
        return _values(expression.rhs)
    if isinstance(expression, sympy.Interval):
        return [expression.start, expression.end]
    if isinstance(expression, sympy.FiniteSet | sympy.Tuple):
        return list(expression.args)
    if isinstance(expression, sympy.MatrixBase):
        return list(expression.flat())
    return [expression] if isinstance(expression, sympy.Expr) else []


def _at_least(x: Any) -> float | None:
    """A proven lower bound of log2 |x|, or None."""
    if (exact := _log2(x)) is not None:
        return exact[0]
    if isinstance(x, sympy.NumberSymbol):
        return -1.0
    if isinstance(x, sympy.Pow):
        base, exponent = _at_least(x.base), _at_least(x.exp)
        if base is None or exponent is None or base < 0 or not _positive(x.exp):
            return None
        return min(base * min(_exp2(exponent), CAP), CAP)
    if isinstance(x, sympy.factorial):
        n = _at_least(x.args[0])
        if n is None or n < 2 or not _positive(x.args[0]):
            return None
        return min(min(_exp2(n - 1), CAP) * (n - 1), CAP)  # n! >= (n/2)^(n/2)
    if isinstance(x, sympy.Mul):
        return _sum(_at_least(factor) for factor in x.args)
    if isinstance(x, sympy.Add):
        return _sum_at_least(x.args)
    return _at_least(x.args[0]) if isinstance(x, sympy.UnevaluatedExpr) else None


def _sum_at_least(terms: tuple[Any, ...]) -> float | None:
    """A lower bound of log2 |a + b + ...|: if one term is twice all others together, half of it remains."""
    lows = [_at_least(term) for term in terms]
    first = max(range(len(terms)), key=lambda i: -math.inf if (low := lows[i]) is None else low)
    low = lows[first]
    others = _sum_at_most([*terms[:first], *terms[first + 1 :]])
    return low - 1 if low is not None and others is not None and others * MARGIN + 1 <= low else None


def _at_most(x: Any) -> float | None:
    """A proven upper bound of log2 |x|, or None."""
    if (exact := _log2(x)) is not None:
        return exact[1]
    if x == 0:
        return -math.inf
    if isinstance(x, sympy.NumberSymbol) or x is sympy.I:
        return 2.0
    if isinstance(x, sympy.Pow):
        return _power_at_most(x)
    if isinstance(x, sympy.factorial):
        n = _at_most(x.args[0])
        return None if n is None else _exp2(n) * max(n, 1.0)
    if isinstance(x, sympy.Mul):
        return _sum(_at_most(factor) for factor in x.args)
    if isinstance(x, sympy.Add):
        return _sum_at_most(x.args)
    return _at_most(x.args[0]) if isinstance(x, sympy.UnevaluatedExpr) else None


def _power_at_most(x: sympy.Pow) -> float | None:
    if _positive(x.exp):
        base, exponent = _at_most(x.base), _at_most(x.exp)
        if base is None or exponent is None:
            return None
        return base * _exp2(exponent) if base > 0 else 0.0
    if isinstance(x.exp, sympy.Rational) and x.exp.p < 0:
        low = _at_least(x.base)
        return 0.0 if low is not None and low >= 0 else None  # 1/b is at most 1 where b is at least 1
    return None


def _sum_at_most(terms: Iterable[Any]) -> float | None:
    """An upper bound of log2 |a + b + ...|."""
    bounds = [_at_most(term) for term in terms]
    known = [bound for bound in bounds if bound is not None]
    if len(known) < len(bounds):
        return None
    return max(known) + math.log2(len(known)) if known else -math.inf


def _log2(x: Any) -> tuple[float, float] | None:
    """Bounds of log2 |x| for an explicit number other than 0."""
    if isinstance(x, sympy.Rational) and x.p:
        top, bottom = abs(x.p).bit_length(), x.q.bit_length()
        low, high = top - 1.0 - bottom, top - (bottom - 1.0)
    elif isinstance(x, sympy.Float) and x.is_finite and x != 0:
        _, _, exponent, bits = x._mpf_
        low, high = exponent + bits - 1.0, float(exponent + bits)
    else:
        return None
    if low > -1000 and high < 1000:  # x is within the range of floats
        log = math.log2(abs(float(x)))
        return log - ROUNDING, log + ROUNDING
    return low, high


def _positive(x: Any) -> bool:
    """True if x is proven to be a positive real number."""
    if isinstance(x, sympy.Rational | sympy.Float | sympy.NumberSymbol):
        return bool(x.is_positive)
    if isinstance(x, sympy.Pow):
        return _positive(x.base) and _real(x.exp)
    if isinstance(x, sympy.factorial):
        return _positive(x.args[0])
    return isinstance(x, sympy.Mul | sympy.Add) and all(_positive(part) for part in x.args)


def _real(x: Any) -> bool:
    if isinstance(x, sympy.Rational | sympy.Float | sympy.NumberSymbol):
        return bool(x.is_finite)
    if isinstance(x, sympy.Mul | sympy.Add):
        return all(_real(part) for part in x.args)
    return _positive(x)


def _sum(bounds: Iterable[float | None]) -> float | None:
    known: list[float] = []
    for bound in bounds:
        if bound is None:
            return None
        known.append(bound)
    return None if math.isnan(total := sum(known)) else min(total, math.inf)


def _exp2(x: float) -> float:
    """2^x, infinite beyond the range of floats."""
    return 2.0**x if x < 1023 else math.inf
