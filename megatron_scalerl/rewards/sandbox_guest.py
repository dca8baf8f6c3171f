"""Runs a program in the sandbox, as the text of its interpreter's -c. Standard library only.

Roles, by the first argument:

    program   runs the program, which reads standard input
    solution  runs the program, then calls its functions for the process with the tests
    tests     runs tests, in another process, by the text of sandbox_tests.py, which is the third argument

The program has no access to the process with the tests: it sees arguments and chooses results, no more. Values cross
as JSON and are copies; other objects stay with the program, and the tests hold a `Remote`.

Programs are run as competition sites run them: names of the standard library that they use and do not import are
imported (`SITE_MODULES`), annotations are not evaluated, integers may have any number of digits.
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
if TYPE_CHECKING:  # every run of a program pays for what is imported here
    import ast
    from collections.abc import Callable
    from typing import Any, BinaryIO

SOURCE = 3
"""File descriptor of the program's or the tests' text; the next ones are for requests, replies and the verdict."""
REQUESTS = 4
REPLIES = 5
VERDICT = 6
PASSED = b"passed"
SITE_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
"""Modules that competition sites import for every program, with all of their names; later ones win."""
_HEAD = 8
"""Bytes of a message's length."""
_VALUES = {
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "fractions": ("Fraction",),
    "decimal": ("Decimal",),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "builtins": ("range", "bytearray"),
}
"""Types of the standard library whose values cross as copies, by the arguments that make them and their items."""
TYPES = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object)
"""Types that tests may hand to a program as they are."""
_NUMBER = "_number_of_tests_"
"""Attribute of an exception that a function of the tests raised."""
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
"""Operations on two objects of the program. With a value of the tests, the program would see what it must equal."""
_SPECIAL |= _OF_TWO


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Plain data as JSON values; `other` encodes any object that is not plain data."""
    if value is None or isinstance(value, bool):
        return value
    # of a subclass, whose methods the program wrote, the plain value crosses
    for plain in (str, int, float):
        if isinstance(value, plain):
            return plain(value)
    module = type(value).__module__
    name = type(value).__name__
    if name in _VALUES.get(module, ()):
        _, arguments, *rest = value.__reduce__()
        items = next(filter(None, rest[1:]), ())
        return {"v": [module, name, encode(list(arguments), other), encode(list(items), other)]}
    if isinstance(value, list):
        return [encode(item, other) for item in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"T": [name, encode(list(value._fields), other), encode(list(value), other)]}
    for tag, kind in (("t", tuple), ("f", frozenset), ("s", set)):
        if isinstance(value, kind):
            return {tag: [encode(item, other) for item in value]}
    if isinstance(value, dict):
        return {"d": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"b": value.decode("latin-1")}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
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
        made = getattr(__import__(module), name)(*arguments)
        if items:
            fill(made, items)
        return made
    if tag == "d":
        return {decode(key, handle): decode(item, handle) for key, item in content}
    return {"t": tuple, "f": frozenset, "s": set}[tag](decode(item, handle) for item in content)


def fill(container: Any, items: Any) -> None:
    """Add items to a list, a dict, a set, or a type like them."""
    add = getattr(container, "extend", None) or container.update
    add(items)


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


def site_names(source: str) -> dict[str, Any]:
    """Names of `SITE_MODULES`, and these modules, that a program uses and nothing else gives it."""
    used: set[str] = set()
    bound = set(dir(builtins))
    tables = [_symtable.symtable(source, "<text>", "exec")]
    for table in tables:
        tables += table.children
        for name, flags in table.symbols.items():
            (bound if flags & _symtable.DEF_BOUND else used).add(name)
    missing = {name for name in used - bound if not name.startswith("_")}
    names: dict[str, Any] = {}
    for module in map(__import__, SITE_MODULES if missing else ()):
        names |= {name: getattr(module, name) for name in missing if hasattr(module, name)}
    return names | {name: sys.modules[name] for name in missing & set(SITE_MODULES)}


def run_as(name: str, source: str, given: dict[str, Any], tree: ast.Module | None = None) -> dict[str, Any]:
    """Run a text as the module `name`; returns the names that it binds to other values than `given`.

    tree: the text's tree, if it was changed.
    """
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    module = type(sys)(name)
    sys.modules[name] = module
    module.__file__ = sys.argv[0]
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
    return run_as(name, source, site_names(source))


class Solution:
    """The program's side: answers calls until the tests end."""

    def __init__(self, source: str):
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        names = run_program(source, "solution")
        self._requests = os.fdopen(REQUESTS, "rb")
        self._replies = os.fdopen(REPLIES, "wb")
        send(self._replies, {name: self._named(value) for name, value in names.items()})
        sys.stdout = io.TextIOWrapper(io.BytesIO(), "utf8", "backslashreplace", write_through=True)
        self._printed = sys.stdout

    def serve(self) -> Any:
        """Answer requests in order, until the tests end or return the result of a function of theirs."""
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
                reply = {"error": _kinds(type(error)), "message": str(error), "state": state}
                reply["number"] = getattr(error, _NUMBER, None)
            reply["args"] = encode([*arguments, *keywords.values()], self._handle)
            send(self._replies, reply | {"awaits": self._awaits, "printed": self._new_output()})
        os._exit(0)

    def _new_output(self) -> str:
        """The program's output since the last call, for tests that look at it; at most 1 MiB."""
        buffer = self._printed.buffer
        text = buffer.getvalue()[: 1 << 20].decode("utf8", "replace")  # type: ignore[attr-defined]
        buffer.seek(0)
        buffer.truncate()
        return text

    def _object(self, number: int) -> Any:
        """An object of the program; for a negative number a function of the tests, which runs in their process."""
        if number >= 0:
            return self._objects[number]

        def call(*args: Any, **keywords: Any) -> Any:
            named = {key: encode(item, self._handle) for key, item in keywords.items()}
            send(
                self._replies,
                {"call": number, "args": [encode(item, self._handle) for item in args], "keywords": named},
            )
            return self.serve()

        return call

    def _named(self, value: Any) -> dict[str, Any]:
        if isinstance(value, type(sys)):
            return {"module": value.__name__}
        if isinstance(value, type) and issubclass(value, Exception):
            return {"value": encode(value, self._handle), "exception": _kinds(value)}
        return {"value": encode(value, self._handle)}

    def _do(self, what: str, target: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if what == "call":
            result = target(*arguments, **keywords)
            self._awaits = hasattr(result, "__await__")
            if self._awaits:
                return _awaited(result)
            return result
        if what == "iter":
            return iter(target)
        if what == "__next__":
            return next(([item] for item in target), [])
        if what == "aiter":
            return iter(_awaited(_items(target)))
        if what[0] == ".":
            return getattr(target, what[1:])
        return _SPECIAL[what](target, *arguments)

    def _handle(self, value: Any) -> dict[str, int]:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"h": self._numbers[id(value)]}


def exception(name: str, message: str, refused: tuple[type, ...] = ()) -> Exception:
    """An exception of the standard library, or a RuntimeError. refused: types that it may not have."""
    kind: Any = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, refused):
        try:
            return kind(message)
        except TypeError:  # it needs other arguments
            pass
    return RuntimeError(message)


def _kinds(kind: type[BaseException]) -> list[str]:
    """Names of an exception's classes up to the first builtin one."""
    names = [k.__name__ for k in kind.__mro__]
    standard = [getattr(builtins, k.__name__, None) is k for k in kind.__mro__]
    return names[: standard.index(True) + 1]


async def _awaitable(value: Any) -> Any:
    """A result of the program is awaited in its own process."""
    if hasattr(value, "__await__"):
        return await value
    return value


async def _items(asynchronous: Any) -> list[Any]:
    return [item async for item in asynchronous]


def _awaited(value: Any) -> Any:
    import asyncio

    return asyncio.run(_awaitable(value))


def main() -> None:
    """Play the role of the first argument."""
    _, role, *given = sys.argv
    sys.argv = [f"{role}.py"]  # as programs and unittest.main expect it
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(50_000)  # as LiveCodeBench does
    _thread.stack_size(8 << 20)  # else as large as the main thread's
    with open(SOURCE, encoding="utf8") as file:
        source = file.read()
    if role == "program":
        run_program(source, "__main__")
    elif role == "solution":
        Solution(source).serve()
    else:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program may send one
        exec(compile(given[1], "<tests>", "exec", dont_inherit=True), globals())
        Tests().run(source, given[0])  # type: ignore[name-defined] # noqa: F821
        os.write(VERDICT, PASSED)


if __name__ == "__main__":
    main()
