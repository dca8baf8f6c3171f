"""Opens pickles as data: a name is looked up in an allowlist of our own functions, and nothing is imported.

Python's unpickler calls the objects that a pickle names, and sets the state of the objects that it made. It asks for
a name in one place, `find_class`:

1. `_Unpickler.find_class` looks the name up in the allowlist, and refuses any other name.
2. An entry is a constant that cannot be changed, a `Maker`, or a subclass of `PickledObject`. It may be called.
3. The unpickler may set the state of a result. Only a `PickledObject` takes it: no pickle sets an attribute of ours.

A hostile pickle runs no code; it can waste memory and time, up to the end of the process. Imports no torch.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

_DAMAGED = (
    *(pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError, ArithmeticError),
    *(MemoryError, RecursionError),
)
"""Errors that the unpickler raises for damage, and functions for invalid arguments."""
Lookup = Callable[[str, str], Any]
"""The allowlist: (module, name) -> a Maker, a subclass of PickledObject, a constant text; None for another name."""


class RefusedPickle(ValueError):
    """A pickle has content that is not allowed. The message is a clause that a reader's own message ends with."""


class PickledObject:
    """An object that a pickle makes, and whose state it may set. It is compared and hashed by identity."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Set the state. Raises TypeError or ValueError for an invalid state; this class takes none."""
        raise TypeError(f"a {type(self).__name__} takes no state")


class Maker(PickledObject):
    """A function of ours that a pickle may call by name.

    It checks its arguments, and raises TypeError or ValueError for invalid ones.
    """

    __slots__ = ("_call", "name")

    def __init__(self, name: str, call: Callable[..., Any]):
        self.name = name
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


def printable(text: str) -> str:
    """Text of a file, made safe for a message: one line, at most 200 characters, no control characters."""
    return text[:200] if text.isprintable() else ascii(text)[1:-1][:200]


def decode(data: bytes, lookup: Lookup) -> Any:
    """The value of the pickle `data`. Raises RefusedPickle for a forbidden name, and for a damaged pickle."""
    try:
        return _Unpickler(data, lookup).load()
    except RefusedPickle:
        raise
    except _DAMAGED as error:
        raise RefusedPickle(f"the pickle is damaged ({type(error).__name__}: {printable(str(error))})") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, lookup: Lookup):
        super().__init__(io.BytesIO(data))
        self._lookup = lookup

    def find_class(self, module: str, name: str) -> Any:
        entry = self._lookup(module, name)
        if entry is None:
            raise RefusedPickle(f"the name {printable(f'{module}.{name}')} is not allowed")
        return entry
