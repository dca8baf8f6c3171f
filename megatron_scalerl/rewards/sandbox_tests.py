"""Runs the tests of a program in the sandbox: `sandbox_guest` executes this file's text in the process of the tests.

    the program's process sends the names that the program defines
    -> the tests run; each use of a name is a request to the program's process
    -> every assertion leaves a verdict in `VERDICTS`

The process of the tests reports that the program passed if at least one assertion was evaluated and all held.
"""

from __future__ import annotations

import _thread
import builtins
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each import takes time in every run of tests
    import ast
    from collections.abc import Callable, Iterator
    from typing import Any

    from megatron_scalerl.rewards.sandbox_guest import (
        _BINARY_OPERATIONS,
        _SPECIAL,
        _UNPLAIN,
        REPLIES,
        REQUESTS,
        TYPES,
        _awaitable,
        _awaited_result,
        decode,
        encode,
        exception,
        fill,
        receive,
        run_as,
        send,
    )


class Remote:
    """Stands for an object of the program in the process of the tests; the program's process does each operation.

    A remote never equals a value of the tests, so that the program's __eq__ cannot decide an assertion with an
    expected value. If both sides are objects of the program, the program's __eq__ decides.
    """

    def __init__(self, tests: Tests, number: int):
        self.__dict__.update(_tests=tests, _number=number)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._tests.ask("call", self._number, args, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._tests.ask("." + name, self._number)

    def __iter__(self) -> Iterator[Any]:
        return self._tests.ask("iter", self._number)

    def __next__(self) -> Any:
        for item in self._tests.ask("__next__", self._number):
            return item
        raise StopIteration

    def __aiter__(self) -> Any:
        return self._tests.ask("aiter", self._number)

    async def __anext__(self) -> Any:
        for item in self._tests.ask("__next__", self._number):
            return item
        raise StopAsyncIteration

    def __hash__(self) -> int:
        return 0  # two remotes may be equal, so all have the same hash


def _special(name: str) -> Callable[..., Any]:
    def ask(self: Remote, *args: Any) -> Any:
        if name in _BINARY_OPERATIONS and not isinstance(args[0], Remote):
            if name not in ("__eq__", "__ne__"):
                _new_verdict()  # fails the tests, even if a test catches the TypeError that NotImplemented causes
            return NotImplemented
        if name == "__exit__":  # the program's result must not hide a failing assertion
            self._tests.ask(name, self._number)
            return None
        return self._tests.ask(name, self._number, args)

    return ask


for _name in _SPECIAL:
    setattr(Remote, _name, _special(_name))


class Tests:
    """Runs the tests, and asks the program's process for each use of the program."""

    def __init__(self) -> None:
        self._requests = os.fdopen(REQUESTS, "wb")
        self._replies = os.fdopen(REPLIES, "rb")
        self._remotes: dict[int, Remote] = {}
        self._functions: list[Any] = []
        self._raised: dict[int, Exception] = {}
        self._lock = _thread.RLock()
        self._exceptions: dict[str, type[Exception]] = {}

    def run(self, source: str, entry_point: str) -> None:
        """Run the text of the tests, then the tests that the text defines. Raises the exception of a failing test.

        Tests are functions test*, classes Test* with methods test*, unittest's classes, and `check(candidate)`, which
        is called with the program's `entry_point`. Raises AssertionError if no assertion was evaluated, or if an
        evaluated assertion did not hold, even if the tests caught the exception.
        """
        import ast

        tree = ast.parse(source)
        names = self._names(self._answer(), tree, entry_point)
        module = type(sys)("solution")
        module.__dict__.update(names)
        sys.modules["solution"] = module
        sys.modules["pytest"] = _pytest()
        if "unittest" in source:
            import unittest

            unittest.TestCase.failureException = _FailedAssertion
        hooks: dict[str, Any] = {
            _BEGIN_HOOK: _new_verdict,
            _VERDICT_HOOK: _recorded_verdict,
            _CALL_HOOK: _call_result,
            _AWAIT_HOOK: _awaitable,
        }
        hooks["pytest"] = sys.modules["pytest"]
        defined = run_as("__main__", source, names | hooks, _instrumented_tree(tree))
        for name, value in defined.items():
            _run_test(name, value)
        if callable(check := defined.get("check")) and entry_point:
            if entry_point in names:
                check(names[entry_point])
            else:
                check(getattr(names["Solution"](), entry_point))
        _end_threads()
        assert VERDICTS and all(verdict for [verdict] in VERDICTS), "an assertion failed, or none was evaluated"

    def ask(
        self, operation: str, number: int, args: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        """The result of an operation in the program's process; also copies the operation's changes of arguments.

        number: number of the object. args, keywords: arguments of the operation.
        """
        with self._lock:  # the tests may have threads
            return self._ask(operation, number, args, keywords)

    def _ask(self, operation: str, number: int, args: tuple[Any, ...], keywords: dict[str, Any] | None) -> Any:
        request = {
            "do": operation,
            "handle": number,
            "args": [encode(item, self._number) for item in args],
            "keywords": {key: encode(value, self._number) for key, value in (keywords or {}).items()},
        }
        try:
            send(self._requests, request)
        except OSError:
            os._exit(1)
        reply = self._answer()
        while "call" in reply:
            send(self._requests, self._called_back(reply))
            reply = self._answer()
        for argument, update in zip([*args, *(keywords or {}).values()], decode(reply["args"], self._remote)):
            _replace(argument, update)
        if sys.stdout:
            sys.stdout.write(reply["printed"])
        if reply["awaits"]:
            return self._awaited_reply(reply)
        return self._result(reply)

    def _called_back(self, call: dict[str, Any]) -> dict[str, Any]:
        """The reply to a program that calls a function of the tests: the function's result or exception."""
        arguments = [decode(item, self._remote) for item in call["args"]]
        keywords = {key: decode(item, self._remote) for key, item in call["keywords"].items()}
        try:
            return {"returned": encode(self._functions[-1 - call["call"]](*arguments, **keywords), self._number)}
        except Exception as error:
            self._raised[len(self._raised)] = error
            return {"raised": len(self._raised) - 1, "kind": type(error).__name__, "message": str(error)}

    async def _awaited_reply(self, reply: dict[str, Any]) -> Any:
        """A coroutine for the tests with the result of a coroutine that the program's process has awaited already."""
        return self._result(reply)

    def _result(self, reply: dict[str, Any]) -> Any:
        if "error" in reply:
            if reply["number"] in self._raised:
                raise self._raised[reply["number"]]
            kinds = [self._exceptions[name] for name in reply["error"] if name in self._exceptions]
            error = kinds[0](reply["message"]) if kinds else exception(reply["error"][-1], reply["message"], _UNPLAIN)
            error.__dict__.update({name: decode(value, self._remote) for name, value in reply["state"].items()})
            raise error
        return decode(reply["result"], self._remote)

    def _answer(self) -> Any:
        """The next message of the program's process. If no valid message comes, the tests end without a verdict."""
        try:
            message = receive(self._replies)
        except (ValueError, RecursionError, MemoryError, OverflowError):
            message = None
        if message is None:
            os._exit(1)
        return message

    def _names(self, program: dict[str, Any], tree: ast.AST, entry_point: str) -> dict[str, Any]:
        """Name -> value of the program's names that the tests use.

        program: name -> message with the value, from the program's process. The program cannot replace a builtin such
        as `all`, unless the builtin's name is the entry point or the only name that the tests use. Raises
        AssertionError if the program defines no name that the tests use.
        """
        import ast

        nodes = list(ast.walk(tree))
        used = {node.id for node in nodes if isinstance(node, ast.Name)} | {entry_point}
        used |= {alias.name for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
        if any(alias.name == "solution" for n in nodes if isinstance(n, ast.Import) for alias in n.names):
            used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        if entry_point and entry_point not in program:
            used.add("Solution")
        tested = {n for n in used & program.keys() if "module" not in program[n] and not n.startswith("__")}
        names = {name: self._local(program[name]) for name in tested}
        assert tested & {entry_point, "Solution"} or (tested and not entry_point), "program defines no tested name"
        if len(tested) > 1:
            tested = {name for name in tested if name == entry_point or not hasattr(builtins, name)}
            names = {name: names[name] for name in tested}
        for name in used & program.keys() - tested:
            module = program[name].get("module")
            if module in sys.stdlib_module_names:
                names[name] = __import__(module)
        return names

    def _local(self, name_message: dict[str, Any]) -> Any:
        """The value of a name of the program; for the program's exception types, a new class that tests can catch."""
        if "exception" not in name_message:
            return decode(name_message["value"], self._remote)
        *derived, standard = name_message["exception"]
        kind = type(exception(standard, "", _UNPLAIN))
        for name in reversed(derived):
            kind = self._exceptions.setdefault(name, type(name, (kind,), {}))
        return kind

    def _remote(self, number: int) -> Remote:
        return self._remotes.setdefault(number, Remote(self, number))

    def _number(self, value: Any) -> dict[str, int]:
        if isinstance(value, Remote):
            return {"h": value._number}
        if any(value is kind for kind in TYPES):
            return {"n": value.__name__}
        if hasattr(type(value), "__next__"):
            return {"i": encode(list(value), self._number)}
        if not callable(value):
            _new_verdict()  # fails the tests, even if a test catches the TypeError
            raise TypeError(f"tests can hand only plain data and functions to a program, no {type(value).__name__}")
        self._functions.append(value)
        return {"h": -len(self._functions)}


_BEGIN_HOOK = "_assertion_has_begun_"
_VERDICT_HOOK = "_assertion_was_evaluated_"
_CALL_HOOK = "_assertion_was_called_"
_AWAIT_HOOK = "_awaitable_"
"""Names of the functions whose calls `_instrumented_tree` adds to the tests."""
VERDICTS: list[list[bool]] = []
"""For each assertion that began, a list of one bool: whether the assertion held, also if tests catch the error."""


def _new_verdict() -> list[bool]:
    """Add the verdict of an assertion that begins: false until the assertion is evaluated to the end."""
    verdict = [False]
    VERDICTS.append(verdict)
    return verdict


def _recorded_verdict(verdict: list[bool] | None, value: Any) -> bool:
    """Record and return whether an assertion held. verdict: None inside a block that expects an exception."""
    verdict = verdict or _new_verdict()
    verdict[0] = bool(value)
    return verdict[0]


def _call_result(verdict: list[bool] | None, value: Any) -> Any:
    """Record that an assertion held, since unittest's method did not raise; returns the method's result `value`."""
    _recorded_verdict(verdict, True)
    return value


class _FailedAssertion(AssertionError):
    """The exception that unittest raises for an assertion that does not hold; creating one records a failure."""

    def __init__(self, *args: Any) -> None:
        _new_verdict()
        super().__init__(*args)


def _end_threads() -> None:
    """Wait for the threads of the tests. A running daemon thread fails the tests, since assertions may be missing."""
    threading = sys.modules.get("threading")
    if threading is not None:
        if any(thread.daemon for thread in threading.enumerate()):
            _new_verdict()
        # `_shutdown` also ends idle threads of executors, as at the end of a program
        threading._shutdown()


def _instrumented_tree(tree: ast.Module) -> ast.Module:
    """The syntax tree of the tests with added calls, which record assertions and make plain values awaitable."""
    import ast

    def call(name: str, *arguments: ast.expr) -> ast.Call:
        return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])

    class Hooks(ast.NodeTransformer):
        expecting = False
        """Whether the node is in a `with` block that expects an exception."""

        def begin_call(self) -> ast.expr:
            return ast.Constant(None) if self.expecting else call(_BEGIN_HOOK)

        def visit_With(self, node: ast.With) -> Any:
            expects = any("aises" in ast.unparse(item.context_expr) for item in node.items)
            outer_expecting = self.expecting
            self.expecting = outer_expecting or expects
            self.generic_visit(node)
            self.expecting = outer_expecting
            return node

        def visit_Assert(self, node: ast.Assert) -> Any:
            self.generic_visit(node)
            node.test = call(_VERDICT_HOOK, self.begin_call(), node.test)
            return node

        def visit_Call(self, node: ast.Call) -> Any:
            self.generic_visit(node)
            asserts = isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert")
            return call(_CALL_HOOK, self.begin_call(), node) if asserts else node

        def visit_Await(self, node: ast.Await) -> Any:
            self.generic_visit(node)
            return ast.Await(call(_AWAIT_HOOK, node.value))

    return ast.fix_missing_locations(Hooks().visit(tree))


def _run_test(name: str, value: Any) -> None:
    """Run the value of a name if the value is a test: a function test*, a class Test*, or a unittest.TestCase."""
    unittest = sys.modules.get("unittest")
    if unittest and isinstance(value, type) and issubclass(value, unittest.TestCase):
        result = unittest.TestResult()
        result.startTest = lambda test: counts.append(len(VERDICTS))
        result.addExpectedFailure = lambda test, error: VERDICTS.__setitem__(slice(counts[-1], None), [[True]])
        counts: list[int] = []
        unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
        assert result.wasSuccessful() and not result.skipped
    elif isinstance(value, type) and name.startswith("Test"):
        for method in [m for m in dir(value) if m.startswith("test")]:
            for case in getattr(getattr(value, method), _CASES, [{}]):
                instance = value()
                for step in ("setup_method", "setUp", method, "teardown_method", "tearDown"):
                    bound = getattr(instance, step, None)
                    if step == method:
                        _call(bound, **case)
                    elif step in ("setup_method", "teardown_method") and bound and bound.__code__.co_argcount == 2:
                        _call(bound, method)
                    elif bound:
                        _call(bound)
    elif name.startswith("test") and type(value).__name__ == "function":
        for case in getattr(value, _CASES, [{}]):
            _call(value, **case)


def _call(function: Any, *arguments: Any, **keywords: Any) -> None:
    result = function(*arguments, **keywords)
    if hasattr(result, "__await__"):
        _awaited_result(result)


_CASES = "_cases_"
"""Name of a test function's attribute with the keyword arguments of each call, a list of dicts."""


class _Raises:
    """Stands for the context of pytest.raises."""

    def __init__(self, kinds: Any, match: str | None):
        self._kinds = kinds
        self._match = match

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool:
        import re

        self.type = kind
        self.value = value
        raised = kind is not None and issubclass(kind, self._kinds)
        if not _recorded_verdict(None, raised and (self._match is None or re.search(self._match, str(value)))):
            raise AssertionError("the expected exception was not raised") from value
        return True


class _Approx:
    """Stands for pytest.approx of a number, or of a sequence or dict of numbers."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None):
        self._expected = expected
        if rel is None:
            rel = 1e-6 if abs is None else 0.0
        self._rel = rel
        self._abs = 1e-12 if abs is None else abs

    def __eq__(self, other: Any) -> bool:
        import math

        pairs: Any = [(other, self._expected)]
        if isinstance(self._expected, (dict, list, tuple)):
            if len(other) != len(self._expected):
                return False
            keys = self._expected if isinstance(self._expected, dict) else range(len(other))
            pairs = [(other[key], self._expected[key]) for key in keys]
        return all(math.isclose(a, b, rel_tol=self._rel, abs_tol=self._abs) for a, b in pairs)


def _pytest() -> Any:
    """A module that stands for pytest, with the parts that tests use: raises, approx, param, mark.parametrize."""

    def raises(kinds: Any, function: Any = None, *args: Any, match: str | None = None, **keywords: Any) -> Any:
        context = _Raises(kinds, match)
        if function is None:
            return context
        with context:
            function(*args, **keywords)
        return context

    def parametrize(names: Any, values: Any, **_: Any) -> Any:
        keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
        has_one_name = isinstance(names, str) and len(keys) == 1
        rows = [(value,) if has_one_name and not isinstance(value, _Row) else value for value in values]

        def decorate(function: Any) -> Any:
            previous_cases = getattr(function, _CASES, [{}])
            setattr(function, _CASES, [case | dict(zip(keys, row)) for case in previous_cases for row in rows])
            return function

        return decorate

    module = type(sys)("pytest")
    mark = type("mark", (), {"parametrize": staticmethod(parametrize), "asyncio": staticmethod(lambda test: test)})
    module.__dict__.update(raises=raises, approx=_Approx, mark=mark, param=lambda *row, **_: _Row(row))
    return module


class _Row(tuple):  # type: ignore[type-arg]
    """The arguments of one case of a parametrized test, made by pytest.param."""


def _replace(argument: Any, update: Any) -> None:
    """Give a mutable argument in place the value that the argument has in the program's process after a call."""
    if type(argument) is type(update) and hasattr(type(argument), "clear"):
        argument.clear()
        fill(argument, update)
