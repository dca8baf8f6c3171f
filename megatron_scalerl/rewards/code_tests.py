"""Reads the unit tests of a code problem from the answer column, in the forms of public data sets:

    [{"input": "2 3\\n", "output": "5\\n"}, ...]                       standard input and output
    [{"fn_name": "add", "input": [2, 3], "output": 5}, ...]            calls of a function
    [{"testtype": "functional", "input": "2\\n3", "output": "5",
      "metadata": {"func_name": "add"}}, ...]                          calls, with a JSON text a line
    {"inputs": ["2 3\\n", ...], "outputs": ["5\\n", ...]}              the first form, transposed
    {"fn_name": "add", "inputs": [[2, 3], ...], "outputs": [5, ...]}   the second form, transposed
    {"functional": "assert add(2, 3) == 5"}                            Python, as below; or "pytest"
    assert add(2, 3) == 5                                              Python: statements, functions test*, classes
                                                                       Test* or unittest's, or check(candidate)

All forms but the last are JSON texts. A text of standard input or output may be a list of lines. Further columns of
the row may name the function: `entry_point` (HumanEval), `fn_name`, `func_name`, or `metadata` (LiveCodeBench).
"""

import ast
import builtins
import contextlib
import json
import keyword
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_scalerl.record import record

_CALLS = """
import json

def _plain(value):
    if isinstance(value, dict):
        return {{key if isinstance(key, str) else json.dumps(key): _plain(item) for key, item in value.items()}}
    is_list = isinstance(value, (list, tuple)) or type(value).__name__ == "deque"
    return [_plain(item) for item in value] if is_list else value

try:
    _function = Solution().{name}
except NameError:
    _function = {name}
for _arguments, _expected in json.loads({cases!r}):
    _found = _plain(_function(*_arguments))
    assert _found == _expected or [_found] == _expected
"""
"""Python text of tests that call a function, or a method of `class Solution`, and compare the results.

Tuples are compared as lists. If the expected output is a list of one item, the item is also right, since many data
sets put an output into a list.
"""


@record
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
    entry_point: str = ""
    """Name of the program's function that is passed to the script's `check`; empty if no function is passed."""
    called: frozenset[str] = frozenset()
    """Names of the program that the tests use. The problem's text has to mention one of the names at least."""
    names: frozenset[str] = frozenset()
    """All names that the program has to define if `script` is from the data set; empty if `_calls` wrote `script`."""


def parse_tests(reference: str, extra: Mapping[str, Any] | None = None) -> CodeTests:
    """The unit tests in the text of an answer column. extra: the row's further columns.

    Raises ValueError, in one line, for a text in no known form, and for tests that every program would pass.
    """
    columns = extra or {}
    try:
        parsed = json.loads(reference)
    except (ValueError, RecursionError):
        return _script(reference, _function_of(columns))
    if isinstance(parsed, dict):
        if isinstance(script := parsed.get("functional", parsed.get("pytest")), str):
            return _script(script, _function_of(columns))
        parsed = _rows(parsed)
    if not isinstance(parsed, list) or not parsed or not all(isinstance(case, dict) for case in parsed):
        raise ValueError("unit tests have to be a JSON list of cases or Python with assert")
    if any("input" not in case or "output" not in case for case in parsed):
        raise ValueError(f"every case of the tests has to have input and output; the keys are {_keys(parsed)}")
    names = {_function_of(case) or (_is_call(case) and _function_of(columns)) or None for case in parsed}
    if len(names) > 1:
        raise ValueError(f"all cases of the tests have to name the same function; found {len(names)} different names")
    if (name := names.pop()) is not None:
        return _calls(parsed, name)
    if any(map(_is_call, parsed)):
        raise ValueError("functional tests need the name of the function: metadata.func_name or fn_name")
    tests = CodeTests(cases=tuple((_text(case["input"]), _text(case["output"])) for case in parsed))
    if not any(expected.strip() for _, expected in tests.cases):
        raise ValueError("its tests pass a program that does nothing: all outputs are empty")
    return tests


def _is_call(case: Mapping[str, Any]) -> bool:
    """Whether a case is marked as a call of a function."""
    return case.get("testtype") == "functional" or case.get("type") == "function_call"


def _function_of(row: Mapping[str, Any]) -> str:
    """The name of a function in a case or in a row's columns; empty if no function is named."""
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        with contextlib.suppress(ValueError, RecursionError):
            metadata = json.loads(metadata)
    if not isinstance(metadata, dict):
        metadata = {}
    names = (place.get(key) for place in (row, metadata) for key in ("fn_name", "func_name", "entry_point"))
    name = next((name for name in names if name), "")
    if isinstance(name, str):
        name = name.removeprefix("Solution().")  # as names in LeetCodeDataset begin
    if not isinstance(name, str) or (name and (keyword.iskeyword(name) or not name.isidentifier())):
        raise ValueError(f"the tests name the function {name!r}, which is no name in Python")
    return name


def _rows(parsed: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases of tests in the form {"inputs": [...], "outputs": [...]}, as dicts with the keys input and output."""
    inputs, outputs = (parsed.get(f"{key}s", parsed.get(key)) for key in ("input", "output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"tests need the lists inputs and outputs, of equal length; the keys are {_keys([parsed])}")
    other_columns = {key: value for key, value in parsed.items() if key.rstrip("s") not in ("input", "output")}
    return [
        {"input": case_input, "output": expected, **other_columns} for case_input, expected in zip(inputs, outputs)
    ]


def _calls(parsed: list[dict[str, Any]], name: str) -> CodeTests:
    cases = []
    for case in parsed:
        case_input = case["input"]
        expected = case["output"]
        if isinstance(case_input, str):
            # LiveCodeBench writes each argument as a line of JSON, and the result as JSON
            try:
                case_input = [json.loads(line) for line in case_input.split("\n") if line.strip()]
                if isinstance(expected, str):
                    expected = json.loads(expected)
            except (ValueError, RecursionError):
                raise ValueError(
                    f"the input of a test of {name} has to have a line of JSON for each argument, and the output "
                    f"JSON; a test has the input {case['input'][:40]!r} and the output {str(case['output'])[:40]!r}"
                ) from None
        if not isinstance(case_input, list):
            raise ValueError(
                f"the input of a test of {name} has to be a list of arguments; it is a {type(case_input).__name__}"
            )
        cases.append([case_input, expected])
    if all(expected in (None, [None]) for _, expected in cases):
        raise ValueError("its tests pass a program that does nothing: all outputs are null")
    script = _CALLS.format(name=name, cases=json.dumps(cases))
    return CodeTests(script=script, entry_point=name, called=frozenset((name,)))


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(
            f"without fn_name, input and output of a test have to be strings; found a {type(value).__name__}"
        )
    return value


def _script(text: str, entry_point: str) -> CodeTests:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"unit tests have to be JSON or Python; these are neither: {problem}") from None
    nodes = list(ast.walk(tree))
    for name in imported_modules(nodes):
        if name.split(".")[0] not in {*sys.stdlib_module_names, "solution", "pytest"}:
            raise ValueError(f"the tests import {name}; they may import the standard library, solution and pytest")
    if unknown_names := sorted(
        set(_pytest_names(nodes)) - {"raises", "approx", "param", "mark", "parametrize", "asyncio"}
    ):
        raise ValueError(
            f"the tests use pytest.{unknown_names[0]}; only raises, approx, param and mark.parametrize are known"
        )
    if not any(map(_asserts, nodes)):
        raise ValueError("the tests are Python without an assertion, so every program would pass")
    if not any(_asserts(node) for node in _reached_nodes(tree, entry_point)):
        raise ValueError(
            "no assertion of the tests would run; one has to be in the text itself, in a function test* without "
            "arguments, in a class Test*, or in check(candidate) of a row with entry_point"
        )
    entry = frozenset(filter(None, (entry_point,)))
    names = _called_names(nodes)
    return CodeTests(script=text, entry_point=entry_point, called=entry or names, names=entry | names)


def imported_modules(nodes: list[ast.AST]) -> list[str]:
    """Names of the modules that a program imports."""
    imported = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    return imported + [n.module or "." for n in nodes if isinstance(n, ast.ImportFrom)]


def _pytest_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Attributes of pytest and pytest.mark that tests use, such as raises and parametrize."""
    aliases = [a.asname or a.name for n in nodes if isinstance(n, ast.Import) for a in n.names if a.name == "pytest"]
    places = [place for alias in aliases for place in (alias, f"{alias}.mark")]
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in places:
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "pytest":
            yield from (alias.name for alias in node.names)


def _called_names(nodes: list[ast.AST]) -> frozenset[str]:
    """Names that the tests import from `solution`, or use without a definition; the program has to define each."""
    names = (str(getattr(n, key, "")).partition(".")[0] for n in nodes for key in ("arg", "name", "asname"))
    defined = {*dir(builtins), *names}
    defined |= {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    imported = [n.names for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "solution"]
    used = {n.id for n in nodes if isinstance(n, ast.Name)} - defined
    return frozenset(used | {alias.name for aliases in imported for alias in aliases})


def _asserts(node: ast.AST) -> bool:
    """Whether a node is an assert statement, or a call of unittest's assert methods or of raises."""
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.Assert)
    method = getattr(node.func, "attr", "")
    return method.startswith("assert") or "raises" in (method, getattr(node.func, "id", ""))


def _reached_nodes(tree: ast.Module, entry_point: str) -> Iterator[ast.AST]:
    """Syntax nodes that run when the tests run. A function counts as run if a node that runs mentions the name."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    bodies: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (*functions, ast.ClassDef)):
            bodies.setdefault(node.name, []).append(node)
    waiting_nodes: list[ast.AST] = [node for node in tree.body if not isinstance(node, (*functions, ast.ClassDef))]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or node.bases):
            waiting_nodes += [node, *(m for m in node.body if isinstance(m, functions) and m.name.startswith("test"))]
        elif isinstance(node, functions):
            case_input = any("parametrize" in ast.unparse(decorator) for decorator in node.decorator_list)
            required_count = len(node.args.posonlyargs + node.args.args) - len(node.args.defaults)
            if (node.name.startswith("test") and (case_input or not required_count)) or (
                node.name == "check" and entry_point
            ):
                waiting_nodes.append(node)
    reached_names = set()
    while waiting_nodes:
        node = waiting_nodes.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (*functions, ast.ClassDef)):
                waiting_nodes.append(child)
        name = getattr(node, "id", getattr(node, "attr", ""))  # also an attribute's name, for methods
        if name in bodies and name not in reached_names:
            reached_names.add(name)
            waiting_nodes += bodies[name]


def _keys(parsed: list[Any]) -> str:
    return ", ".join(sorted({str(key) for case in parsed for key in case})[:8]) or "none"
