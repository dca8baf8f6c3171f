"""The result of one check."""

from collections.abc import Callable
from typing import Literal

import msgspec

from megatron_scalerl.processes.logs import printable

GIB = 2**30
MIB = 2**20


class Check(msgspec.Struct, frozen=True):
    """The result of one check."""

    name: str
    status: Literal["ok", "warning", "failed", "skipped"]
    """`failed`: a run on this node would fail or compute something else. `warning`: the run can start, but may be
    slower or fail later. `skipped`: the check cannot be made on this node."""
    found: str
    """The state that was found on the node, with a remedy if the status is `failed` or `warning`."""

    @property
    def line(self) -> str:
        """Name and state in one line that a terminal can show."""
        return printable(" ".join(f"{self.name}: {self.found}".split()))


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """Call `check` without arguments and return the result. If the check raises OSError, return a failed check called
    `name`."""
    try:
        return check()
    except OSError as error:
        return Check(name, "failed", f"{error}; check whether the file system or the container forbids the call")
