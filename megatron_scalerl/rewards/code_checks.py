"""Tries the tests of code problems before a run, with programs that are known to be wrong or right.

* Wrong programs have the names that the tests use, and do nothing, return a value that no problem asks for, or raise.
  Tests that a wrong program passes would reward answers that solve nothing.
* The row's own solution, if any (`SOLUTIONS`), has to pass. Otherwise perhaps no answer could be right. A solution
  that exceeds the time limit or cannot run here, or that is only starter code, shows nothing about the tests.

The tests of a file of prompts are tried once, for at most LOAD_S seconds, and the user's cache keeps the results, as
for mathematical references. Tests are tried in the order of hashes, so the tried tests are a random sample. The pool
tries the remaining tests at first use (`VerifierPool.problem_of`). Results depend on the speed of the machine, so
nothing that has to be reproducible may depend on results.
"""

import ast
import contextlib
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from megatron_scalerl.rewards.code import extract_program, is_program, passes
from megatron_scalerl.rewards.code_tests import CodeTests, imported_modules, parse_tests
from megatron_scalerl.rewards.limits import Limits, TimeLimitExceeded, VerifierUnavailable

LOAD_S = 60.0
"""Time limit for trying the tests of a file of prompts before a run (s)."""
NICENESS = 10
SOLUTIONS = ("canonical_solution", "solution", "solutions", "gold_standard_solution", "completion", "code")
"""Columns of solutions in public data sets. A value is a text, a list of texts, or CodeContests' object with a list
`solution`."""
MOST_UNAVAILABLE = 8
"""Number of checks that got no sandbox after which the remaining checks of a file are skipped."""
PYTHON_2 = {"raw_input", "xrange", "unichr"}
MOST_SOLUTIONS = 3
"""Largest number of a row's solutions that are tried; at least one solution has to pass."""
_EXCEPTION = re.compile(r"\w*(?:Error|Exception)\b")
_PLAIN_ASSERTION = re.compile(
    r"^(?:    )?assert (\w+)\((?!.*\b(?:or|if|for|None)\b).*\) == (?:[-\d'\"\[({-]|True|False)", re.M
)
"""Matches an assertion that no wrong program passes: a call of the program's function has to equal a literal."""
_BRANCH = re.compile(r"^\s*(?:if|for|while|try|with|class|return|async)\b|def (?!test|check)", re.M)
"""Matches statements, such as branches and helper functions, after which an assertion might not be evaluated."""
_WRONG = {
    "does nothing": ("return",),
    "returns a wrong value": ("return object()", "return 'no problem asks for this'", "return 987654321"),
}
_FUNCTION = "def {}(*arguments, **keywords): {}\n"
_CLASS = """
class {}:
    __init__ = print
    def __getattr__(self, name):
        if name[0] == "_":
            raise AttributeError(name)
        return do
"""


def problem_of(
    question: str, reference: str, columns: Mapping[str, Any], limits: Limits, deadline: float | None = None
) -> str:
    """Why a row's tests are unusable: a wrong program passes, or the row's own solution fails. Empty if usable.

    columns: the row's further columns. deadline: value of time.monotonic() (s); None: no deadline. Raises as
    `code.passes`, but handles TimeLimitExceeded.
    """
    tests = parse_tests(reference, columns)

    def passed(program: str, on_timeout: bool = False) -> bool:
        try:
            return passes(program, tests, limits, deadline)
        except TimeLimitExceeded:
            return on_timeout

    for behavior, program in _wrong_programs(tests):
        if passed(program):
            return f"its tests pass a program that {behavior}"
    solutions = list(islice(_solutions(question, columns), MOST_SOLUTIONS))
    if not solutions or any(passed(program, on_timeout=True) for program in solutions):
        return ""
    return "its own solution fails its tests"


def _wrong_programs(tests: CodeTests) -> Iterator[tuple[str, str]]:
    """(behavior, program) of each wrong program to try; none for tests that are no Python text of the data set.

    A name with a capital first letter is defined once as a function, and once as a class whose methods have the
    behavior.
    """
    script = tests.script or ""
    plain_names = {"candidate", *tests.names} & {*_PLAIN_ASSERTION.findall(script)}
    if not tests.names or (plain_names and not _BRANCH.search(script)):
        return
    exceptions = dict.fromkeys(("Exception", *_EXCEPTION.findall(script)))
    raised = dict.fromkeys(tests.names & exceptions.keys(), "class {}(Exception): pass\n")
    capitals = (_CLASS, _FUNCTION) if any(name[0].isupper() for name in tests.names) else (_FUNCTION,)
    for behavior, bodies in (*_WRONG.items(), ("raises", [f"raise {name}" for name in exceptions])):
        for body in bodies:
            for capital in capitals:
                forms = {name: capital if name[0].isupper() else _FUNCTION for name in tests.names} | raised
                parts = [form.format(name, body) for name, form in forms.items()]
                yield behavior, _FUNCTION.format("do", body) + "".join(parts)


def _solutions(question: str, columns: Mapping[str, Any]) -> Iterator[str]:
    """The Python programs among a row's solutions. In HumanEval, problem text and solution together are a program."""
    value: Any
    for value in map(columns.get, SOLUTIONS):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            value = json.loads(value)
        if isinstance(value, dict):
            value = value.get("solution")
        if not isinstance(value, list):
            value = [value]
        for text in value:
            if isinstance(text, str):
                program = extract_program(text) or text
                whole_program = next(filter(is_program, (question + program, program)), "")
                if whole_program and _can_show(program if is_program(program) else whole_program):
                    yield whole_program


def _can_show(program: str) -> bool:
    """Whether a solution can run here: has no empty function, no Python 2, and no import that the sandbox lacks."""
    nodes = list(ast.walk(ast.parse(program)))
    return (
        not any(isinstance(node, ast.FunctionDef) and all(map(_is_empty, node.body)) for node in nodes)
        and PYTHON_2.isdisjoint(node.id for node in nodes if isinstance(node, ast.Name))
        and {name.split(".")[0] for name in imported_modules(nodes)} <= sys.stdlib_module_names
    )


def _is_empty(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Expr, ast.Return)):
        return statement.value is None or isinstance(statement.value, ast.Constant)
    return isinstance(statement, (ast.Pass, ast.Raise))


def check_tests(rows: Sequence[tuple[str, str, Mapping[str, Any]]], limits: Limits) -> list[str | None]:
    """The result of `problem_of` for each row (question, tests, further columns); None if the row was not tried."""
    keys = [hashlib.sha256(msgspec.json.encode(row)).hexdigest()[:16] for row in rows]
    by_key = dict(sorted(zip(keys, rows)))

    def try_tests() -> dict[str, str]:
        deadline = time.monotonic() + LOAD_S
        unavailable: list[str] = []

        def check(key: str) -> str | None:
            if time.monotonic() > deadline or len(unavailable) >= MOST_UNAVAILABLE:
                return None
            try:
                return problem_of(*by_key[key], limits, deadline)
            except VerifierUnavailable:  # no sandbox can be made here, or the deadline has passed
                unavailable.append(key)
                return None

        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=os.nice, initargs=(NICENESS,)) as threads:
            results = zip(by_key, threads.map(check, by_key))
            return {key: problem for key, problem in results if problem is not None}

    problems = remembered([*by_key], limits, try_tests)
    return [problems.get(key) for key in keys]


def remembered(keys: Sequence[str], limits: Limits | None, check: Callable[[], dict[str, str]]) -> dict[str, str]:
    """The results of `check` (key -> result), from the user's cache if an equal check has stored results there.

    check: a function without arguments that returns the results for all or some of `keys`. Results from the cache
    were made for equal keys and limits, by equal sources of `rewards` and an equal Python.
    """
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    cache_key = msgspec.json.encode([keys, limits, sources, sys.version])
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(folder, "megatron_scalerl", "checks", f"{hashlib.sha256(cache_key).hexdigest()[:16]}.json")
    results = {}
    with contextlib.suppress(OSError, msgspec.DecodeError):
        results = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    if not results or not results.keys() <= {*keys}:
        results = check()
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(results))
    return results
