"""Trial of code problems' tests before a run, with programs that are known to be wrong or right.

* Wrong programs have the names that the tests use, and do nothing, return a value that no problem asks for, or raise.
  Tests that a wrong program passes would pay for nothing.
* The row's own solution, if any (`SOLUTIONS`), has to pass. Else an answer might never be paid. A solution that runs
  out of time, starter code, and programs that cannot run here, say nothing of the tests.

The tests of a file are tried once, for LOAD_S seconds, and the user's cache keeps the results, like the results for
mathematical references. The order of hashes makes the tried tests a random sample. Other tests are tried at first use
(`pool`). Results depend on the machine, so nothing that has to stay the same in a run may depend on results.
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
"""Time to try the tests of a file before a run (s)."""
NICENESS = 10
SOLUTIONS = ("canonical_solution", "solution", "solutions", "gold_standard_solution", "completion", "code")
"""Columns of solutions in public sets: a text, a list of texts, or CodeContests' object with a list `solution`."""
MOST_UNAVAILABLE = 8
"""Checks without a sandbox after which the checks of a file end: this host has no sandbox."""
PYTHON_2 = {"raw_input", "xrange", "unichr"}
MOST_SOLUTIONS = 3
"""Number of a row's solutions that are tried; one solution has to pass."""
_EXCEPTION = re.compile(r"\w*(?:Error|Exception)\b")
_PLAIN_ASSERTION = re.compile(
    r"^(?:    )?assert (\w+)\((?!.*\b(?:or|if|for|None)\b).*\) == (?:[-\d'\"\[({-]|True|False)", re.M
)
"""An assertion that no wrong program passes: a call of the program equals a literal."""
_BRANCH = re.compile(r"^\s*(?:if|for|while|try|with|class|return|async)\b|def (?!test|check)", re.M)
"""Statements by which an assertion might not be reached."""
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
    """Why a row's tests pay a wrong program, or do not pay the row's solution; empty without a known problem.

    columns: the row's other columns. deadline: as for `Sandbox`. Raises as `verify_code`, except for the time limit.
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
    """(behavior, program) for tests that are a script of the data set. A name in capitals is tried as a class, whose
    methods have the behavior, and as a function."""
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
    """The solutions of a row that are Python; a solution of HumanEval continues the text of the problem."""
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
    """False for starter code, Python 2, and for imports that the sandbox does not have."""
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
    """The result of `problem_of` for each row (question, tests, other columns); None for a row that was not tried."""
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
            except VerifierUnavailable:  # no sandbox here, or no time left
                unavailable.append(key)
                return None

        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=os.nice, initargs=(NICENESS,)) as threads:
            results = zip(by_key, threads.map(check, by_key))
            return {key: problem for key, problem in results if problem is not None}

    problems = remembered([*by_key], limits, try_tests)
    return [problems.get(key) for key in keys]


def remembered(keys: Sequence[str], limits: Limits | None, check: Callable[[], dict[str, str]]) -> dict[str, str]:
    """The results of a check of `keys`; a key may lack a result.

    Results come from the user's cache where the same check was made with these limits, this package and this Python.
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
