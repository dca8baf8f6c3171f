"""What runs beside a program in the sandbox: this file's text, in its own interpreter. Standard library only.

Roles, by the first argument:

    solution  runs the program, then calls its functions for the process with the tests
    tests     runs tests in a process of their own, whose names for the program's functions are `Remote`s

The program has no access to the process with the tests: it sees arguments and chooses results, no more. Values cross
as JSON and are copies; other objects stay with the program, and the tests hold a `Remote`.
"""

from __future__ import annotations

import ast
import builtins
import json
import operator
import os
import struct
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, BinaryIO

SOURCE, REQUESTS, REPLIES, VERDICT = 3, 4, 5, 6
"""File descriptors."""
PASSED = b"passed"
_HEAD = struct.Struct("!Q")
_UNPLAIN = (StopIteration, StopAsyncIteration)
"""Exceptions that would end a loop of the tests instead of failing them."""
_SPECIAL: dict[str, Callable[..., Any]] = {
    "__getitem__": operator.getitem,
    "__len__": len,
    "__str__": str,
    "__repr__": repr,
}


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
    if tag == "d":
        return {decode(key, handle): decode(item, handle) for key, item in content}
    return {"t": tuple, "f": frozenset, "s": set}[tag](decode(item, handle) for item in content)


def send(file: BinaryIO, message: Any) -> None:
    """Write one message."""
    body = json.dumps(message).encode()
    file.write(_HEAD.pack(len(body)) + body)
    file.flush()


def receive(file: BinaryIO) -> Any:
    """The next message, None at the end."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    body = file.read(_HEAD.unpack(head)[0])
    return json.loads(body)


def main_module(source: str) -> dict[str, Any]:
    """Run a program as __main__; returns its namespace."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(source, "program.py", "exec"), module.__dict__)
    return module.__dict__


class Solution:
    """The program's side: answers calls until the tests end."""

    def __init__(self, source: str) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        names = main_module(source)
        self._requests, self._replies = os.fdopen(REQUESTS, "rb"), os.fdopen(REPLIES, "wb")
        public = {name: value for name, value in names.items() if not name.startswith("__")}
        send(self._replies, {name: self._named(value) for name, value in public.items()})

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
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        return {"value": encode(value, self._handle)}

    def _do(self, what: str, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if what == "call":
            return target(*arguments, **keywords)
        if what == "iter":
            return list(target)
        return getattr(target, what[1:]) if what[0] == "." else _SPECIAL[what](target, *arguments)

    def _handle(self, value: Any) -> dict[str, int]:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"h": self._numbers[id(value)]}


class Remote:
    """An object of the program: it can be called, asked for attributes and iterated over.

    It equals itself only, so that no method of the program's object decides a comparison.
    """

    def __init__(self, tests: Tests, number: int) -> None:
        self._tests, self._number = tests, number

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._tests.ask("call", self._number, args, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._tests.ask("." + name, self._number)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tests.ask("iter", self._number))


def _special(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._tests.ask(name, self._number, args)


for _name in _SPECIAL:
    setattr(Remote, _name, _special(_name))


class Tests:
    """The side of the tests."""

    def __init__(self) -> None:
        self._requests, self._replies = os.fdopen(REQUESTS, "wb"), os.fdopen(REPLIES, "rb")
        self._remotes: dict[int, Remote] = {}

    def run(self, source: str) -> None:
        """Run the tests: the text itself, then its functions called test*. Raises what a failing test raises."""
        tree = ast.parse(source)
        names = self._names(self._answer(), tree)
        module = types.ModuleType("solution")
        module.__dict__.update(names)
        sys.modules["solution"] = module
        space = {"__name__": "tests", **names}
        exec(compile(tree, "tests.py", "exec"), space)
        for name, value in list(space.items()):
            if name.startswith("test") and isinstance(value, types.FunctionType):
                value()

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

    def _names(self, found: dict[str, Any], tree: ast.AST) -> dict[str, Any]:
        """Names of the program for the tests.

        One that is also a builtin is the builtin, so that the program cannot replace `all` or `isinstance`, unless
        the tests use no other name of the program: then it is what they test.
        """
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for alias in n.names}
        own = {name for name in used & found.keys() if "module" not in found[name] and not name.startswith("__")}
        names = {name: decode(found[name]["value"], self._remote) for name in own}
        if any(not hasattr(builtins, name) for name in own):
            names = {name: value for name, value in names.items() if not hasattr(builtins, name)}
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
    with open(SOURCE, encoding="utf8") as file:
        source = file.read()
    if sys.argv[1] == "solution":
        Solution(source).serve()
    else:
        Tests().run(source)
        os.write(VERDICT, PASSED)


if __name__ == "__main__":
    main()
