"""Time that a part and each of its checks have."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.logs import last_error, read_log

MARGIN_S = 8.0
"""Before the part's limit, so that its processes are ended in order and its last finding is written."""
CHECK_S = 45.0
"""Of one check of an engine that runs."""


class Deadline:
    """Counts down from a part's limit, less a margin."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + max(0.0, limit_s - MARGIN_S)

    def left(self, at_most: float = float("inf")) -> float:
        """Seconds left, not below 0.1 and not above `at_most`."""
        return max(0.1, min(at_most, self._end - time.monotonic()))

    def short_of(self, seconds: float, why: str) -> str:
        """Why what needs `seconds` is not started, "" where they are left. why: where the number comes from."""
        if self.left() >= seconds:
            return ""
        return f"expected {seconds:.0f} s of the part's time ({why}), found {self.left():.0f} s left"


@contextlib.asynccontextmanager
async def limited(record: Recorder, check: str, seconds: float, log: Path | None = None) -> AsyncIterator[None]:
    """An exception inside, or no end within `seconds`, becomes the failure of `check`, with the log's last error."""
    with record.guarded(check):
        try:
            async with asyncio.timeout(seconds):
                yield
        except Exception as error:
            ended = not isinstance(error, TimeoutError)
            what = (
                str(error) or type(error).__name__ if ended else f"expected an end within {seconds:.0f} s, found none"
            )
            said = "" if log is None else last_error(read_log(log))
            raise RuntimeError(
                f"{what}; {log.name}: {said}" if log is not None and said and said not in what else what
            ) from error
