"""The result of one check."""

from collections.abc import Callable
from typing import Literal

import msgspec

from megatron_scalerl.processes.logs import printable

Status = Literal["ok", "warning", "failed", "skipped"]
GIB = 2**30
MIB = 2**20


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check. Produced by `ok`, `warning`, `failed` and `skipped`."""

    name: str
    status: Status
    """`warning`: a run can start, but may be slower or fail later. `skipped`: this node cannot be asked."""
    found: str
    """The state of the node in one line, or why the check was skipped."""
    expected: str = ""
    """The state that a run needs; "" where the check passed or was skipped."""
    remedy: str = ""
    """Advice to the user; "" where the check passed or was skipped."""


def ok(name: str, found: str) -> Check:
    """A check that passed."""
    return Check(name=name, status="ok", found=_line(found))


def skipped(name: str, why: str) -> Check:
    """A check that does not apply to this node or cannot be made on it."""
    return Check(name=name, status="skipped", found=_line(why))


def warning(name: str, *, expected: str, found: str, remedy: str) -> Check:
    """A run can start, but may be slower or fail later."""
    return Check(name=name, status="warning", expected=expected, found=_line(found), remedy=remedy)


def failed(name: str, *, expected: str, found: str, remedy: str) -> Check:
    """A run on this node would fail or compute something else."""
    return Check(name=name, status="failed", expected=expected, found=_line(found), remedy=remedy)


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """The result of `check`; failed if the operating system refuses what it asks for (OSError)."""
    try:
        return check()
    except OSError as error:
        reason = error.strerror or str(error)
        if error.filename:
            reason = f"{error.filename}: {reason}"
        return failed(
            name,
            expected="an answer of the operating system",
            found=reason,
            remedy="see whether the file system or the container denies it",
        )


def _line(text: str) -> str:
    return printable(" ".join(text.split()))
