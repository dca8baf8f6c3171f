"""Opens pickles as data: a name is looked up in an allowlist of our own functions, and nothing is imported.

Python's unpickler calls what the names of a pickle stand for, and sets the state of what it made. A name is reached
by `find_class` alone. An entry of an allowlist is a constant that cannot be changed, a `Maker`, or a class of `Built`
values, so that no pickle sets an attribute of ours. A hostile one runs no code; it can waste memory and time, up to
the end of the process. Values may contain themselves: `safe_values` copies them within bounds. Imports no torch.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any


class Refused(ValueError):
    """Content of a pickle that is not allowed. The message continues "found ..."."""


class Built:
    """A value whose state a pickle may set after construction. It is compared and hashed by identity."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Set the state. Raises TypeError or ValueError for an invalid one. A class of such values has no state."""
        raise TypeError(f"a state for a {type(self).__name__}")


class Maker(Built):
    """A function of ours that a pickle may call by name; it checks its arguments.

    It raises TypeError or ValueError for invalid ones.
    """

    __slots__ = ("_call", "name")

    def __init__(self, name: str, call: Callable[..., Any]):
        self.name, self._call = name, call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


Names = Mapping[tuple[str, str], Any]
"""The allowlist: (module, name) -> a Maker, a class of Built values, or text or None as a constant."""
Stored = Callable[[Any], Any]
"""Resolves a persistent id, which torch uses for the bytes of a tensor."""

EMPTY = Maker("OrderedDict", dict)
"""Stands for collections.OrderedDict: called without arguments, its items are set later."""


def printable(text: str) -> str:
    """Text of a file, made safe for a message: one line, at most 200 characters, no control characters."""
    return text[:200] if text.isprintable() else ascii(text)[1:-1][:200]


def decode(data: bytes, names: Names, stored: Stored | None = None) -> Any:
    """The value of the pickle `data`. Raises Refused for a name that is not in `names`, and for a damaged pickle."""
    try:
        return _Unpickler(data, names, stored).load()
    except Refused:
        raise
    except _DAMAGED as error:
        raise Refused(f"a damaged pickle ({type(error).__name__}: {printable(str(error))})") from None


_DAMAGED = (
    *(pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError, ArithmeticError),
    *(MemoryError, RecursionError),
)
"""What the unpickler raises for damage, and functions for invalid arguments."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, names: Names, stored: Stored | None):
        super().__init__(io.BytesIO(data))
        self._names, self._stored = names, stored

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._names:
            raise Refused(f"the name {printable(f'{module}.{name}')}")
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._stored is None:
            raise Refused("a persistent id")
        return self._stored(pid)
