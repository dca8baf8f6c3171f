"""What runs beside a program in the sandbox: this file's text, in its own interpreter. Standard library only.

Roles, by the first argument:

    program   runs the program, which reads standard input
    solution  runs the program, then calls its functions for the process with the tests
    tests     runs tests in a process of their own, whose names for the program's functions are `Remote`s

The program has no access to the process with the tests: it sees arguments and chooses results, no more. Values cross
as JSON and are copies; other objects stay with the program, and the tests hold a `Remote`.

Programs are run as competition sites run them: names of the standard library that they use and do not import are
imported (`SITE_MODULES`), annotations are not evaluated, integers may have any number of digits.
"""

from __future__ import annotations
import __future__

import _operator
import _thread
import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # every run of a program pays for what is imported here
    import ast
    from collections.abc import Callable, Iterator
    from typing import Any, BinaryIO

SOURCE, REQUESTS, REPLIES, VERDICT = 3, 4, 5, 6
"""File descriptors."""
PASSED = b"passed"
_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST
SITE_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
"""Modules that competition sites import for every program, with all of their names; later ones win."""
_HEAD = 8
"""Bytes of a message's length."""
_VALUES = {
    "fractions": ("Fraction",),
    "decimal": ("Decimal",),
    "datetime": ("date", "datetime", "time", "timedelta"),
    "builtins": ("range",),
}
"""Types of the standard library whose values cross as copies, by the arguments that make them."""
_UNPLAIN = (StopIteration, StopAsyncIteration)
"""Exceptions that would end a loop of the tests instead of failing them."""
_SPECIAL: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": getattr(_operator, name) for name in ("getitem", "setitem", "delitem", "abs", "neg")},
    **{f"__{kind.__name__}__": kind for kind in (bool, int, float, str, repr, len, setattr)},
    "__instancecheck__": lambda kind, value: isinstance(value, kind),
    "__enter__": lambda value: value.__enter__(),
    "__exit__": lambda value: value.__exit__(None, None, None),
}
_TWO = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv")
_OF_TWO = {f"__{name}__": getattr(_operator, name) for name in _TWO}
"""Between two objects of the program. Beside a value of the tests, the program would see what it must equal."""
_SPECIAL |= _OF_TWO


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Plain data as JSON values; `other` encodes any object that is not plain data."""
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, list):
        return [encode(item, other) for item in value]
    for tag, kind in (("t", tuple), ("f", frozenset), ("s", set)):
        if isinstance(value, kind):
            return {tag: [encode(item, other) for item in value]}
    if isinstance(value, dict):
        return {"d": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).decode("latin-1")}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    module, name = type(value).__module__, type(value).__name__
    if (module, name) == ("collections", "deque"):
        return {"q": [encode(list(value), other), value.maxlen]}
    if name in _VALUES.get(module, ()):
        return {"v": [module, name, encode(list(value.__reduce__()[1]), other)]}
    return other(value)


def decode(value: Any, handle: Callable[[int], Any]) -> Any:
    """The inverse; `handle` makes the object for a handle's number."""
    if isinstance(value, list):
        return [decode(item, handle) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "h":
        return handle(content)
    if tag == "b":
        return content.encode("latin-1")
    if tag == "c":
        return complex(*content)
    if tag == "q":
        import collections

        return collections.deque(decode(content[0], handle), content[1])
    if tag == "v":
        module, name, arguments = content
        assert name in _VALUES[module]
        return getattr(__import__(module), name)(*decode(arguments, handle))
    if tag == "d":
        return {decode(key, handle): decode(item, handle) for key, item in content}
    return {"t": tuple, "f": frozenset, "s": set}[tag](decode(item, handle) for item in content)


def send(file: BinaryIO, message: Any) -> None:
    """Write one message."""
    import json

    body = json.dumps(message).encode()
    file.write(len(body).to_bytes(_HEAD) + body)
    file.flush()


def receive(file: BinaryIO) -> Any:
    """The next message, None at the end."""
    import json

    head = file.read(_HEAD)
    return json.loads(file.read(int.from_bytes(head))) if len(head) == _HEAD else None


def site_names(tree: ast.AST) -> dict[str, Any]:
    """Names of `SITE_MODULES`, and these modules, that a program uses and nothing else gives it."""
    used: set[str] = set()
    bound, nodes = set(dir(builtins)), [tree]
    for node in nodes:  # ast.walk, without importing ast
        values: list[Any] = [getattr(node, field, None) for field in node._fields]
        for value in values:
            nodes += [item for item in (value if isinstance(value, list) else [value]) if hasattr(item, "_fields")]
        kind = type(node).__name__
        if kind == "Name":
            (used if type(node.ctx).__name__ == "Load" else bound).add(node.id)  # type: ignore[attr-defined]
        elif kind == "alias":
            bound.add((node.asname or node.name).split(".")[0])  # type: ignore[attr-defined]
        elif kind in ("FunctionDef", "AsyncFunctionDef", "ClassDef"):
            bound.add(node.name)  # type: ignore[attr-defined]
        elif kind == "arg":
            bound.add(node.arg)  # type: ignore[attr-defined]
    missing = {name for name in used - bound if not name.startswith("_")}
    names: dict[str, Any] = {}
    for module in map(__import__, SITE_MODULES if missing else ()):
        names |= {name: getattr(module, name) for name in missing if hasattr(module, name)}
    return names | {name: sys.modules[name] for name in missing & set(SITE_MODULES)}


def run_as(name: str, source: str, given: dict[str, Any], tree: ast.Module | None = None) -> dict[str, Any]:
    """Run a text as the module `name`; returns the names that it binds beside `given`. tree: its tree, if changed."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    module = type(sys)(name)
    sys.modules[name] = module
    module.__dict__.update(given)
    flags = __future__.annotations.compiler_flag
    try:
        exec(compile(tree or source, "<text>", "exec", flags, dont_inherit=True), module.__dict__)
    except SystemExit as end:
        if end.code:
            raise
    return {
        n: v for n, v in module.__dict__.items() if not n.startswith("__") and (n not in given or v is not given[n])
    }


def run_program(source: str, name: str) -> dict[str, Any]:
    """Run a program; returns the names that it binds. name: "__main__", or that of a module that is imported."""
    return run_as(name, source, site_names(compile(source, "<text>", "exec", _ONLY_AST, dont_inherit=True)))


class Solution:
    """The program's side: answers calls until the tests end."""

    def __init__(self, source: str) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        names = run_program(source, "solution")
        self._requests, self._replies = os.fdopen(REQUESTS, "rb"), os.fdopen(REPLIES, "wb")
        send(self._replies, {name: self._named(value) for name, value in names.items()})

    def serve(self) -> None:
        """Answer requests in order."""
        while (request := receive(self._requests)) is not None:
            arguments: tuple[Any, ...] = ()
            try:
                arguments = tuple(decode(item, self._objects.__getitem__) for item in request["args"])
                keywords = {k: decode(v, self._objects.__getitem__) for k, v in request["keywords"].items()}
                result = self._do(request["do"], self._objects[request["handle"]], arguments, keywords)
                reply = {"result": encode(result, self._handle)}
            except BaseException as error:
                standard = [k.__name__ for k in type(error).__mro__ if getattr(builtins, k.__name__, None) is k]
                reply = {"error": standard[0], "message": str(error)}
            reply["args"] = [encode(item, self._handle) for item in arguments]
            send(self._replies, reply)

    def _named(self, value: Any) -> dict[str, Any]:
        if isinstance(value, type(sys)):
            return {"module": value.__name__}
        return {"value": encode(value, self._handle)}

    def _do(self, what: str, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if what == "call":
            result = target(*arguments, **keywords)
            return _awaited(result) if hasattr(result, "__await__") else result
        if what == "iter":
            return iter(target)
        if what == "__next__":
            return next(([item] for item in target), [])
        return getattr(target, what[1:]) if what[0] == "." else _SPECIAL[what](target, *arguments)

    def _handle(self, value: Any) -> dict[str, int]:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"h": self._numbers[id(value)]}


class Remote:
    """An object of the program, which carries out what the tests do with it.

    It equals no value of the tests, so that no __eq__ of the program decides such a comparison. Where both sides are
    made by the program, it decides all the same.
    """

    def __init__(self, tests: Tests, number: int) -> None:
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

    def __hash__(self) -> int:
        return 0  # equal objects have equal ones, and fields may change


def _special(name: str) -> Callable[..., Any]:
    def ask(self: Remote, *args: Any) -> Any:
        if name in _OF_TWO and not isinstance(args[0], Remote):
            return NotImplemented
        if name == "__exit__":  # whose answer must not hide an assertion that fails
            self._tests.ask(name, self._number)
            return None
        return self._tests.ask(name, self._number, args)

    return ask


for _name in _SPECIAL:
    setattr(Remote, _name, _special(_name))


class Tests:
    """The side of the tests."""

    def __init__(self) -> None:
        self._requests, self._replies = os.fdopen(REQUESTS, "wb"), os.fdopen(REPLIES, "rb")
        self._remotes: dict[int, Remote] = {}

    def run(self, source: str, entry_point: str) -> None:
        """Run the tests: the text itself, then what it defines as tests. Raises what a failing test raises.

        Tests are functions test*, classes Test* with methods test*, unittest's classes, and `check(candidate)`, which
        is called with the program's `entry_point`. At least one assertion has to be evaluated: AssertionError.
        """
        import ast

        tree = ast.parse(source)
        names = self._names(self._answer(), tree, entry_point)
        module = type(sys)("solution")
        module.__dict__.update(names)
        sys.modules["solution"] = module
        sys.argv = ["tests"]  # unittest.main reads it
        evaluated: list[None] = []

        def evaluate(value: Any = None) -> Any:
            evaluated.append(None)
            return value

        hooks = {_EVALUATED: evaluate, _AWAITABLE: _awaitable}
        found = run_as("__main__", source, names | hooks, _instrumented(tree))
        for name, value in found.items():
            _run_test(name, value)
        if callable(check := found.get("check")) and entry_point:
            check(names[entry_point] if entry_point in names else getattr(names["Solution"](), entry_point))
        assert evaluated, "no assertion of the tests was evaluated"

    def ask(self, what: str, number: int, args: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None) -> Any:
        """The result of a call in the program's process; lists, dicts and sets among `args` change as it says."""
        request = {
            "do": what,
            "handle": number,
            "args": [encode(item, self._number) for item in args],
            "keywords": {key: encode(value, self._number) for key, value in (keywords or {}).items()},
        }
        try:
            send(self._requests, request)
        except OSError:
            os._exit(1)
        reply = self._answer()
        for mine, theirs in zip(args, reply["args"]):
            _replace(mine, decode(theirs, self._remote))
        if "error" in reply:
            raise _exception(reply["error"], reply["message"])
        return decode(reply["result"], self._remote)

    def _answer(self) -> Any:
        """The next message; if there is none or it is no message, no test may go on."""
        try:
            message = receive(self._replies)
        except (ValueError, RecursionError, MemoryError, OverflowError):
            message = None
        if message is None:
            os._exit(1)
        return message

    def _names(self, found: dict[str, Any], tree: ast.AST, entry_point: str) -> dict[str, Any]:
        """Names of the program for the tests.

        One that is also a builtin is the builtin, so that the program cannot replace `all` or `isinstance`, unless
        it is the entry point, or the only name of the program that the tests use. A program without any of their
        names fails.
        """
        import ast

        nodes = list(ast.walk(tree))
        used = {node.id for node in nodes if isinstance(node, ast.Name)} | {entry_point}
        used |= {alias.name for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
        if any(alias.name == "solution" for n in nodes if isinstance(n, ast.Import) for alias in n.names):
            used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        if entry_point and entry_point not in found:
            used.add("Solution")
        own = {name for name in used & found.keys() if "module" not in found[name] and not name.startswith("__")}
        names = {name: decode(found[name]["value"], self._remote) for name in own}
        assert own & {entry_point, "Solution"} or (own and not entry_point), "the program has no name that is tested"
        if len(own) > 1:
            own = {name for name in own if name == entry_point or not hasattr(builtins, name)}
            names = {name: names[name] for name in own}
        for name in used & found.keys() - own:
            module = found[name].get("module")
            if module in sys.stdlib_module_names:
                names[name] = __import__(module)
        return names

    def _remote(self, number: int) -> Remote:
        return self._remotes.setdefault(number, Remote(self, number))

    def _number(self, value: Any) -> dict[str, int]:
        if not isinstance(value, Remote):
            raise TypeError(f"expected plain data or an object of the program, found a {type(value).__name__}")
        return {"h": value._number}


_EVALUATED, _AWAITABLE = "_assertion_was_evaluated_", "_awaitable_"
"""Names that the tests' text calls once it is instrumented."""


def _instrumented(tree: ast.Module) -> ast.Module:
    """The tests, which say so when an assertion is evaluated, and may await plain values."""
    import ast

    def call(name: str, *arguments: ast.expr) -> ast.Call:
        return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])

    class Hooks(ast.NodeTransformer):
        def visit_Assert(self, node: ast.Assert) -> Any:
            return [ast.Expr(call(_EVALUATED)), self.generic_visit(node)]

        def visit_Call(self, node: ast.Call) -> Any:
            self.generic_visit(node)
            asserts = isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert")
            return call(_EVALUATED, node) if asserts else node

        def visit_Await(self, node: ast.Await) -> Any:
            self.generic_visit(node)
            return ast.Await(call(_AWAITABLE, node.value))

    return ast.fix_missing_locations(Hooks().visit(tree))


async def _awaitable(value: Any) -> Any:
    """A result of the program is awaited in its own process."""
    return await value if hasattr(value, "__await__") else value


def _awaited(value: Any) -> Any:
    import asyncio

    return asyncio.run(_awaitable(value))


def _run_test(name: str, value: Any) -> None:
    """Run a name of the tests, if it is one: a function test*, a class Test*, or one of unittest."""
    unittest = sys.modules.get("unittest")
    if unittest and isinstance(value, type) and issubclass(value, unittest.TestCase):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
        assert result.wasSuccessful() and not result.skipped
    elif isinstance(value, type) and name.startswith("Test"):
        for method in [m for m in dir(value) if m.startswith("test")]:
            instance = value()
            for step in ("setup_method", "setUp", method, "teardown_method", "tearDown"):
                if hasattr(instance, step):
                    bound = getattr(instance, step)
                    takes_method = step in ("setup_method", "teardown_method") and bound.__code__.co_argcount == 2
                    _call(bound, *[method] * takes_method)
    elif name.startswith("test") and type(value).__name__ == "function":
        _call(value)


def _call(function: Any, *arguments: Any) -> None:
    result = function(*arguments)
    if hasattr(result, "__await__"):
        _awaited(result)


def _exception(name: str, message: str) -> Exception:
    kind: Any = getattr(builtins, name, None)
    plain = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _UNPLAIN)
    try:
        return kind(message) if plain else RuntimeError(name)
    except TypeError:  # it needs other arguments
        return RuntimeError(name)


def _replace(mine: Any, theirs: Any) -> None:
    """Change an argument in place, as the call did in the other process."""
    if type(mine) is not type(theirs):
        return
    if isinstance(mine, list):
        mine[:] = theirs
    elif isinstance(mine, (dict, set)):
        mine.clear()
        mine.update(theirs)


def main() -> None:
    """Play the role of the first argument."""
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(50_000)  # as LiveCodeBench does
    _thread.stack_size(8 << 20)  # else as large as the main thread's
    with open(SOURCE, encoding="utf8") as file:
        source = file.read()
    if sys.argv[1] == "program":
        run_program(source, "__main__")
    elif sys.argv[1] == "solution":
        Solution(source).serve()
    else:
        Tests().run(source, sys.argv[2])
        os.write(VERDICT, PASSED)


if __name__ == "__main__":
    main()
