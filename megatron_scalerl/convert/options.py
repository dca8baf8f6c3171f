"""What every conversion can be told, and how it shows its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

MAX_JOB_BYTES = 1 << 30
_MIN_JOB_BYTES = 32 << 20
_JOBS = 16
"""At least so many jobs where the checkpoint is not small."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a conversion."""

    processes: int = 1
    dtype: str | None = None
    """F32, BF16 or F16; None keeps each tensor's type."""
    verify: bool = False
    """Compare every tensor bit for bit before the result gets its name."""
    allow_nonfinite: bool = False
    console: Console | None = None
    """Where the progress bar is shown, if it is a terminal."""
    job_bytes: int | None = None
    """Size of a worker's piece of work; None chooses it."""

    def bytes_of_a_job(self, total: int) -> int:
        """Pieces of work for `total` bytes: the same for any number of processes, so that any number can go on."""
        return self.job_bytes or max(_MIN_JOB_BYTES, min(MAX_JOB_BYTES, total // _JOBS))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a conversion did."""

    tensors: int
    nbytes: int
    """Bytes of weights in the result."""
    resumed_bytes: int
    """Of these, found done by an earlier, interrupted conversion."""
    verified: bool


@contextmanager
def progress(options: Options, title: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on a terminal, nothing elsewhere; gives the function that moves it on."""
    console = options.console
    if console is None or not console.is_terminal:
        yield lambda nbytes: None
        return
    done_of_all = DownloadColumn(binary_units=True)
    columns = (TextColumn(title), BarColumn(bar_width=20), done_of_all, TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total, completed=done)
        yield lambda nbytes: bar.advance(task, nbytes)
