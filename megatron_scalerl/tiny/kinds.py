"""Kinds of tiny problems beside the chain of `tiny.task`, with traces of other flaws, in the same vocabulary.

    search    problem  := OP d ( ";" OP d ){n-1} "=" v "="     find x with x OP d ... = v; n = 2, 3
              thinking := try ( ";" try )*                     try := x OP d "=" value ( OP d "=" value )*
              The warm start tries the possible x in a random order, without repeats, and gives up before each try
              after the first with the probability of the flaw; its answer is then the x tried last.
    sort      problem  := d ( ";" d ){n-1} "="                 write the digits in ascending order; n = 2..8
              thinking := d ( ";" d )*
              The warm start writes the smallest digit that is left, or, with the probability of the flaw, any of
              those left; its answer is the digits as it wrote them.

A chain teaches to go on, a search to go on and where to begin, a sort to avoid random errors.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from megatron_scalerl.tiny.task import CHAIN, MAX_VALUE, Kind, Problem, apply, draw_problem


def draw_search(rng: random.Random, level: int) -> Problem:
    """Operations and their result; the answer is the value before them."""
    chain = draw_problem(rng, level)
    operations = ";".join(f"{operator}{operand}" for operator, operand in chain.operations)
    return replace(chain, text=f"{operations}={chain.answer}=", answer=chain.start)


def search_trace(rng: random.Random, problem: Problem, flaw: float) -> tuple[str, int]:
    """(tries, answer): x whose results all stay within 0..9, in a random order, until one fits or it gives up."""
    target = _values(problem.answer, problem)[-1]
    possible = [x for x in range(1, MAX_VALUE + 1) if all(0 <= value <= MAX_VALUE for value in _values(x, problem))]
    rng.shuffle(possible)
    tries: list[tuple[int, str]] = []
    for x in possible:
        if tries and rng.random() < flaw:
            break
        values = _values(x, problem)
        steps = [f"{operator}{operand}={value}" for (operator, operand), value in zip(problem.operations, values)]
        tries.append((x, f"{x}{''.join(steps)}"))
        if values[-1] == target:
            break
    return ";".join(written for _, written in tries), tries[-1][0]


def _values(x: int, problem: Problem) -> list[int]:
    """[level] the value after each operation, from x on."""
    values = []
    for operator, operand in problem.operations:
        x = apply(x, operator, operand)
        values.append(x)
    return values


def draw_sort(rng: random.Random, level: int) -> Problem:
    """`level` digits; the answer is the number that they make in ascending order."""
    digits = [rng.randint(1, MAX_VALUE) for _ in range(level)]
    text = ";".join(map(str, digits)) + "="
    return Problem(text=text, start=0, operations=tuple(("", d) for d in digits), answer=_number(sorted(digits)))


def sort_trace(rng: random.Random, problem: Problem, flaw: float) -> tuple[str, int]:
    """(digits, the number that they make): each the smallest that is left or, with probability `flaw`, any."""
    left = sorted(digit for _, digit in problem.operations)
    written = [left.pop(rng.randrange(len(left)) if rng.random() < flaw else 0) for _ in range(len(left))]
    return ";".join(map(str, written)), _number(written)


def _number(digits: Sequence[int]) -> int:
    return int("".join(map(str, digits)))


KINDS = {
    "chain": CHAIN,
    "search": Kind(
        levels=(2, 3), flaw=0.6, draw=draw_search, trace=search_trace, answer_of_cut=lambda cut: int(_whole(cut)[0])
    ),
    "sort": Kind(
        levels=tuple(range(2, 9)),
        flaw=0.15,
        draw=draw_sort,
        trace=sort_trace,
        answer_of_cut=lambda cut: _number([int(digit) for digit in cut if digit != ";"]),
    ),
}
"""Name -> kind."""


def _whole(cut: str) -> str:
    """The last try that began before the cut; of a cut right after a semicolon the one before it."""
    return cut.rstrip(";").split(";")[-1]


def kind_of(name: str, *, levels: tuple[int, ...] = (), flaw: float | None = None) -> Kind:
    """The kind called `name` with other levels or another flaw. Raises ValueError for an unknown name."""
    if name not in KINDS:
        raise ValueError(f"--kind: expected one of {', '.join(KINDS)}, found {name!r}")
    kind = KINDS[name]
    return replace(kind, levels=levels or kind.levels, flaw=kind.flaw if flaw is None else flaw)
