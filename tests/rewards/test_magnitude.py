"""Bounds of huge numbers: what they prove, and that they hold."""

import random

import pytest
import sympy
from math_verify import parse

from megatron_scalerl.rewards.magnitude import _at_least, _at_most, proven_unequal

TOWER = "9^{9^9}"
PROVEN = [
    (TOWER, "7"),
    (TOWER, "0"),
    (f"-{TOWER}", "\\frac{1}{2}"),
    (f"3 \\cdot {TOWER} + 5", "10^{100}"),
    (f"\\sqrt{{{TOWER}}}", "\\sqrt{2} + \\pi"),
    (f"x = {TOWER}", "7"),
    (TOWER, "x = 7"),
    (f"\\{{{TOWER}, 1\\}}", "\\{1, 2\\}"),
    (f"(1, {TOWER})", "(1, 2)"),
    (f"\\begin{{pmatrix}}1 \\\\ {TOWER}\\end{{pmatrix}}", "\\begin{pmatrix}1 \\\\ 2\\end{pmatrix}"),
    (TOWER, "50\\%"),
    ("10^{10^{10^{10^{10}}}}", "9^{9999}"),
    ("(10^{10})!", "\\frac{\\sqrt{3}}{4}"),
    ("1.5^{10^{10}}", "2.25"),
]
OPEN = [
    ("7", "7"),
    ("2^{1000}", "7"),
    (TOWER, TOWER),
    (f"{TOWER} + 1", TOWER),
    (TOWER, "x + 1"),
    (f"\\frac{{{TOWER}}}{{{TOWER}}}", "1"),
    (f"{TOWER} - {TOWER}", "0"),
    ("10^{10^{10^{10}}} - 10^{10^{10^{10}}}", "0"),
    ("9^{-9^9}", "7"),
    ("(\\frac{1}{2})^{10^{10}}", "0"),
    ("1^{9^{9^9}}", "1"),
    ("(-1)^{10^{10}}", "1"),
    ("0^{9^{9^9}}", "0"),
    (f"{TOWER} x = {TOWER}", "x = 1"),
    (f"x^{{{TOWER}}}", "7"),
    (f"\\log_9({TOWER})", "387420489"),
    (f"(1, {TOWER})", "(1, \\infty)"),
    ("no idea", "7"),
]


def parsed(text):
    return parse(f"\\boxed{{{text}}}", parsing_timeout=None)


@pytest.mark.parametrize(("answer", "reference"), PROVEN)
def test_a_huge_number_is_proven_to_differ(answer, reference):
    assert proven_unequal(parsed(reference), parsed(answer))


@pytest.mark.parametrize(("answer", "reference"), OPEN)
def test_nothing_is_refused_without_a_proof(answer, reference):
    assert not proven_unequal(parsed(reference), parsed(answer))


def tree(draw, depth):
    """A random expression that is not evaluated."""
    if depth == 0 or draw.random() < 0.2:
        numbers = (0, 1, 2, 3, 10, -1, -3, sympy.Rational(1, 3), sympy.Rational(-7, 2), sympy.pi, sympy.Float("0.3"))
        return sympy.sympify(draw.choice(numbers))
    kind = draw.choice((sympy.Add, sympy.Mul, sympy.Pow, sympy.Pow, sympy.factorial))
    if kind is sympy.factorial:
        return sympy.factorial(draw.randrange(6), evaluate=False)
    return kind(tree(draw, depth - 1), tree(draw, depth - 1), evaluate=False)


def test_bounds_hold_for_random_expressions():
    draw, bounded = random.Random(0), [0, 0]
    for _ in range(1500):
        expression = tree(draw, 3)
        low, high = _at_least(expression), _at_most(expression)
        if (low is None and high is None) or (high is not None and high > 3000) or (low or 0) > 3000:
            continue
        value = abs(sympy.N(expression, 30))
        if not value.is_number or value.is_finite is not True or value > sympy.Float("1e900") or value < 1e-20:
            continue
        exact = float(sympy.log(value, 2))
        assert low is None or low <= exact + 1e-9, expression
        assert high is None or exact <= high + 1e-9, expression
        bounded[0] += low is not None
        bounded[1] += high is not None
    assert min(bounded) > 300
