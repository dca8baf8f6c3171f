"""Runs a program, or the tests of a program, in the sandbox. The interpreter gets this file's text by -c.

The first argument is the role of the process:

    program   runs the program, which reads standard input
    solution  runs the program, then answers calls of the program's functions from the process with role tests
    tests     runs the tests of the program; further arguments: the entry point, the text of sandbox_tests.py

The program has no access to the process with the tests: the program sees only arguments and chooses only results.
Plain values are copied between the processes as JSON. Any other object stays in the process of the program, and the
tests hold a `Remote` that stands for the object. This file imports only the standard library.

Programs run as on competition sites: a program may use names of `SITE_MODULES` without an import, annotations are not
evaluated, and integers may have any number of digits.
"""

from __future__ import annotations
import __future__

import _operator
import _symtable  # symtable is slow to import
import _thread
import builtins
import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # each import takes time in every run of a program
    import ast
    from collections.abc import Callable
    from typing import Any, BinaryIO

SOURCE = 3
"""File descriptor from which the text of the program, or of the tests, is read."""
REQUESTS = 4
REPLIES = 5
VERDICT = 6
PASSED = b"passed"
SITE_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
"""Modules whose names every program may use without an import, as on competition sites.

If two modules define the same name, the module that comes later in the list counts.
"""
_HEAD = 8
"""Number of bytes of the message length with which each message begins."""
_VALUES = {
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "fractions": ("Fraction",),
    "decimal": ("Decimal",),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "builtins": ("range", "bytearray"),
}
"""Module -> names of types in the module whose values are copied between program and tests."""
TYPES = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object)
"""Types that tests may hand to a program."""
_NUMBER = "_number_of_tests_"
"""Name of an attribute: the number, in the process of the tests, of an exception that the tests raised."""
_UNPLAIN = (StopIteration, StopAsyncIteration)
"""Exceptions of a program that would end a loop of the tests instead of failing the tests."""
_SPECIAL: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": getattr(_operator, name) for name in ("getitem", "setitem", "delitem", "abs", "neg")},
    **{f"__{kind.__name__}__": kind for kind in (bool, int, float, str, repr, len, setattr)},
    "__instancecheck__": lambda kind, value: isinstance(value, kind),
    "__enter__": lambda value: value.__enter__(),
    "__exit__": lambda value: value.__exit__(None, None, None),
}
_BINARY_NAMES = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv")
_BINARY_OPERATIONS = {f"__{name}__": getattr(_operator, name) for name in _BINARY_NAMES}
"""Name -> operation that is allowed only on two objects of the program.

If one operand were a value of the tests, the program's method would see the expected value.
"""
_SPECIAL |= _BINARY_OPERATIONS


def encode(value: Any, encode_object: Callable[[Any], Any]) -> Any:
    """A value as JSON data for the second process; `encode_object` encodes an object that is no plain data."""
    if value is None or isinstance(value, bool):
        return value
    # A value of a subclass, whose methods the program may have written, is sent as the plain value.
    for plain_type in (str, int, float):
        if isinstance(value, plain_type):
            return plain_type(value)
    module = type(value).__module__
    name = type(value).__name__
    if name in _VALUES.get(module, ()):
        _, arguments, *state_parts = value.__reduce__()
        items = next(filter(None, state_parts[1:]), ())
        return {"v": [module, name, encode(list(arguments), encode_object), encode(list(items), encode_object)]}
    if isinstance(value, list):
        return [encode(item, encode_object) for item in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"T": [name, encode(list(value._fields), encode_object), encode(list(value), encode_object)]}
    for tag, kind in (("t", tuple), ("f", frozenset), ("s", set)):
        if isinstance(value, kind):
            return {tag: [encode(item, encode_object) for item in value]}
    if isinstance(value, dict):
        return {"d": [[encode(key, encode_object), encode(item, encode_object)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"b": value.decode("latin-1")}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    return encode_object(value)


def decode(value: Any, handle: Callable[[int], Any]) -> Any:
    """The value that `encode` has encoded; `handle` returns the object for a number from `encode_object`."""
    if isinstance(value, list):
        return [decode(item, handle) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "h":
        return handle(content)
    if tag == "n":
        return next(kind for kind in TYPES if kind.__name__ == content)
    if tag == "b":
        return content.encode("latin-1")
    if tag == "c":
        return complex(*content)
    if tag == "i":
        return iter(decode(content, handle))
    if tag == "T":
        name, fields, values = decode(content, handle)
        return __import__("collections").namedtuple(name, fields)(*values)
    if tag == "v":
        module, name, arguments, items = decode(content, handle)
        assert name in _VALUES[module]
        container = getattr(__import__(module), name)(*arguments)
        if items:
            fill(container, items)
        return container
    if tag == "d":
        return {decode(key, handle): decode(item, handle) for key, item in content}
    return {"t": tuple, "f": frozenset, "s": set}[tag](decode(item, handle) for item in content)


def fill(container: Any, items: Any) -> None:
    """Add items to a list, a dict, a set, or a similar container."""
    add = getattr(container, "extend", None) or container.update
    add(items)


def send(file: BinaryIO, message: Any) -> None:
    """Write one message: the length, then the JSON text."""
    import json

    body = json.dumps(message).encode()
    file.write(len(body).to_bytes(_HEAD) + body)
    file.flush()


def receive(file: BinaryIO) -> Any:
    """The next message of `send`, decoded; None at the end of the file."""
    import json

    head = file.read(_HEAD)
    return json.loads(file.read(int.from_bytes(head))) if len(head) == _HEAD else None


def site_names(source: str) -> dict[str, Any]:
    """Name -> value of each undefined name in a program that is a module of `SITE_MODULES`, or a name in a module."""
    used: set[str] = set()
    bound = set(dir(builtins))
    tables = [_symtable.symtable(source, "<text>", "exec")]
    for table in tables:
        tables += table.children
        for name, flags in table.symbols.items():
            (bound if flags & _symtable.DEF_BOUND else used).add(name)
    missing_names = {name for name in used - bound if not name.startswith("_")}
    names: dict[str, Any] = {}
    for module in map(__import__, SITE_MODULES if missing_names else ()):
        names |= {name: getattr(module, name) for name in missing_names if hasattr(module, name)}
    return names | {name: sys.modules[name] for name in missing_names & set(SITE_MODULES)}


def run_as(name: str, source: str, given_names: dict[str, Any], tree: ast.Module | None = None) -> dict[str, Any]:
    """Run a Python text as the module `name`; returns the names that the text defines or changes, with values.

    given_names: name -> value before the text runs. tree: syntax tree to run in place of the text; None: the text.
    """
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    module = type(sys)(name)
    sys.modules[name] = module
    module.__file__ = sys.argv[0]
    module.__dict__.update(given_names)
    flags = __future__.annotations.compiler_flag
    try:
        exec(compile(tree or source, "<text>", "exec", flags, dont_inherit=True), module.__dict__)
    except SystemExit as end:
        if end.code:
            raise
    return {
        n: v
        for n, v in module.__dict__.items()
        if not n.startswith("__") and (n not in given_names or v is not given_names[n])
    }


def run_program(source: str, name: str) -> dict[str, Any]:
    """Run a program as the module `name`; returns the names that the program defines, with values."""
    return run_as(name, source, site_names(source))


class Solution:
    """The process of the program: calls the program's functions for the tests until the tests end."""

    def __init__(self, source: str):
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        names = run_program(source, "solution")
        self._requests = os.fdopen(REQUESTS, "rb")
        self._replies = os.fdopen(REPLIES, "wb")
        send(self._replies, {name: self._named_value(value) for name, value in names.items()})
        sys.stdout = io.TextIOWrapper(io.BytesIO(), "utf8", "backslashreplace", write_through=True)
        self._printed = sys.stdout

    def serve(self) -> Any:
        """Answer the requests of the tests in order; ends the process when the tests end.

        When the program calls a function of the tests, `_object` calls this method again, which then returns the
        function's result or raises the function's exception.
        """
        while (request := receive(self._requests)) is not None:
            if "returned" in request:
                return decode(request["returned"], self._object)
            if "raised" in request:
                error = exception(request["kind"], request["message"])
                setattr(error, _NUMBER, request["raised"])
                raise error
            arguments = []
            keywords = {}
            self._awaits = False
            reply: dict[str, Any]
            try:
                arguments = decode(request["args"], self._object)
                keywords = {k: decode(v, self._object) for k, v in request["keywords"].items()}
                result = self._do(request["do"], self._objects[request["handle"]], arguments, keywords)
                reply = {"result": encode(result, self._handle)}
            except BaseException as error:
                state = {name: encode(value, self._handle) for name, value in vars(error).items()}
                reply = {"error": _kind_names(type(error)), "message": str(error), "state": state}
                reply["number"] = getattr(error, _NUMBER, None)
            reply["args"] = encode([*arguments, *keywords.values()], self._handle)
            send(self._replies, reply | {"awaits": self._awaits, "printed": self._new_output()})
        os._exit(0)

    def _new_output(self) -> str:
        """The text that the program printed since the last request, at most 1 MiB, for tests that capture output."""
        buffer = self._printed.buffer
        text = buffer.getvalue()[: 1 << 20].decode("utf8", "replace")  # type: ignore[attr-defined]
        buffer.seek(0)
        buffer.truncate()
        return text

    def _object(self, number: int) -> Any:
        """The program's object with this number; for a negative number, a stand-in for a function of the tests."""
        if number >= 0:
            return self._objects[number]

        def call(*args: Any, **keywords: Any) -> Any:
            encoded_keywords = {key: encode(item, self._handle) for key, item in keywords.items()}
            send(
                self._replies,
                {"call": number, "args": [encode(item, self._handle) for item in args], "keywords": encoded_keywords},
            )
            return self.serve()

        return call

    def _named_value(self, value: Any) -> dict[str, Any]:
        if isinstance(value, type(sys)):
            return {"module": value.__name__}
        if isinstance(value, type) and issubclass(value, Exception):
            return {"value": encode(value, self._handle), "exception": _kind_names(value)}
        return {"value": encode(value, self._handle)}

    def _do(self, operation: str, target: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if operation == "call":
            result = target(*arguments, **keywords)
            self._awaits = hasattr(result, "__await__")
            if self._awaits:
                return _awaited_result(result)
            return result
        if operation == "iter":
            return iter(target)
        if operation == "__next__":
            return next(([item] for item in target), [])
        if operation == "aiter":
            return iter(_awaited_result(_items(target)))
        if operation[0] == ".":
            return getattr(target, operation[1:])
        return _SPECIAL[operation](target, *arguments)

    def _handle(self, value: Any) -> dict[str, int]:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"h": self._numbers[id(value)]}


def exception(name: str, message: str, refused_types: tuple[type, ...] = ()) -> Exception:
    """A builtin exception of the type `name`; a RuntimeError if there is no such type, or for `refused_types`."""
    kind: Any = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, refused_types):
        try:
            return kind(message)
        except TypeError:  # some types, UnicodeDecodeError among them, need more arguments
            pass
    return RuntimeError(message)


def _kind_names(kind: type[BaseException]) -> list[str]:
    """Names of an exception type and of the base classes, in order, up to and with the first builtin class."""
    names = [k.__name__ for k in kind.__mro__]
    standard = [getattr(builtins, k.__name__, None) is k for k in kind.__mro__]
    return names[: standard.index(True) + 1]


async def _awaitable(value: Any) -> Any:
    """The awaited value if `value` is awaitable, else `value` itself."""
    if hasattr(value, "__await__"):
        return await value
    return value


async def _items(asynchronous: Any) -> list[Any]:
    return [item async for item in asynchronous]


def _awaited_result(value: Any) -> Any:
    import asyncio

    return asyncio.run(_awaitable(value))


def main() -> None:
    """Run the program or the tests, as the role in the first argument says."""
    _, role, *role_arguments = sys.argv
    sys.argv = [f"{role}.py"]  # programs and unittest.main expect a file's name here
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(50_000)  # as LiveCodeBench
    _thread.stack_size(8 << 20)  # the default is the main thread's stack, half of the memory limit
    with open(SOURCE, encoding="utf8") as file:
        source = file.read()
    if role == "program":
        run_program(source, "__main__")
    elif role == "solution":
        Solution(source).serve()
    else:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a program might send this signal to its tests
        exec(compile(role_arguments[1], "<tests>", "exec", dont_inherit=True), globals())
        Tests().run(source, role_arguments[0])  # type: ignore[name-defined] # noqa: F821
        os.write(VERDICT, PASSED)


if __name__ == "__main__":
    main()
