"""One conversion: its options, the folder that it writes in, and the loop that reads, checks and writes tensors.

The result is written in `.NAME.partial`, beside its place, and gets its name once everything is written and synced.
A failure removes that folder. What a killed conversion left is removed by the next one to the same place.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import xxhash
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_scalerl.checkpoints.assembly import Assembly, Sources, bands, has_nonfinite
from megatron_scalerl.checkpoints.atomic_io import lock_file, publish_folder
from megatron_scalerl.processes.logs import size
from megatron_scalerl.record import record

_RESERVE = 64 << 20
"""Bytes that stay free."""


@record
class Options:
    """Options of a conversion."""

    dtype: str | None = None
    """F32, BF16 or F16; None keeps each tensor's type."""
    verify: bool = False
    """Compare every tensor bit for bit before the result gets its name."""
    allow_nonfinite: bool = False
    console: Console | None = None
    """Where the progress bar is shown, if it is a terminal."""


@record
class Summary:
    """What a conversion did."""

    tensors: int
    nbytes: int
    """Bytes of weights in the result."""
    verified: bool


@record
class Copier:
    """Reads tensors band by band, checks and writes them; a tensor is never in memory as a whole."""

    sources: Sources
    options: Options
    on_bytes: Callable[[int], None]
    """Called with the bytes of every band that was written."""

    def checksum(self, assembly: Assembly, *, policy: bool = True) -> str:
        """The checksum of a tensor. Raises ValueError for one of the policy that is not finite."""
        return self._checksum(assembly, policy, lambda rows: None)

    def write(self, file: IO[bytes], assembly: Assembly, *, policy: bool = True) -> str:
        """Append a tensor to a file and return its checksum. Raises like `checksum`."""

        def append(rows: np.ndarray) -> None:
            file.write(rows.data)
            self.on_bytes(rows.nbytes)

        return self._checksum(assembly, policy, append)

    def rows(self, assembly: Assembly, start: int, stop: int) -> Iterator[np.ndarray]:
        """Rows `start` to `stop` of a tensor, to be written by the caller."""
        for rows in bands(assembly, self.sources, start, stop):
            yield rows
            self.on_bytes(rows.nbytes)

    def _checksum(self, assembly: Assembly, policy: bool, use: Callable[[np.ndarray], None]) -> str:
        state = xxhash.xxh3_64()
        check = policy and not self.options.allow_nonfinite
        for rows in bands(assembly, self.sources):
            if check and has_nonfinite(rows, assembly.dtype):
                raise ValueError(f"{assembly.name}: the tensor has NaN or Inf; --allow-nonfinite accepts them")
            content = rows.reshape(-1).view(np.uint8)
            state.update(content.data)
            use(content)
        return state.hexdigest()


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write. After the block it is on the disk, and a comparison reads it from there.

    Raises ValueError for a full disk, a limit on the size of files, and a disk that fails.
    """
    try:
        with path.open("wb", buffering=1 << 16) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise ValueError(f"{path.name}: it cannot be written: {error.strerror}") from None


@contextmanager
def progress(options: Options, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar of bytes on a terminal, nothing elsewhere; yields the function that advances it."""
    console = options.console
    if console is None or not console.is_terminal:
        yield lambda nbytes: None
        return
    bytes_column = DownloadColumn(binary_units=True)
    columns = (TextColumn(title), BarColumn(bar_width=20), bytes_column, TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


@contextmanager
def result_folder(out: Path, nbytes: int) -> Iterator[Path]:
    """A folder for a result of `nbytes`, which gets its name `out` after the block.

    Raises ValueError if `out` exists, another process converts to it, or the disk has too little space.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: this path exists, and nothing is overwritten; name another")
    if not out.parent.is_dir():
        raise ValueError(f"{out}: the folder {out.parent} does not exist; make it first")
    state = out.with_name(f".{out.name}.partial")
    state.mkdir(exist_ok=True)
    try:
        lock = lock_file(state / "lock")
    except BlockingIOError:
        raise ValueError(f"{out}: another conversion to this path is running") from None
    result = state / "result"
    try:
        if result.exists():
            shutil.rmtree(result)
        _check_space(out, nbytes)
        result.mkdir()
        yield result
        publish_folder(result, out)
    finally:
        shutil.rmtree(state)
        os.close(lock)


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if needed + _RESERVE > free:
        raise ValueError(f"{out}: the disk has {size(free)} free; the conversion needs {size(needed + _RESERVE)}")
