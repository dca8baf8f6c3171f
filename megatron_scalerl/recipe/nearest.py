"""Error messages for unknown keys, which name the nearest valid one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


def check_keys(where: str, given: Iterable[object], known: Iterable[str], *, expected: str) -> None:
    """Raise ValueError for the first of the `given` keys that is not `known`; arguments as for `unknown_key`."""
    names = list(known)
    for key in given:
        if key not in names:
            raise ValueError(f"{where}: {unknown_key(str(key), names, expected=expected)}")


def unknown_key(key: str, known: Iterable[str], *, expected: str) -> str:
    """`expected ..., found KEY; the nearest is ...`.

    Dotted keys are compared as a whole and by their last part. expected: what `known` holds, as in "a recipe key".
    """
    last = key.rsplit(".", 1)[-1]

    def similarity(candidate: str) -> float:
        whole = SequenceMatcher(None, key, candidate).ratio()
        return whole + SequenceMatcher(None, last, candidate.rsplit(".", 1)[-1]).ratio()

    return f"expected {expected}, found {key}; the nearest is {max(known, key=similarity)}"
