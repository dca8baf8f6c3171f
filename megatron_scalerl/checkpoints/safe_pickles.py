"""Decodes pickles as data: nothing is imported, and only our own functions are called.

Python's own unpickler imports every name that it finds, and calls what it imported. This decoder implements only the
opcodes that plain values and records need. It looks a name up, as the exact pair (module, name), in the caller's
allowlist, which maps it to one of our functions. Memory and time are linear in the size of the pickle: no opcode
allocates more than a few hundred bytes per byte of the pickle, copied bytes are counted, and dictionary keys and the
depth of tuples, whose hash is recursive, are bounded. Lists, dictionaries and records may contain themselves: never
compare, print or traverse a decoded value without a bound. Imports no torch.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class Refused(ValueError):
    """Content of a pickle that is not allowed. The message continues "found ..."."""


@dataclass(frozen=True, slots=True)
class Maker:
    """A function of ours that a pickle may call by name; it checks its arguments.

    It raises TypeError or ValueError for invalid ones.
    """

    name: str
    call: Callable[..., Any]


class Built:
    """A value whose state a pickle may set after construction. It is compared and hashed by identity."""

    __slots__ = ()

    def set_state(self, state: Any) -> int:
        """Set the state; returns the bytes copied from it. Raises TypeError or ValueError for an invalid state."""
        raise NotImplementedError


Names = Mapping[tuple[str, str], Any]
"""The allowlist: (module, name) -> a Maker, or the constant that the name stands for."""
Stored = Callable[[Any], Any]
"""Resolves a persistent id, which torch uses for the bytes of a tensor."""

_ARGUMENTS = 256
"""Arguments of a call; a path has one per component."""
_TUPLES = 16
"""Nesting depth of tuples."""
_TEXT_KEY = 4096
"""Characters of a dictionary key."""
_NUMBER_KEYS = range(1 << 17)
"""Integers that may be dictionary keys. Hashes of others can be made to collide, at a cost that is quadratic in
their number; hashes of text are randomized."""
_COPIES = 4
_COPIES_AT_LEAST = 1 << 16
"""Bytes that calls and states may copy: this many per byte of the pickle, and at least that many. A pickle of
protocol 2 stores an array's bits as text, from which bytes are made, from which the array is made."""


def printable(text: str) -> str:
    """Text of a file, made safe for a message: one line, at most 200 characters, no control characters."""
    return text[:200] if text.isprintable() else ascii(text)[1:-1][:200]


def empty() -> dict[Any, Any]:
    """Stands for collections.OrderedDict: called without arguments, its items are set later."""
    return {}


def decode(data: bytes, names: Names, stored: Stored | None = None) -> Any:
    """The value of the pickle `data`. Raises Refused for a name, an opcode or a call that is not allowed.

    Dictionary keys may be text, small numbers and Built values, which are cheap to hash. The value may contain
    itself, and a part of it may occur in many places.
    """
    decoder = _Decoder(data, names, stored)
    try:
        return decoder.run()
    except (IndexError, KeyError, struct.error, UnicodeDecodeError):
        raise Refused(f"a damaged pickle (at byte {decoder.at} of {len(data)})") from None
    except RecursionError:
        raise Refused(f"values nested too deeply (at byte {decoder.at})") from None


class _Decoder:
    """A stack machine over the bytes of one pickle."""

    def __init__(self, data: bytes, names: Names, stored: Stored | None):
        self.data, self.at = data, 0
        self.names, self.stored = names, stored
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        """The stacks below the current mark."""
        self.memo: list[Any] = []
        self.depths: dict[int, int] = {}
        """id -> depth, of tuples that contain tuples."""
        self.deep: list[tuple[Any, ...]] = []
        """Keeps these tuples alive, so that no other object gets one of their ids."""
        self.copies_left = max(_COPIES_AT_LEAST, _COPIES * len(data))

    def run(self) -> Any:
        data, handlers = self.data, _HANDLERS
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            handler = handlers.get(code)
            if handler is None:
                raise Refused(f"the pickle opcode {_opcode_name(code)} (at byte {self.at - 1})")
            handler(self)

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise IndexError(size)
        return self.data[start : self.at]

    def number(self, form: struct.Struct) -> Any:
        """The next number."""
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def line(self) -> str:
        """The next line of text."""
        start, self.at = self.at, self.data.find(b"\n", self.at) + 1
        if self.at == 0:
            raise IndexError(start)
        return self.data[start : self.at - 1].decode("utf8")

    def marked(self) -> list[Any]:
        """The items pushed since the last mark."""
        items, self.stack = self.stack, self.outer.pop()
        return items

    def tuple_of(self, items: list[Any]) -> tuple[Any, ...]:
        """The items as a tuple. Raises Refused for tuples nested deeper than in any checkpoint."""
        made = tuple(items)
        if tuple in map(type, items):
            depth = 1 + max([self.depths.get(id(item), 1) for item in items if type(item) is tuple])
            if depth > _TUPLES:
                raise Refused(f"tuples nested more than {_TUPLES} deep (at byte {self.at})")
            self.depths[id(made)] = depth
            self.deep.append(made)
        return made

    def memoize(self, index: int) -> None:
        """Put the top of the stack into the memo, which pickles fill in order."""
        if index < len(self.memo):
            self.memo[index] = self.stack[-1]
        elif index == len(self.memo):
            self.memo.append(self.stack[-1])
        else:
            raise IndexError(index)

    def copied(self, size: int) -> None:
        """Count copied bytes. Raises Refused if a part was copied over and over."""
        self.copies_left -= size
        if self.copies_left < 0:
            raise Refused(f"parts copied over and over (at byte {self.at})")

    def named(self, module: str, name: str) -> Any:
        """The allowlist's entry of a name."""
        if type(module) is not str or type(name) is not str:
            raise Refused("a name that is not text")
        try:
            return self.names[module, name]
        except KeyError:
            raise Refused(f"the name {printable(f'{module}.{name}')}") from None


_U8, _U16, _I32, _U32 = (struct.Struct(form) for form in ("<B", "<H", "<i", "<I"))
_U64, _F64 = struct.Struct("<Q"), struct.Struct(">d")
_STOP = pickle.STOP[0]

_HANDLERS: dict[int, Callable[[_Decoder], None]] = {}


def _opcode_name(code: int) -> str:
    names = {getattr(pickle, n)[0]: n for n in pickle.__all__ if n.isupper() and type(getattr(pickle, n)) is bytes}
    return names.get(code, str(code))


def _handles(opcode: bytes) -> Callable[[Callable[[_Decoder], None]], Callable[[_Decoder], None]]:
    def register(handler: Callable[[_Decoder], None]) -> Callable[[_Decoder], None]:
        _HANDLERS[opcode[0]] = handler
        return handler

    return register


def _pushes(opcode: bytes, value: Callable[[_Decoder], Any]) -> None:
    def push(decoder: _Decoder) -> None:
        # Evaluated first: `marked` replaces the stack.
        found = value(decoder)
        decoder.stack.append(found)

    _HANDLERS[opcode[0]] = push


_pushes(pickle.NONE, lambda d: None)
_pushes(pickle.NEWTRUE, lambda d: True)
_pushes(pickle.NEWFALSE, lambda d: False)
_pushes(pickle.BININT, lambda d: d.number(_I32))
_pushes(pickle.BININT1, lambda d: d.number(_U8))
_pushes(pickle.BININT2, lambda d: d.number(_U16))
_pushes(pickle.LONG1, lambda d: int.from_bytes(d.take(d.number(_U8)), "little", signed=True))
_pushes(pickle.BINFLOAT, lambda d: d.number(_F64))
_pushes(pickle.SHORT_BINUNICODE, lambda d: d.take(d.number(_U8)).decode("utf8"))
_pushes(pickle.BINUNICODE, lambda d: d.take(d.number(_U32)).decode("utf8"))
_pushes(pickle.SHORT_BINBYTES, lambda d: d.take(d.number(_U8)))
_pushes(pickle.BINBYTES, lambda d: d.take(d.number(_U32)))
_pushes(pickle.EMPTY_LIST, lambda d: [])
_pushes(pickle.EMPTY_DICT, lambda d: {})
_pushes(pickle.EMPTY_TUPLE, lambda d: ())
_pushes(pickle.TUPLE, lambda d: d.tuple_of(d.marked()))
_pushes(pickle.BINGET, lambda d: d.memo[d.number(_U8)])
_pushes(pickle.LONG_BINGET, lambda d: d.memo[d.number(_U32)])
_pushes(pickle.GLOBAL, lambda d: d.named(d.line(), d.line()))


@_handles(pickle.PROTO)
def _proto(decoder: _Decoder) -> None:
    version = decoder.number(_U8)
    if version > pickle.HIGHEST_PROTOCOL:
        raise Refused(f"pickle protocol {version}")


@_handles(pickle.FRAME)
def _frame(decoder: _Decoder) -> None:
    size = decoder.number(_U64)
    if size > len(decoder.data) - decoder.at:
        raise IndexError(size)


@_handles(pickle.MARK)
def _mark(decoder: _Decoder) -> None:
    decoder.outer.append(decoder.stack)
    decoder.stack = []


def _tuple_of(size: int) -> Callable[[_Decoder], None]:
    def handler(decoder: _Decoder) -> None:
        stack = decoder.stack
        if len(stack) < size:
            raise IndexError(size)
        stack[-size:] = [decoder.tuple_of(stack[-size:])]

    return handler


_HANDLERS[pickle.TUPLE1[0]] = _tuple_of(1)
_HANDLERS[pickle.TUPLE2[0]] = _tuple_of(2)
_HANDLERS[pickle.TUPLE3[0]] = _tuple_of(3)


@_handles(pickle.MEMOIZE)
def _memoize(decoder: _Decoder) -> None:
    decoder.memo.append(decoder.stack[-1])


@_handles(pickle.BINPUT)
def _binput(decoder: _Decoder) -> None:
    decoder.memoize(decoder.number(_U8))


@_handles(pickle.LONG_BINPUT)
def _long_binput(decoder: _Decoder) -> None:
    decoder.memoize(decoder.number(_U32))


@_handles(pickle.STACK_GLOBAL)
def _stack_global(decoder: _Decoder) -> None:
    name = decoder.stack.pop()
    module = decoder.stack.pop()
    decoder.stack.append(decoder.named(module, name))


@_handles(pickle.APPEND)
def _append(decoder: _Decoder) -> None:
    item = decoder.stack.pop()
    _extend(decoder.stack[-1], [item])


@_handles(pickle.APPENDS)
def _appends(decoder: _Decoder) -> None:
    items = decoder.marked()
    _extend(decoder.stack[-1], items)


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        raise Refused(f"items appended to a {type(target).__name__}")
    target.extend(items)


@_handles(pickle.SETITEM)
def _setitem(decoder: _Decoder) -> None:
    value = decoder.stack.pop()
    key = decoder.stack.pop()
    _update(decoder.stack[-1], [key, value])


@_handles(pickle.SETITEMS)
def _setitems(decoder: _Decoder) -> None:
    items = decoder.marked()
    _update(decoder.stack[-1], items)


def _update(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or len(items) % 2:
        raise Refused(f"items set in a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2]):
        kind = type(key)
        if kind is str:
            if len(key) > _TEXT_KEY:
                raise Refused(f"a dictionary's key of {len(key)} characters")
        elif kind is int:
            if key not in _NUMBER_KEYS:
                raise Refused(f"a dictionary's key that is not from 0 to {_NUMBER_KEYS[-1]}")
        elif not isinstance(key, Built):
            raise Refused(f"a {kind.__name__} as a dictionary's key")
        target[key] = value


@_handles(pickle.REDUCE)
@_handles(pickle.NEWOBJ)
def _reduce(decoder: _Decoder) -> None:
    arguments = decoder.stack.pop()
    maker = decoder.stack.pop()
    if type(maker) is not Maker or type(arguments) is not tuple:
        raise Refused(f"a call of a {type(maker).__name__}")
    if len(arguments) > _ARGUMENTS:
        raise Refused(f"{maker.name} with {len(arguments)} arguments")
    try:
        made = maker.call(*arguments)
    except _OTHER as error:
        raise _other(maker.name, error) from None
    if type(made) is bytes:
        decoder.copied(len(made))
    decoder.stack.append(made)


@_handles(pickle.BUILD)
def _build(decoder: _Decoder) -> None:
    state = decoder.stack.pop()
    target = decoder.stack[-1]
    if not isinstance(target, Built):
        raise Refused(f"a state for a {type(target).__name__}")
    try:
        copied = target.set_state(state)
    except _OTHER as error:
        raise _other(type(target).__name__, error) from None
    if copied:
        decoder.copied(copied)


@_handles(pickle.BINPERSID)
def _binpersid(decoder: _Decoder) -> None:
    if decoder.stored is None:
        raise Refused("a persistent id")
    pid = decoder.stack.pop()
    try:
        decoder.stack.append(decoder.stored(pid))
    except _OTHER as error:
        raise _other("persistent id", error) from None


_OTHER = TypeError, ValueError, OverflowError
"""What functions raise for invalid arguments."""


def _other(name: str, error: Exception) -> Refused:
    return Refused(f"{name} with other arguments than it takes ({printable(str(error))})")
