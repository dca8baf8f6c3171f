"""A stand-in for a conversion's job: reports its process id and never finishes."""

import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StallingJob:
    """Reports its process id as the number of finished bytes."""

    name: str
    nbytes: int = 1

    def run(self, context):
        """Waits for a signal."""
        context.report(os.getpid())
        signal.pause()
