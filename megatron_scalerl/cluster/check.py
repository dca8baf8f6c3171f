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
    """`failed`: a run on this node would fail or compute something else. `warning`: it can start, but may be slower
    or fail later. `skipped`: this node cannot be asked."""
    found: str
    """The state of the node; where that is not the one that a run needs, also what to do."""

    @property
    def line(self) -> str:
        """Name and state in one line that a terminal can show."""
        return printable(" ".join(f"{self.name}: {self.found}".split()))


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """The result of `check`; failed if the operating system refuses what it asks for (OSError)."""
    try:
        return check()
    except OSError as error:
        return Check(name, "failed", f"{error}; see whether the file system or the container denies it")
