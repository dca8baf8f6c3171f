"""The unit tests of a code problem, as its answer column holds them, in the forms of public sets:

    [{"input": "2 3\\n", "output": "5\\n"}, ...]                            standard input and output
    [{"fn_name": "add", "input": [2, 3], "output": 5}, ...]                 calls of a function
    {"inputs": ["2 3\\n", ...], "outputs": ["5\\n", ...]}                   the first form, transposed
    {"fn_name": "add", "inputs": [[2, 3], ...], "outputs": [5, ...]}        the second form, transposed
    assert add(2, 3) == 5                                                   Python, statements or functions test*

All but the last are JSON texts. A text of standard input or output may be a list of lines.
"""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import dataclass
from typing import Any

_CALLS = """
import json
try:
    _function = Solution().{name}
except NameError:
    _function = {name}
for _arguments, _expected in json.loads({cases!r}):
    _found = json.loads(json.dumps(_function(*_arguments)))
    assert _found == _expected or [_found] == _expected
"""
"""Tests that call a function, or a method of `class Solution`. Tuples are compared as lists; sets that wrap an output
in a list of one are common."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeTests:
    """The tests of one problem: either `cases` or a `script`.

    Example:
        >>> parse_tests('[{"input": "2 3", "output": "5"}]').cases
        (('2 3', '5'),)
    """

    cases: tuple[tuple[str, str], ...] = ()
    """(standard input, expected standard output)"""
    script: str | None = None
    """Python with assertions on the program's functions."""


def parse_tests(reference: str) -> CodeTests:
    """The tests in an answer column. Raises ValueError, in one line, for a text that is none of the forms."""
    try:
        found = json.loads(reference)
    except ValueError:
        return _script(reference)
    if isinstance(found, dict):
        found = _rows(found)
    if not isinstance(found, list) or not found or not all(isinstance(case, dict) for case in found):
        raise ValueError("expected unit tests: a JSON list of cases or Python with assert, found neither")
    if any("input" not in case or "output" not in case for case in found):
        raise ValueError(f"expected input and output in every case of the tests, found {_keys(found)}")
    names = {case.get("fn_name") for case in found}
    if names == {None}:
        return CodeTests(cases=tuple((_text(case["input"]), _text(case["output"])) for case in found))
    if len(names) > 1:
        raise ValueError(f"expected one fn_name for all cases of the tests, found {len(names)}")
    return _calls(found)


def _rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases of the transposed form."""
    inputs, outputs = found.get("inputs"), found.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"expected lists inputs and outputs of one length in the tests, found {_keys([found])}")
    name = {"fn_name": found["fn_name"]} if found.get("fn_name") else {}
    return [{"input": given, "output": expected, **name} for given, expected in zip(inputs, outputs)]


def _calls(found: list[dict[str, Any]]) -> CodeTests:
    name = found[0]["fn_name"]
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"expected the name of a function in fn_name of the tests, found {name!r}")
    for case in found:
        if not isinstance(case["input"], list):
            kind = type(case["input"]).__name__
            raise ValueError(f"expected a list of arguments as input of a test with fn_name, found a {kind}")
    cases = json.dumps([[case["input"], case["output"]] for case in found])
    return CodeTests(script=_CALLS.format(name=name, cases=cases))


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(
            f"expected a text as input and output of a test (calls need fn_name), found a {type(value).__name__}"
        )
    return value


def _script(text: str) -> CodeTests:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = str(error).splitlines()[0]
        raise ValueError(f"expected unit tests, JSON or Python, found neither: {problem}") from None
    nodes = list(ast.walk(tree))
    if not any(isinstance(node, ast.Assert) for node in nodes):
        raise ValueError("expected an assert in the Python of the tests, found none")
    imported = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    imported += [n.module or "." for n in nodes if isinstance(n, ast.ImportFrom)]
    for name in imported:
        if name.split(".")[0] not in {*sys.stdlib_module_names, "solution"}:
            raise ValueError(f"expected tests that import the standard library or solution, found {name}")
    return CodeTests(script=text)


def _keys(found: list[Any]) -> str:
    return ", ".join(sorted({str(key) for case in found for key in case})[:8]) or "no keys"
