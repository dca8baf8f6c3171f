"""Whether tests of code problems may pay: tried before a run with programs that are known to be wrong or right.

* Wrong programs have the names that the tests use, and do nothing, return what no problem asks for, or raise. Tests
  that one of them passes would pay it.
* The row's own solution, where it has one (`SOLUTIONS`), has to pass. Else an answer might never be paid. One that
  runs out of time, starter code, and programs that cannot run here, say nothing of the tests.

The tests of a file are tried once, for LOAD_S seconds, and the results are kept in the user's cache, as are those of
mathematical references. The order is that of hashes, so that what is tried is a random sample. Other tests are tried
at their first use (`pool`). Results depend on the machine; what has to stay the same in a run must not depend on
them.
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
TRIED = 3
"""Solutions of a row of which one has to pass."""
_EXCEPTION = re.compile(r"\w*(?:Error|Exception)\b")
_PLAIN = re.compile(r"^(?:    )?assert (\w+)\((?!.*\b(?:or|if|for|None)\b).*\) == (?:[-\d'\"\[({-]|True|False)", re.M)
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
    """Why a row's tests pay a wrong program, or not its own solution; empty if neither is known.

    columns: the row's others. deadline: as of `Sandbox`. Raises as `verify_code`, but for the time limit.
    """
    tests = parse_tests(reference, columns)

    def passed(program: str, late: bool = False) -> bool:
        try:
            return passes(program, tests, limits, deadline)
        except TimeLimitExceeded:
            return late

    for what, program in _wrong_programs(tests):
        if passed(program):
            return f"its tests pass a program that {what}"
    solutions = list(islice(_solutions(question, columns), TRIED))
    if not solutions or any(passed(program, late=True) for program in solutions):
        return ""
    return "its own solution fails its tests"


def _wrong_programs(tests: CodeTests) -> Iterator[tuple[str, str]]:
    """(what it does, program) for tests that are a script of the data set. A name in capitals is tried as a class,
    whose methods do it, and as a function."""
    script = tests.script or ""
    plain = {"candidate", *tests.names} & {*_PLAIN.findall(script)}
    if not tests.names or (plain and not _BRANCH.search(script)):
        return
    exceptions = dict.fromkeys(("Exception", *_EXCEPTION.findall(script)))
    raised = dict.fromkeys(tests.names & exceptions.keys(), "class {}(Exception): pass\n")
    capitals = (_CLASS, _FUNCTION) if any(name[0].isupper() for name in tests.names) else (_FUNCTION,)
    for what, bodies in (*_WRONG.items(), ("raises", [f"raise {name}" for name in exceptions])):
        for body in bodies:
            for capital in capitals:
                forms = {name: capital if name[0].isupper() else _FUNCTION for name in tests.names} | raised
                parts = [form.format(name, body) for name, form in forms.items()]
                yield what, _FUNCTION.format("do", body) + "".join(parts)


def _solutions(question: str, columns: Mapping[str, Any]) -> Iterator[str]:
    """The solutions of a row that are Python; HumanEval's go on where its problem ends."""
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
                whole = next(filter(is_program, (question + program, program)), "")
                if whole and _can_show(program if is_program(program) else whole):
                    yield whole


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
    """For each row (question, tests, other columns) as `problem_of`; None: it was not tried."""
    keys = [hashlib.sha256(msgspec.json.encode(row)).hexdigest()[:16] for row in rows]
    by_key = dict(sorted(zip(keys, rows)))

    def tried() -> dict[str, str]:
        deadline = time.monotonic() + LOAD_S
        unavailable: list[str] = []

        def check(key: str) -> str | None:
            if time.monotonic() > deadline or len(unavailable) >= MOST_UNAVAILABLE:
                return None
            try:
                return problem_of(*by_key[key], limits, deadline)
            except VerifierUnavailable:  # there is no sandbox here, or no time left
                unavailable.append(key)
                return None

        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=os.nice, initargs=(NICENESS,)) as threads:
            results = zip(by_key, threads.map(check, by_key))
            return {key: problem for key, problem in results if problem is not None}

    problems = remembered([*by_key], limits, tried)
    return [problems.get(key) for key in keys]


def remembered(keys: Sequence[str], limits: Limits | None, check: Callable[[], dict[str, str]]) -> dict[str, str]:
    """The results of a check of `keys`, some of which may lack one.

    They come from the user's cache where the same check was made with these limits, this package and this Python.
    """
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    whole = msgspec.json.encode([keys, limits, sources, sys.version])
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(folder, "megatron_scalerl", "checks", f"{hashlib.sha256(whole).hexdigest()[:16]}.json")
    results = {}
    with contextlib.suppress(OSError, msgspec.DecodeError):
        results = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    if not results or not results.keys() <= {*keys}:
        results = check()
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(results))
    return results
