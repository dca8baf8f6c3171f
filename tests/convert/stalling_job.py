"""A stand-in for a conversion's job: says who it is, and never ends."""

import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StallingJob:
    """Reports its process's id as the number of bytes that are done."""

    name: str
    nbytes: int = 1

    def run(self, context):
        """Waits for the signal that ends it."""
        context.report(os.getpid())
        signal.pause()
